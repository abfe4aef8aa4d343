"""True errors against stated ones, on networks that no setting was chosen on."""

import pytest
import torch
from scored import make_exposure
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.per_sample import ClientSamples, separate
from flwr_leakage.records import Batch
from flwr_leakage.scores import (
    LAVP,
    GradientNorm,
    InfluenceLowerBound,
    InversionInfluence,
    JacobianNorm,
    LambdaMax,
    LayerShares,
    SingularInfluence,
)
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.scores.layer_shares import layer_slices

DAMPINGS = (1e-2, 1e-4, 1e-6)


def blurred(count, size, seed=0):
    noise = torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(seed))
    return nn.functional.avg_pool2d(noise, 3, 1, 1)


def sequence(size, width, activation, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(size**2, width), activation, nn.Linear(width, 4))


def tiny():
    return sequence(5, 6, nn.Sigmoid(), 1), blurred(3, 5), None


def large():
    return sequence(10, 200, nn.Tanh(), 2), blurred(1, 10), None


def trained():
    """Until the margins of its own samples are above ten."""
    model, inputs = sequence(7, 40, nn.ReLU(), 3), blurred(8, 7)
    targets = torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(30 * model(inputs - 0.4), targets).backward()
        optimizer.step()
    return nn.Sequential(Shift(), model, Scale(30.0)), inputs[:4], targets[:4]


def confident():
    """Margins of 50 and more: squares of the entries of J are no float32 numbers."""
    model, inputs = sequence(6, 30, nn.ReLU(), 4), blurred(4, 6)
    with torch.no_grad():
        model[-1].bias[1] += 50
    return model, inputs, torch.tensor([1, 1, 0, 1])


def ill_conditioned():
    """λmax/λmin beyond 1e12: every input counts half as much as the one before."""
    model, inputs = sequence(5, 30, nn.Sigmoid(), 5), blurred(2, 5)
    with torch.no_grad():
        model[1].weight *= 0.5 ** torch.arange(25.0)
    return model, inputs, None


class Shift(nn.Module):
    def forward(self, x):
        return x - 0.4


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def exact_values(gradient_map, exposure):
    """All quantities from the dense J in float64, by name, (S,) each."""
    weights = exposure.sample_weights()
    samples = separate(
        gradient_map,
        exposure.params,
        exposure.buffers,
        exposure.private,
        weights,
        torch.float64,
    )
    operator = samples.jacobian()
    released, raw = exposure.released.pseudo_gradient(), exposure.raw.pseudo_gradient()
    change = {name: released[name].double() - raw[name].double() for name in exposure.params}
    deltas = ravel(change) / weights[:, None]
    dense, g = operator.to_dense(), operator.value
    sizes = g.norm(dim=1)
    _, singular, rows = torch.linalg.svd(dense, full_matrices=False)
    eigenvalues = singular**2
    direction = g / sizes[:, None]
    along = torch.einsum("spn,sp->sn", dense, direction)
    turning = (dense - direction[:, :, None] * along[:, None]) / sizes[:, None, None]
    angular = torch.linalg.svdvals(turning) ** 2
    projected = torch.einsum("spn,sp->sn", dense, deltas)
    found = {
        "gradient_norm": sizes,
        "lambda_max": eigenvalues[:, 0],
        "lambda_min": eigenvalues[:, -1],
        "angular_max": angular[:, 0],
        "angular_min": angular[:, -1],
        "lavp_fusion": (eigenvalues[:, 0] * angular[:, -1]).sqrt(),
        "jacobian_norm": singular[:, 0],
        "jacobian_frobenius_norm": eigenvalues.sum(1).sqrt(),
        "first_singular_influence": 1 / singular[:, 0],
        "last_singular_influence": 1 / singular[:, -1],
        "influence_nominal": projected.norm(dim=1),
    }
    coordinates = torch.einsum("skn,sn->sk", rows, projected)
    for damping in DAMPINGS:
        shifted = eigenvalues + damping * eigenvalues[:, :1]
        found[f"inversion_influence_{damping:.0e}"] = (coordinates / shifted).norm(dim=1)
        found[f"expected_influence_rmse_{damping:.0e}"] = (eigenvalues / shifted**2).mean(1).sqrt()
    along_top = torch.einsum("spn,sn->sp", dense, rows[:, 0]) ** 2 / eigenvalues[:, :1]
    squares = (dense**2).sum(2) / eigenvalues.sum(1, keepdim=True)
    for layer, where in layer_slices(exposure.params).items():
        for kind, entries in (("layer_share", squares), ("layer_top_share", along_top)):
            found[f"{kind}/{layer}"] = torch.cat([entries[:, s] for s in where], 1).sum(1)
    return found


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("build", [tiny, large, trained, confident, ill_conditioned])
def test_every_value_is_within_its_stated_error_or_marked(build, precision):
    model, inputs, targets = build()
    targets = torch.arange(len(inputs)) % 4 if targets is None else targets
    gradient_map = GradientMap(model)
    exposure = make_exposure(gradient_map, Batch(inputs, targets), noise_std=1e-2)
    exact = exact_values(gradient_map, exposure)
    influence = InversionInfluence(
        DAMPINGS, expected="always", num_probes=4, max_dense_inputs=30, precision=precision
    )
    scores = (
        GradientNorm(precision=precision),
        LambdaMax(precision=precision),
        LAVP(precision=precision),
        JacobianNorm(precision=precision),
        SingularInfluence(precision=precision),
        InfluenceLowerBound(precision=precision),
        influence,
        LayerShares(precision=precision),
    )
    numbers = 0
    for result in compute_scores(scores, gradient_map, exposure).values():
        assert not result.error
        for measured in result:
            assert len(measured.states) == len(inputs), measured.name
            for place, (value, error, state) in enumerate(
                zip(measured.values, measured.errors, measured.states, strict=True)
            ):
                if value is None:
                    assert error is None and measured.notes[place]
                    assert state in ("unresolved", "lower bound", "upper bound")
                elif measured.name in exact:
                    numbers += 1
                    truth = float(exact[measured.name][place])
                    assert error is not None, measured.name
                    assert abs(value - truth) <= error, (measured.name, place, value, truth, error)
    # Only minima and small dampings may be out of reach.
    assert numbers >= 12 * len(inputs)


