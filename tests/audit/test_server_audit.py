"""The server's audit: what it grants, and what it does where a client lies or attacks fail."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flwr_leakage.audit import ClientNote, ServerAudit, Truth
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Measurement,
    Observation,
    Part,
    Reconstruction,
    ThreatModel,
    Update,
)

SPEC = InputSpec((1, 2, 2), 2)
SCHEDULE = LocalSchedule(0.5, num_steps=1, batch_size=3)


class _Memory:
    """A tracker and an attack that remember what they are given."""

    def __init__(self):
        self.records, self.events, self.images, self.observations = [], [], [], []

    def log(self, record):
        self.records.append(record)

    def event(self, event):
        self.events.append(event)

    def image(self, *image):
        self.images.append(image)

    def close(self):
        pass

    def __call__(self, job, progress=None):
        self.observations.extend(job.observations)
        return [
            Reconstruction(Batch(torch.rand(2, 1, 2, 2), torch.tensor([0, 1])), 0.5)
            for _ in job.observations
        ]


def _network(*norm):
    torch.manual_seed(0)
    return nn.Sequential(*norm, nn.Flatten(), nn.Linear(4, 2))


def _batch(client_id, count=2):
    generator = torch.Generator().manual_seed(client_id)
    return Batch(torch.rand(count, 1, 2, 2, generator=generator), torch.arange(count) % 2)


def _observe(gradient_map, client_id, count=2):
    params = gradient_map.params
    delta = local_update(gradient_map, params, _batch(client_id), SCHEDULE)
    update = Update(delta, gradient_map.buffers, SCHEDULE, count)
    return Observation(1, client_id, params, gradient_map.buffers, update)


def _truth(server_round, client_id, num_examples):
    if num_examples > 2:
        raise ValueError(f"num_examples must lie in 1 … 2, got {num_examples}.")
    return Truth(_batch(client_id), Batch(_batch(client_id).inputs + 1, torch.tensor([1, 1])))


def _inspect(gradient_map, counts=(2, 2), notes=(), **settings):
    memory = _Memory()
    audit = ServerAudit(gradient_map, SPEC, SCHEDULE, memory, attack=memory, **settings)
    audit.inspect(1, [_observe(gradient_map, i, count) for i, count in enumerate(counts)], [*notes])
    return memory


def test_what_each_of_several_attacks_said_is_recorded_and_told_once_a_round():
    memory, limits = _Memory(), []
    parts = (Part("analytic", "refused", reason="no."), Part("idlg", "stopped", 0.5, 1.0, 2.0))

    def attack(job, progress=None):
        limits.append(job.max_seconds)
        stats = {"attack": "idlg"}
        return [replace(answer, stats=stats, parts=parts) for answer in memory(job)]

    gradient_map = GradientMap(_network())
    audit = ServerAudit(gradient_map, SPEC, SCHEDULE, memory, attack=attack, max_seconds=3.0)
    audit.inspect(1, [_observe(gradient_map, i) for i in range(2)], [])
    assert limits == [3.0]
    notes = [record.note for record in memory.records if record.name == "objective"]
    assert len(notes) == 2
    assert all(n.endswith("idlg chosen: analytic refused (no); idlg stopped 0.5 in 2.0 s")
               for n in notes)  # fmt: skip
    (event,) = memory.events
    assert event.level == "info"
    assert event.message == "chosen: idlg 2. analytic: refused 2 (no); idlg: stopped 2"


@pytest.mark.parametrize("view", ["single", "aggregate"])
def test_who_runs_by_a_config_of_its_own_has_no_truth(view):
    notes = [ClientNote(0), ClientNote(1, remark="own.", own_config=True)]
    settings = {"notes": notes, "truth": _truth, "evaluator": Evaluator()}
    memory = _inspect(GradientMap(_network()), threat=ThreatModel(view=view), **settings)
    assert len(memory.observations) == (2 if view == "single" else 1)
    measured = {record.client_id for record in memory.records if record.kind == "metric"}
    assert measured == ({0} if view == "single" else set())
    assert any("samples are unknown here" in event.message for event in memory.events)
    known = ThreatModel(view=view, labels="known")
    memory = _inspect(GradientMap(_network()), threat=known, **settings)
    assert [o.client_id for o in memory.observations] == ([0] if view == "single" else [])


@pytest.mark.parametrize("labels", ["known", "inferred"])
@pytest.mark.parametrize("batch_norm", ["none", "running", "derived", "exact"])
def test_the_attack_is_given_what_the_threat_model_grants_and_no_more(labels, batch_norm):
    gradient_map = GradientMap(_network(nn.BatchNorm2d(1)), batch_norm="batch")
    threat = ThreatModel(labels=labels, batch_norm=batch_norm)
    memory = _inspect(gradient_map, threat=threat, truth=_truth)
    for observation in memory.observations:
        disclosed = observation.disclosed
        assert (disclosed.targets is not None) == (labels == "known")
        assert (disclosed.statistics is not None) == (batch_norm == "exact")
        if labels == "known":
            assert disclosed.targets.tolist() == [1, 1]
        if batch_norm == "exact":
            mean = (_batch(observation.client_id).inputs + 1).mean()
            torch.testing.assert_close(disclosed.statistics["0.running_mean"], mean[None])


def test_a_client_whose_truth_does_not_exist_is_left_out_and_named():
    memory = _inspect(GradientMap(_network()), counts=(2, 9, 2), truth=_truth)
    assert [observation.client_id for observation in memory.observations] == [0, 2]
    (event,) = memory.events
    assert event.client_id == 1
    assert "client 1 was not attacked" in event.message
    assert "got 9" in event.message


def test_the_aggregate_of_batch_statistics_is_not_taken_for_an_update_of_the_union():
    threat = ThreatModel(view="aggregate")
    network = _network(nn.BatchNorm2d(1))
    for gradient_map, members in (
        (GradientMap(network, batch_norm="batch"), (2, 2)),
        (GradientMap(network), ()),
        (GradientMap(_network(), batch_norm="batch"), ()),
    ):
        memory = _inspect(gradient_map, threat=threat)
        assert [(o.client_id, o.members) for o in memory.observations] == [(-1, members)]
        assert not memory.events


def test_rounds_are_attacked_jointly_with_what_is_granted_of_each():
    gradient_map = GradientMap(_network(nn.BatchNorm2d(1)), batch_norm="batch")
    threat = ThreatModel(labels="known", batch_norm="exact", rounds=2)
    memory = _Memory()
    audit = ServerAudit(
        gradient_map, SPEC, SCHEDULE, memory, attack=memory, threat=threat, truth=_truth
    )
    for server_round in (1, 2, 3):
        seen = replace(_observe(gradient_map, 0), server_round=server_round)
        audit.inspect(server_round, [seen], [])
    assert [[e.server_round for e in o.earlier] for o in memory.observations] == [[], [1], [2]]
    (earlier,) = memory.observations[-1].earlier
    assert earlier.disclosed.targets.tolist() == [1, 1]
    assert earlier.disclosed.statistics is not None
    notes = {record.note for record in memory.records if record.name == "objective"}
    assert all("2 rounds jointly" in note for note in notes)


def test_without_a_truth_reconstructions_are_kept_and_nothing_is_measured():
    memory = _inspect(GradientMap(_network()), counts=(2,))
    assert [image[:4] for image in memory.images] == [
        (1, 0, 0, "reconstruction"),
        (1, 0, 1, "reconstruction"),
    ]
    assert {record.kind for record in memory.records} == {"attack", "client", "cost"}


def test_an_attack_that_raises_is_told_of_once_and_of_every_target():
    def fails(*args):
        raise MemoryError("no room")

    memory = _Memory()
    audit = ServerAudit(GradientMap(_network()), SPEC, SCHEDULE, memory, attack=fails)
    audit.inspect(1, [_observe(audit.gradient_map, i) for i in (0, 1)], [])
    assert [(event.client_id, event.message) for event in memory.events] == [
        (-1, "the attack failed: MemoryError: no room"),
        (0, "client 0 not recovered: MemoryError: no room"),
        (1, "client 1 not recovered: MemoryError: no room"),
    ]
    objectives = [record for record in memory.records if record.name == "objective"]
    assert [(r.value, r.note) for r in objectives] == [(None, "MemoryError: no room")] * 2


def test_notes_are_recorded_by_client_and_sample():
    memory = _Memory()
    audit = ServerAudit(GradientMap(_network()), SPEC, SCHEDULE, memory, run="a")
    score = Measurement("lambda_max", (0.5, None), "1", "larger is safer", ("", "slow"), 3)
    audit.inspect(2, [], [ClientNote(7, (score,), 0.25, 0.125)])
    told = [r for r in memory.records if r.client_id == 7]
    assert all((r.run, r.server_round) == ("a", 2) for r in told)
    assert [(r.sample, r.kind, r.name, r.value, r.note) for r in told] == [
        (0, "score", "lambda_max", 0.5, ""),
        (1, "score", "lambda_max", None, "slow"),
        (-1, "cost", "train_cpu_seconds", 0.25, ""),
        (-1, "cost", "score_cpu_seconds", 0.125, ""),
    ]


@pytest.mark.parametrize("granted", [{"labels": "known"}, {"batch_norm": "exact"}])
def test_what_nobody_knows_cannot_be_granted(granted):
    with pytest.raises(ValueError, match="no truth"):
        ServerAudit(
            GradientMap(_network()), SPEC, SCHEDULE, _Memory(), threat=ThreatModel(**granted)
        )
