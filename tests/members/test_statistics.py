import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage import (
    Batch,
    GradientMap,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from flwr_leakage.attacks.problem import pose
from flwr_leakage.members.statistics import (
    gradient_cosine,
    gradient_difference,
    gradient_products,
    losses,
)

SPEC = InputSpec((1, 3, 3), 4)


def test_statistics_equal_those_of_plain_autograd():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)).double()
    batch = Batch(torch.randn(5, 1, 3, 3, dtype=torch.float64), torch.arange(5) % 4)
    params = list(model.parameters())

    def gradient(x, y):
        found = torch.autograd.grad(F.cross_entropy(model(x), y), params)
        return torch.cat([g.flatten() for g in found])

    mean = gradient(batch.inputs[:3], batch.targets[:3])
    gradient_map = GradientMap(model)
    delta = {k: -0.5 * g for k, g in gradient_map(gradient_map.params, batch[:3]).items()}
    update = Update(delta, {}, LocalSchedule(0.5, 1, 3), 3)
    seen = Observation(1, 0, gradient_map.params, {}, update)
    problem = pose(gradient_map, SPEC, seen, ThreatModel())
    products, norms, _ = gradient_products(problem, [problem.gradient], batch)
    cosine = gradient_cosine(products[0], norms, float(mean.norm()))
    difference = gradient_difference(products[0], norms, 3)
    after = losses(problem, batch, after=True)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value += delta[name]
        expected = F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")
        for name, value in model.named_parameters():
            value -= delta[name]
    torch.testing.assert_close(after, expected)
    for i in range(5):
        own = gradient(batch.inputs[i : i + 1], batch.targets[i : i + 1])
        torch.testing.assert_close(cosine[i], -F.cosine_similarity(own, mean, dim=0))
        torch.testing.assert_close(
            difference[i], (3 * mean - own).square().sum() - (3 * mean).square().sum()
        )
        torch.testing.assert_close(norms[i], own.norm())
