"""A client's own test of its update, as a score and under a gate."""

import pytest
import torch
from torch import nn

from flwr_leakage import Batch
from flwr_leakage.audit.gate import Gate
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.members import OwnRecords
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.records import Exposure, LocalSchedule, Update


def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 1, 6, 6, generator=generator)
    return Batch(inputs, torch.randint(5, (count,), generator=generator))


def round_of(noise_std, count=6):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 5))
    gradient_map, private = GradientMap(network), data(0, count)
    schedule = LocalSchedule(0.1, 1, count)
    delta = local_update(gradient_map, gradient_map.params, private, schedule)
    raw = Update(delta, {}, schedule, count)
    noised = {k: v + 0.1 * noise_std * torch.randn_like(v) for k, v in delta.items()}
    released = Update(noised, {}, schedule, count) if noise_std else raw
    exposure = Exposure(gradient_map.params, {}, private, private, raw, released)
    return ClientSamples(gradient_map, exposure)


def measured(client, null=400):
    return {m.name: m for m in OwnRecords(data(1, null))(client, 0)}


def test_the_defense_is_judged_and_what_was_there_before_it():
    plain = measured(round_of(0.0))
    assert max(plain["membership_corrected"].values) < 1e-6
    assert plain["membership_share"].values == (1.0,) * 6
    noised = measured(round_of(10.0))
    assert min(noised["membership_corrected"].values) > 0.01
    assert noised["membership_share"].values == (0.0,) * 6
    assert noised["membership_share_before"].values == (1.0,) * 6
    note = noised["membership_corrected_before"].notes[0]
    assert note.startswith("exact evidence: it was in the update, by algebra")


def test_a_sample_has_its_value_whichever_others_are_scored():
    client = round_of(0.3)
    whole, part = measured(client), measured(client.select([1, 4]))
    for name, found in part.items():
        assert found.values == tuple(whole[name].values[place] for place in (1, 4))


@pytest.mark.parametrize(
    ("noise_std", "null", "passes"),
    [(0.0, 400, False), (10.0, 400, True), (0.001, 300, False)],
)
def test_a_gate_lets_pass_what_hides_the_samples(noise_std, null, passes):
    """Of 300 null records too few are left of a rehearsal for p ≤ 0.01: no evidence of safety."""
    found = list(measured(round_of(noise_std), null).values())
    judged = Gate(scores={"membership_corrected": 0.01}).judge(found, None)
    assert judged.passes is passes
    if null == 300:
        assert min(found[0].values) > 0.01 and set(found[0].states) == {"upper bound"}
    assert Gate(scores={"membership_share": 0.1}).judge(found, None).passes is passes
