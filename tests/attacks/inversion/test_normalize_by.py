"""BN_exact and BN_proxy: candidates normalised by statistics that are known, as constants."""

import pytest
import torch

from flwr_leakage.attacks import GradientInversion
from flwr_leakage.attacks.problem import pose
from flwr_leakage.defenses import NoDefense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ResNet8
from flwr_leakage.records import Batch, InputSpec, ThreatModel
from simulations.papers.victims import observe

SPEC = InputSpec((1, 8, 8), 3, (0.0,), (1.0,))
EXACT = ThreatModel(labels="known", batch_norm="exact")
UNKNOWN = ThreatModel(labels="known")


@pytest.fixture(scope="module")
def seen():
    torch.manual_seed(0)
    gradient_map = GradientMap(ResNet8(SPEC.shape, 3, width=2), batch_norm="batch")
    batch = Batch(torch.rand(3, *SPEC.shape), torch.tensor([0, 1, 2]))
    return gradient_map, batch, observe(gradient_map, batch, NoDefense(), 0, 0)


def test_exact_statistics_give_the_private_batch_its_own_logits(seen):
    gradient_map, batch, observation = seen
    truth = gradient_map.logits(observation.params, batch.inputs, observation.buffers)
    problem = pose(gradient_map, SPEC, observation, EXACT)
    for known, equal in (("granted", True), ("running", False)):
        normalised = problem.normalized_by(known)
        # One image alone: its own statistics would give it other logits.
        found = normalised.gradient_map.logits(problem.params, batch.inputs[:1], normalised.buffers)
        assert torch.allclose(found, truth[:1], atol=1e-4) is equal


def test_what_is_not_granted_is_refused(seen, unchecked):
    gradient_map, _, observation = seen
    with pytest.raises(ValueError, match="normalised by the private statistics"):
        pose(gradient_map, SPEC, observation, UNKNOWN).normalized_by("granted")
    pose(gradient_map, SPEC, observation, UNKNOWN).normalized_by("running")
    with pytest.raises(ValueError, match="normalize_by must be candidate, granted or running"):
        GradientInversion(normalize_by="exact")