@pytest.mark.parametrize("build", [tiny, large, trained, confident])
def test_ordinary_values_have_narrow_bars_in_float32(build):
    model, inputs, targets = build()
    targets = torch.arange(len(inputs)) % 4 if targets is None else targets
    gradient_map = GradientMap(model)
    exposure = make_exposure(gradient_map, Batch(inputs, targets), noise_std=1e-2)
    influence = InversionInfluence((1e-4,))
    scores = {"norm": (GradientNorm(), 1e-3), "top": (LambdaMax(), 0.03), "i2f": (influence, 0.03)}
    found = compute_scores({k: s for k, (s, _) in scores.items()}, gradient_map, exposure)
    for name, (_, most) in scores.items():
        for value, error in zip(found[name].values, found[name].errors, strict=True):
            assert error <= most * value, name


@pytest.mark.parametrize("num_probes", [1, 3])
def test_bars_of_random_estimates_hold_for_nearly_all_draws(num_probes):
    """A bar of 99 % is missed by four of thirty draws or more in one case out of 4,000."""
    model, inputs, _ = ill_conditioned()
    gradient_map = GradientMap(model)
    exposure = make_exposure(gradient_map, Batch(inputs[:1], torch.tensor([0])))
    exact = exact_values(gradient_map, exposure)
    missed = dict.fromkeys(("jacobian_frobenius_norm", "expected_influence_rmse_1e-02"), 0)
    client = ClientSamples(gradient_map, exposure)
    for seed in range(30):
        found = InversionInfluence(
            (1e-2,), expected="always", num_probes=num_probes, max_dense_inputs=0
        )(client, seed)
        found += JacobianNorm(num_probes=5 * num_probes)(client, seed)
        for measured in found:
            if measured.name in missed:
                truth = float(exact[measured.name][0])
                missed[measured.name] += abs(measured.values[0] - truth) > measured.errors[0]
    assert max(missed.values()) < 4, missed


@pytest.mark.parametrize("margin", [12.0, 30.0, 45.0])
def test_a_loss_of_one_s_own_gets_float64_or_a_wider_bar(margin):
    model, inputs = sequence(6, 30, nn.ReLU(), 4), blurred(2, 6)
    with torch.no_grad():
        model[-1].bias[1] += margin
    batch = Batch(inputs, torch.tensor([1, 1]))
    exact = exact_values(GradientMap(model), make_exposure(GradientMap(model), batch))
    own = GradientMap(model, lambda logits, targets: nn.functional.cross_entropy(logits, targets))
    exposure = make_exposure(own, batch)
    found = compute_scores({"norm": GradientNorm(), "top": LambdaMax()}, own, exposure)
    for name, result in (("gradient_norm", found["norm"]), ("lambda_max", found["top"])):
        for value, error, truth in zip(result.values, result.errors, exact[name], strict=True):
            assert value is not None and abs(value - float(truth)) <= error
            assert margin > 15 or error <= 0.03 * value
