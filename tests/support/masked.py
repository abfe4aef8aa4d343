"""A small network of ReLUs with the masks of its second layer, for tests of the exact wing."""

from dataclasses import dataclass

import numpy as np
import torch
from attacked import observe
from torch import Tensor, nn

from flwr_leakage.attacks import pose
from flwr_leakage.attacks.exact.chain import Level, Link, trace_chain
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.mask_equations import Hidden
from flwr_leakage.attacks.exact.masks import MaskEvidence, settled
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 12, 12), 4, (0.4,), (0.3,))


@dataclass(frozen=True)
class MaskedCase:
    """The layers, the input, preactivations (C, P) of the second, knowledge of the third."""

    chain: list[Link]
    truth: Tensor
    preactivations: Tensor
    behind: Level


def masked_case(batch_norm=False, smooth=False):
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1, stride=2)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(12))
        nn.init.uniform_(layers[2].bias, -0.2, 0.2)
        nn.init.uniform_(layers[-1].running_mean, -0.2, 0.2)
        nn.init.uniform_(layers[-1].weight, -1.5, 1.5)
    layers += [nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1, stride=1), nn.ReLU(), nn.Flatten()]
    gradient_map = GradientMap(nn.Sequential(*layers, nn.Linear(16 * 36, 4)))
    images = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    if smooth:
        images = nn.functional.avg_pool2d(images, 5, 1, 2)
    observation = observe(gradient_map, Batch(images, torch.tensor([2])), LocalSchedule(1.0))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    chain = trace_chain(problem)
    first, second, third, last = chain
    features = mean_feature(last.weight_gradient, last.bias_gradient)
    errors = last.pull_back(last.bias_gradient[None])
    behind = Level.of(third, Known.exactly(features), errors)
    truth = images.double()
    return MaskedCase(
        chain, truth, second.preactivation(first.outputs(truth))[0].flatten(1), behind
    )


def known_of(equations, active, certain=None):
    """What true masks tell of the outputs, in some channels or all."""
    chosen = range(len(active)) if certain is None else certain.nonzero()[:, 0].tolist()
    found = {channel: (active[channel].numpy(), np.zeros(active.shape[1])) for channel in chosen}
    return settled(equations, Known.nothing(active.double()), found)


def equations_of_case(certain=None, batch_norm=False, smooth=False):
    """The equations of a network's second layer with its true masks, and the true input."""
    case = masked_case(batch_norm, smooth)
    first, second, *_ = case.chain
    known = known_of(case.behind.equations, case.preactivations > 0, certain)
    errors = case.behind.input_errors[0].flatten(1) * second.scale[:, None]
    evidence = MaskEvidence(case.behind.equations, errors, errors[:, 0], errors)
    hidden = Hidden([first], second, case.behind, evidence, known)
    return hidden.equations, case.truth, case.preactivations
