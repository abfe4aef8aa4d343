import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from attacked import observe, tiny_network

from flwr_leakage.attacks import LBFGS, AttackJob, GradientInversion
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, LocalSchedule, Reconstruction, ThreatModel

QUICK = GradientInversion(optimizer=LBFGS(iterations=5), batching="loop")


def attack(wrapped, gradient_map, spec, observations, progress=None):
    return wrapped(AttackJob(gradient_map, spec, observations, ThreatModel()), progress)


@dataclass(frozen=True)
class Counting:
    """Answers with the targets' ids; stops or dies at one of them."""

    folder: str
    interrupt_at: int = -1
    die_at: int = -1

    def __call__(self, job, progress=None):
        results = []
        for observation in job.observations:
            if observation.client_id == self.interrupt_at:
                raise KeyboardInterrupt
            if observation.client_id == self.die_at:
                os._exit(1)
            with Path(self.folder, "asked").open("a") as file:
                file.write(f"{observation.client_id} ")
            batch = Batch(torch.rand(1, *job.spec.shape), torch.tensor([0]))
            results.append(Reconstruction(batch, observation.client_id))
        return results


def same(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.error == b.error
        assert a.objective == pytest.approx(b.objective, nan_ok=True, rel=0)
        assert (a.batch is None) == (b.batch is None)
        if a.batch is not None:
            assert torch.equal(a.batch.inputs, b.batch.inputs)
            assert torch.equal(a.batch.targets, b.batch.targets)


def test_results_do_not_depend_on_the_number_of_workers(gradient_map, spec, observations):
    empty = replace(observations[0], update=replace(observations[0].update, num_examples=0))
    observations = [*observations, empty]
    alone = attack(Parallel(QUICK, chunk=2), gradient_map, spec, observations)
    told = []
    two = attack(Parallel(QUICK, 2, chunk=2), gradient_map, spec, observations, told.append)
    same(alone, two)
    assert "at least 1 example" in two[3].error
    assert [(p.done, p.total) for p in told] == [(2, 4), (4, 4)]


def test_in_this_process_it_is_the_attack_itself(gradient_map, spec, observations):
    wrapped = attack(Parallel(QUICK, chunk=3), gradient_map, spec, observations)
    plain = QUICK(AttackJob(gradient_map, spec, observations, ThreatModel()))
    same(wrapped, plain)


def test_an_interrupted_call_goes_on_where_it_stopped(gradient_map, spec, observations, tmp_path):
    kept = str(tmp_path / "kept")
    settings = {"chunk": 1, "folder": kept}
    stopping = Parallel(Counting(str(tmp_path), interrupt_at=2), **settings)
    with pytest.raises(KeyboardInterrupt):
        attack(stopping, gradient_map, spec, observations)
    assert (tmp_path / "asked").read_text() == "0 1 "
    again = replace(observations[2], client_id=7)
    results = attack(stopping, gradient_map, spec, [*observations[:2], again])
    assert (tmp_path / "asked").read_text() == "0 1 7 "
    assert [r.objective for r in results] == [0, 1, 7]
    same(results, attack(stopping, gradient_map, spec, [*observations[:2], again]))
    assert (tmp_path / "asked").read_text() == "0 1 7 "


def test_what_is_kept_is_used_for_the_same_question_only(gradient_map, spec, images, tmp_path):
    batch = Batch(images[:1], torch.tensor([1]))
    seen = observe(gradient_map, batch, LocalSchedule(0.1))
    wrapped = Parallel(Counting(str(tmp_path)), folder=str(tmp_path / "kept"))
    shifted = {k: v + 1e-6 for k, v in seen.update.delta.items()}
    questions = [
        (wrapped, gradient_map, [seen]),
        (replace(wrapped, attack=replace(wrapped.attack, die_at=9)), gradient_map, [seen]),
        (wrapped, GradientMap(tiny_network(1)), [seen]),
        (wrapped, gradient_map, [replace(seen, update=replace(seen.update, delta=shifted))]),
        (wrapped, gradient_map, [replace(seen, earlier=(seen,))]),
        (wrapped, gradient_map, [seen, seen]),
    ]
    for _ in range(2):
        for question, model, observations in questions:
            attack(question, model, spec, observations)
    assert len((tmp_path / "asked").read_text().split()) == 7


def test_a_worker_that_dies_takes_only_its_targets_with_it(
    gradient_map, spec, observations, tmp_path
):
    wrapped = Parallel(Counting(str(tmp_path), die_at=1), workers=2, chunk=1)
    results = attack(wrapped, gradient_map, spec, observations)
    assert [r.objective for r in results if not r.error] == [0, 2]
    assert "memory" in results[1].error


def test_what_cannot_travel_is_named(spec, observations):
    def loss(logits, targets):
        return torch.nn.functional.cross_entropy(logits, targets)

    with pytest.raises(ValueError, match="pickled"):
        attack(Parallel(QUICK, 2, chunk=1), GradientMap(tiny_network(), loss), spec, observations)


@pytest.mark.parametrize("name", ["workers", "chunk"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Parallel(QUICK, **{name: 0})


def test_what_is_kept_is_for_its_owner_only(gradient_map, spec, observations, tmp_path):
    folder = tmp_path / "kept"
    attack(Parallel(QUICK, folder=str(folder)), gradient_map, spec, observations)
    assert folder.stat().st_mode & 0o077 == 0
    assert [file.stat().st_mode & 0o077 for file in folder.iterdir()] == [0]


def test_finished_results_that_cannot_be_read_are_attacked_again(
    gradient_map, spec, observations, tmp_path
):
    """Whatever lies there runs nothing, as the files hold tensors and JSON."""
    wrapped = Parallel(Counting(str(tmp_path)), chunk=1, folder=str(tmp_path / "kept"))
    attack(wrapped, gradient_map, spec, observations)
    files = sorted((tmp_path / "kept").iterdir())
    for path, content in zip(files, (b"", b"\x80\x04cos\nsystem\n"), strict=False):
        path.write_bytes(content)
    asked = (tmp_path / "asked").read_text().split()
    results = attack(wrapped, gradient_map, spec, observations)
    assert len((tmp_path / "asked").read_text().split()) == len(asked) + 2
    assert sorted(r.objective for r in results) == [0, 1, 2]
    same(results, attack(wrapped, gradient_map, spec, observations))
