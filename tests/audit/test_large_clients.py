"""What the audit tells of clients of many images, beside an attack on them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit import LargeClients, ServerAudit, Truth
from flwr_leakage.audit.large_clients import probes
from flwr_leakage.audit.selection import Selection
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LeakageRecord,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from flwr_leakage.report.index import Index
from flwr_leakage.report.large_clients import better_than_guess, large_clients_section
from flwr_leakage.tracking import JsonlTracker, read_run

SPEC = InputSpec((1, 12, 12), 3)
SCHEDULE = LocalSchedule(0.1, num_steps=5, batch_size=8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 3))


def samples(client, count=40):
    stream = torch.Generator().manual_seed(client)
    labels = (client + (torch.rand(count, generator=stream) ** 3 * 3).long()) % 3
    return Batch(torch.rand(count, 1, 12, 12, generator=stream), labels)


def seen_of(client, count=40, server_round=1):
    gradient_map = GradientMap(network())
    batch, params = samples(client, count), gradient_map.params
    delta = local_update(gradient_map, params, batch, SCHEDULE)
    delta = {name: value.detach() for name, value in delta.items()}
    return Observation(server_round, client, params, {}, Update(delta, {}, SCHEDULE, count))


def run(folder, observations, **settings):
    tracker = JsonlTracker(folder)

    def truth(server_round, client, count):
        return Truth(samples(client, count), samples(client, count))

    given = {"truth": truth, "attack": load_preset("analytic"), "evaluator": Evaluator()}
    audit = ServerAudit(
        GradientMap(network()), SPEC, SCHEDULE, tracker,
        selection=Selection(max_examples=8), **{**given, **settings},
    )  # fmt: skip
    for server_round in sorted({each.server_round for each in observations}):
        audit.begin_round(server_round)
        here = [each for each in observations if each.server_round == server_round]
        audit.inspect(server_round, here, [])
    tracker.close()
    return Index(read_run(folder).records)


def test_labels_stand_beside_their_error_the_truth_and_blind_guesses(tmp_path):
    index = run(tmp_path / "run", [seen_of(0), seen_of(1)])
    inferred, true = (index.series("labels", name) for name in ("inferred", "true"))
    for client in (0, 1):
        counts = [int(true[1, client, label].value) for label in range(3)]
        assert counts == torch.bincount(samples(client).targets, minlength=3).tolist()
        assert sum(inferred[1, client, label].value for label in range(3)) == 40
    section = large_clients_section(index, {})
    assert [row[0] for row in section.labels.rows] == ["client 0", "client 1"]
    assert section.head.startswith(
        "What leaks all the same is how many images of each class some clients have: client 0 "
        "(78 % of the labels right, a blind guess "
    )
    assert "by the better guess for each (mean over 2 updates)" in section.head
    better = better_than_guess(index)
    assert list(better) == [0, 1] and all(own > guess for own, guess in better.values())


def test_labels_of_clients_that_are_alike_are_not_called_a_leak(tmp_path):
    counts = {"inferred": (30.0, 10.0), "true": (20.0, 20.0)}
    records = [
        LeakageRecord("run", 1, 0, label, "labels", name, value)
        for name, values in counts.items()
        for label, value in enumerate(values)
    ]
    shares = ("expected_right", "least_right", "uniform_right")
    records += [LeakageRecord("run", 1, 0, -1, "labels", name, 0.8) for name in shares]
    section = large_clients_section(Index(records), {})
    assert "tells no more than a blind guess does: 75 % of an update’s" in section.head
    assert better_than_guess(Index(records)) == {}
    assert section.labels.rows[0][5:] == ("75 %", "100 %", "–")


def test_a_probe_shows_what_one_step_on_few_images_had_shown(tmp_path):
    index = run(tmp_path / "run", [seen_of(0), seen_of(1)])
    probed = index.series("probe", "1/psnr")
    assert list(probed) == [(1, 0, 0)] and probed[1, 0, 0].value > 48.2  # of the first client only
    section = large_clients_section(index, {})
    first = section.probe.rows[0]
    assert first[:3] == ("1 image", "client 0", "1 exact")
    assert "few of its images, 1 of 1 images could be seen (what-if)" in section.head
    told = large_clients_section(index, {"defense": "gaussian"}).head
    assert "few of its images, without the run’s defense, 1 of 1 images could be seen" in told
    assert not index.series("metric", "psnr")  # nothing of it counts as an attack


def test_what_if_a_client_had_sent_fewer_tells_of_parts_and_of_time():
    probe = [
        LeakageRecord("r", 1, 2, sample, "probe", name, value)
        for sample, name, value in (
            (-1, "1/stopped_by_budget", 0.0), (0, "1/psnr", 11.0), (0, "1/blind_psnr", 12.0),
            (-1, "4/stopped_by_budget", 1.0), (0, "4/psnr", 14.0), (0, "4/blind_psnr", 12.0),
        )
    ]  # fmt: skip
    section = large_clients_section(Index(probe), {})
    assert section.head == (
        "Had a client sent one step on few of its images, 1 of 4 images could be seen in part "
        "(what-if). The time limit ended 1 of 2 such attacks: more may show."
    )
    config = {"config": {"large_clients": {"probe_seconds": 3.0}}}
    limited = large_clients_section(Index(probe), config)
    assert "The time limit of 3 CPU seconds ended 1 of 2 such attacks" in limited.head
    assert [row[-1] for row in limited.probe.rows] == [
        "the attack itself", "the time limit of 3 CPU seconds",
    ]  # fmt: skip
    assert "would show none" in large_clients_section(Index(probe[:3]), {}).head


def test_a_probe_is_the_step_of_sgd_on_the_first_images():
    seen, private = seen_of(0), samples(0)
    found = list(probes(GradientMap(network()), seen, Truth(private, private), (1, 4, 99)))
    assert [len(truth.private) for _, truth in found] == [1, 4]
    one, truth = found[1]
    expected = local_update(
        GradientMap(network()), seen.params, truth.private, LocalSchedule(0.1, 1, 4)
    )
    for name, value in one.update.delta.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-3)
    assert one.update.num_examples == one.update.schedule.batch_size == 4


def test_without_the_truth_the_expected_share_stands_alone(tmp_path):
    index = run(tmp_path / "run", [seen_of(0)], truth=None)
    assert not index.series("labels", "true") and not index.names("probe")
    section = large_clients_section(index, {})
    assert "of the inferred labels are expected to be right" in section.head
    assert section.labels.rows[0][5] == "not known here"


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [({}, {1}), ({"every": 1}, {1, 2}), ({"min_examples": 41}, set()), (None, set())],
)
def test_settings_say_whose_labels_are_inferred_and_when(tmp_path, settings, rounds):
    large = None if settings is None else LargeClients(**settings, probe_sizes=())
    observations = [seen_of(0, server_round=1), seen_of(0, server_round=2)]
    index = run(tmp_path / "run", observations, large_clients=large)
    assert {key[0] for key in index.series("labels", "expected_right")} == rounds


def test_a_budget_that_is_too_small_is_told_and_no_section_is_a_blank(tmp_path):
    large = LargeClients(label_seconds=1e-6, probe_sizes=())
    index = run(tmp_path / "run", [seen_of(0)], large_clients=large)
    (record,) = index.series("labels", "expected_right").values()
    assert record.value is None and "not enough for it (label_seconds)" in record.note
    assert "not inferred: 1e-06 CPU seconds" in large_clients_section(index, {}).labels.rows[0][3]


def test_a_client_that_claims_any_number_of_samples_costs_no_memory(tmp_path):
    seen = seen_of(0)
    seen = replace(seen, update=replace(seen.update, num_examples=10**12))
    index = run(tmp_path / "run", [seen], truth=None)
    counts = [record.value for record in index.series("labels", "inferred").values()]
    assert sum(counts) == 10**12


def test_under_secure_aggregation_nobody_s_labels_are_inferred(tmp_path):
    threat = ThreatModel(view="aggregate")
    index = run(tmp_path / "run", [seen_of(0), seen_of(1)], threat=threat)
    assert not index.names("labels") and not index.names("probe")


def test_settings_out_of_their_range_are_refused():
    with pytest.raises(ValueError, match="probe_sizes must be at least 1"):
        LargeClients(probe_sizes=(0, 4))
    with pytest.raises(ValueError, match="label_seconds must be positive"):
        LargeClients(label_seconds=0)
