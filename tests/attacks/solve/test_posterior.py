"""A step's slope, curvature and draws, against dense matrices."""

import pytest
import torch

from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.records import InputSpec
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import PatchPrior

SPEC = InputSpec((1, 6, 6), 4, (0.4,), (0.3,))
PRIOR = ImagePrior.of(SPEC)


def test_parts_have_the_products_of_one_tensor():
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(3, 36, generator=generator).double()
    point = torch.randn(1, 1, 6, 6, generator=generator).double()

    def parts(inputs):
        flat = inputs.flatten()
        constant = torch.ones(4).double()
        # the third part is linear, and the second does not depend on the inputs
        return [(matrix @ flat).sinh(), constant, flat[:6].reshape(2, 3), 0 * flat[:2].detach()]

    found = Linearization(parts, point)
    one = Linearization(lambda inputs: torch.cat([p.flatten() for p in parts(inputs)]), point)
    torch.testing.assert_close(found.value, one.value)
    directions = torch.randn(5, 1, 1, 6, 6, generator=generator).double()
    torch.testing.assert_close(found.push(directions[0]), one.push(directions[0]))
    torch.testing.assert_close(found.columns(directions), one.columns(directions))
    dual = torch.randn(len(one.value), generator=generator).double()
    torch.testing.assert_close(found.pull(dual), one.pull(dual))
    with pytest.raises(ValueError, match="does not depend on the inputs"):
        Linearization(lambda inputs: [torch.ones(2)], point)


def case(**settings):
    """A posterior of 20 bent equations of 36 unknowns, and J L at its point."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(20, 36, generator=generator).double() / 6
    point = torch.randn(1, *SPEC.shape, generator=generator).double()
    observed = torch.randn(20, generator=generator).double()

    def function(inputs):
        return torch.sinh(inputs.flatten() @ matrix.T)

    def residual_at(point):
        return function(PRIOR.inputs(point)) - observed

    linear = Linearization(function, PRIOR.inputs(point))
    weights = torch.rand(20, generator=generator).double() + 0.5
    posterior = Posterior(
        linear, PRIOR, weights, residual_at(point), point, residual_at, **settings
    )
    return posterior, torch.autograd.functional.jacobian(residual_at, point).flatten(1)


def curvature(posterior):
    units = torch.eye(36).double().reshape(-1, 1, *SPEC.shape)
    return torch.stack([posterior(unit).flatten() for unit in units])


def test_slope_and_curvature_are_those_of_the_objective():
    kinds = PatchPrior.of(PRIOR).at(PRIOR.grey)
    for settings in ({"weight": 0.3}, {"weight": 0.3, "cost": lambda s: 2 * s}, {"patches": kinds}):
        posterior, jacobian = case(**settings)
        posed = posterior.posed(Solver(200, 1e-10))
        step = 1e-5 * torch.randn(posed.point.shape, generator=torch.Generator().manual_seed(1))
        there, back = (posed.cost(posed.point + sign * step) for sign in (1, -1))
        torch.testing.assert_close(
            torch.tensor((there - back) / 4), (posed.slope * step).sum().float(), rtol=1e-4, atol=0
        )
        dense = curvature(posterior)
        told = jacobian.T @ (posterior.weights[:, None] * jacobian)
        if "patches" not in settings:
            prior = settings["weight"] * (2 if "cost" in settings else 1)
            torch.testing.assert_close(dense, told + prior * torch.eye(36).double())
        change, taken = posed.solve(0.0)
        expected = -torch.linalg.solve(dense, posed.slope.flatten())
        torch.testing.assert_close(change.flatten(), expected, rtol=1e-5, atol=1e-7)
        assert 0 < taken <= 200


def test_draws_have_the_covariance_of_the_posterior(monkeypatch):
    """A draw is a matrix A times standard normal numbers, so that its covariance is A Aᵀ."""
    posterior, _ = case()
    columns = []
    for unit in torch.eye(36 + 20).double():
        numbers = iter(unit.split([36, 20]))
        monkeypatch.setattr(
            torch, "randn", lambda *shape, generator, left=numbers: next(left).reshape(*shape)
        )
        columns.append(posterior.draw(Solver(100, 1e-8), torch.Generator()).flatten())
    found = torch.stack(columns).T @ torch.stack(columns)
    torch.testing.assert_close(found, torch.linalg.inv(curvature(posterior)), atol=1e-5, rtol=0)
