"""Observations on disk: what comes back, who can read it, and what is dropped."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flwr_leakage.audit.assumed import Inputs
from flwr_leakage.audit.kept import FORMAT, Kept, KeptObservations
from flwr_leakage.audit.truth import Truth
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, Update

SPEC = InputSpec((1, 2, 2), 3, mean=(0.5,), std=(0.25,))


def kept(server_round=1, client_id=0, truth=None):
    draw = torch.Generator().manual_seed(client_id)
    params = {"w": torch.randn(3, 4, generator=draw), "b": torch.zeros(3).double()}
    buffers = {"n": torch.tensor(7), "m": torch.ones(2).half()}
    delta = {name: 2 * value + 1 for name, value in params.items()}
    schedule = LocalSchedule(0.1, 2, 8, momentum=0.9, weight_decay=0.01)
    update = Update(delta, buffers, schedule, 16)
    seen = Observation(server_round, client_id, params, buffers, update)
    return Kept(seen, Inputs(SPEC, "batch", 0.1), truth)


def test_an_observation_comes_back_as_it_was(tmp_path):
    batch = Batch(torch.rand(2, 1, 2, 2), torch.tensor([1, 2]))
    before = kept(3, 5, Truth(batch, batch))
    store = KeptObservations(tmp_path / "kept")
    assert store.keep(3, [before, kept(3, 2)]) == []
    (other, after), problems = KeptObservations(tmp_path / "kept").read(3)
    assert (problems, other.truth, other.observation.client_id) == ([], None, 2)
    for group in ("params", "buffers"):
        mine, theirs = getattr(before.observation, group), getattr(after.observation, group)
        assert {n: v.dtype for n, v in mine.items()} == {n: v.dtype for n, v in theirs.items()}
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    mine, theirs = before.observation.update, after.observation.update
    assert all(torch.equal(mine.delta[name], theirs.delta[name]) for name in mine.delta)
    assert replace(mine, delta={}, buffers={}) == replace(theirs, delta={}, buffers={})
    assert after.inputs == (SPEC, "batch", 0.1)
    assert torch.equal(after.truth.private.inputs, batch.inputs)


def test_only_the_owner_can_read(tmp_path):
    KeptObservations(tmp_path / "kept").keep(1, [kept()])
    paths = [tmp_path / "kept", *(tmp_path / "kept").rglob("*")]
    modes = {oct(path.stat().st_mode)[-3:] for path in paths if path.is_file()}
    folders = {oct(path.stat().st_mode)[-3:] for path in paths if path.is_dir()}
    assert (modes, folders) == ({"600"}, {"700"})


@pytest.mark.parametrize(
    ("policy", "left", "said"),
    [
        ("oldest", [3, 4], ["round 1", "round 2"]),
        ("attacked", [1, 4], ["round 2", "round 3"]),
        ("newest", [1, 2], ["round 3", "round 4"]),
    ],
)
def test_what_gives_way_is_the_named_policys(tmp_path, policy, left, said):
    KeptObservations(tmp_path / "one").keep(1, [kept()])
    size = sum(path.stat().st_size for path in (tmp_path / "one").rglob("*") if path.is_file())
    store = KeptObservations(tmp_path / "kept", 2 * size + 100, policy)
    assert [store.keep(number, [kept(number)]) for number in (1, 2)] == [[], []]
    store.set_done(2)
    told = store.keep(3, [kept(3)])
    if policy == "attacked":
        store.set_done(3)
    told += store.keep(4, [kept(4)])
    assert [sentence[:7] for sentence in told] == said
    assert store.rounds() == left
    assert store.room(left[0]) == 2


def test_the_oldest_rounds_are_dropped_with_a_word(tmp_path):
    KeptObservations(tmp_path / "one").keep(1, [kept()])
    size = sum(path.stat().st_size for path in (tmp_path / "one").rglob("*") if path.is_file())
    store = KeptObservations(tmp_path / "kept", max_bytes=2 * size + 100)
    assert [store.keep(number, [kept(number)]) for number in (1, 2)] == [[], []]
    store.set_done(1)
    (said,) = store.keep(3, [kept(3)])
    assert said.startswith("round 1 (")
    assert "after its attack" in said
    (said,) = store.keep(4, [kept(4)])
    assert "before it was attacked" in said
    assert store.rounds() == [3, 4]


def test_a_round_that_was_never_finished_is_not_there(tmp_path, unchecked):
    store = KeptObservations(tmp_path)
    with pytest.raises(AttributeError):  # killed at the second client
        store.keep(1, [kept(), None])
    assert store.rounds() == []
    store.keep(1, [kept()])
    assert store.rounds() == [1]
    with pytest.raises(FileExistsError, match="round 1"):
        store.keep(1, [kept()])


def test_two_observations_of_one_client_are_refused(tmp_path):
    store = KeptObservations(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"one observation a client, got several .* \[4\]"):
        store.keep(1, [kept(1, 4), kept(1, 2), kept(1, 4)])
    assert store.rounds() == []


def test_a_dropped_round_is_not_noted_as_attacked(tmp_path):
    store = KeptObservations(tmp_path / "kept")
    store.keep(1, [kept()])
    assert store.set_done(1)
    assert not store.set_done(2)


@pytest.mark.parametrize("spoil", ["truncated", "text", "version", "schedule"])
def test_files_that_cannot_be_read_are_named(tmp_path, spoil):
    store = KeptObservations(tmp_path)
    store.keep(1, [kept(1, 0), kept(1, 1)])
    path = tmp_path / "round000001" / "client0000.safetensors"
    if spoil == "truncated":
        path.write_bytes(path.read_bytes()[:-20])
    elif spoil == "text":
        path.write_bytes(b"no tensors")
    else:
        about = {"format": FORMAT if spoil == "schedule" else "another"}
        about["observation"] = json.dumps({"schedule": {"rate": 1}, "spec": {}})
        save_file({"x": torch.zeros(1)}, path, about)
    found, (problem,) = store.read(1)
    assert [each.observation.client_id for each in found] == [1]
    assert "client0000.safetensors of round 1 cannot be read" in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": {"learning_rate": 10**400}},
        {"schedule": {"learning_rate": "0.1"}},
        {"schedule": {"learning_rate": 0.1, "num_steps": None}},
        {"schedule": []},
        {"spec": []},
        {"spec": {"shape": 3, "num_classes": 2}},
        {"spec": {"shape": [1, 4, 4], "num_classes": 3, "std": [10**400]}},
        {"server_round": 10**400},
        {"client_id": "0"},
        {"num_examples": [1]},
        {"batch_norm": {}},
    ],
    ids=str,
)
def test_a_header_of_other_values_is_named_and_the_others_are_read(tmp_path, changes):
    store = KeptObservations(tmp_path)
    store.keep(1, [kept(1, 0), kept(1, 1)])
    path = tmp_path / "round000001" / "client0000.safetensors"
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["observation"])
    for text in (json.dumps(about | changes), "[" * 100_000):
        save_file({"x": torch.zeros(1)}, path, {"format": FORMAT, "observation": text})
        found, (problem,) = store.read(1)
        assert [each.observation.client_id for each in found] == [1]
        assert "client0000.safetensors of round 1 cannot be read" in problem
