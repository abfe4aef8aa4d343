"""Do the scores keep to the errors that they state? True against stated errors, both relative.

Twelve networks, untrained and trained to three degrees, and of each the digits at several quantiles
of the margin, the most confident ones among them. The truth is the dense J in float64. A value
without a number is marked, and does not count as wrong.

    python -m simulations.benchmarks.scores_errors --seed 100
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.models import MLP, LeNet, initialize
from flwr_leakage.operators import SampleJacobian
from flwr_leakage.per_sample import ClientSamples, Precision, separate
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Measurement, Update
from flwr_leakage.scores import (
    LAVP,
    GradientNorm,
    InfluenceKrylovBound,
    InversionInfluence,
    JacobianNorm,
    LambdaMax,
)
from flwr_leakage.scores.base import Column, SampleScore, Score, numbers_of
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.spectral import inverse_sum
from simulations.benchmarks import lab

DAMPINGS = (1e-2, 1e-4, 1e-6)
QUANTILES = (0.02, 0.5, 0.95, 0.99)
PRECISIONS: tuple[Precision, ...] = ("float32", "float64")


@dataclass(frozen=True)
class Network:
    """A model, its input size, and how long it was trained.

    Attributes:
        model: with (1, size, size) inputs.
        size: of the digits; 28 as they are, less by averaging.
        epochs: of Adam on 2,000 digits.
    """

    model: nn.Module
    size: int
    epochs: int


def networks(seed: int) -> Iterator[tuple[str, Network]]:
    """Those of the table, one after the other, with a draw of weights."""

    def draw(model: nn.Module, scheme: str = "default") -> nn.Module:
        return initialize(model, scheme, lab.generator(seed))  # type: ignore[arg-type]

    def convolutions(size: int, width: int = 16, norm: bool = False) -> nn.Module:
        return draw(lab.small_convnet((1, size, size), width, norm))

    torch.manual_seed(seed)  # plain layers draw their weights from the global stream
    yield "LeNet, 14×14", Network(draw(LeNet((1, 14, 14), 10), "uniform"), 14, 0)
    yield "LeNet, trained, 14×14", Network(draw(LeNet((1, 14, 14), 10), "uniform"), 14, 8)
    for epochs in (0, 1, 5, 30):
        yield f"ReLU ConvNet, {epochs} epochs, 14×14", Network(convolutions(14), 14, epochs)
    tiny = nn.Sequential(nn.Flatten(), nn.Linear(49, 16), nn.Sigmoid(), nn.Linear(16, 10))
    yield "tiny MLP, 7×7", Network(tiny, 7, 20)
    tanh = nn.Sequential(nn.Flatten(), nn.Linear(196, 64), nn.Tanh(), nn.Linear(64, 10))
    yield "tanh MLP, 14×14", Network(tanh, 14, 30)
    yield "ConvNet, BatchNorm, 14×14", Network(convolutions(14, norm=True), 14, 5)
    wide = MLP((1, 14, 14), 10, (400, 200))
    yield "wide MLP, 14×14", Network(draw(wide), 14, 3)
    yield "ReLU ConvNet, 5 epochs, 28×28", Network(convolutions(28), 28, 5)
    lenet = LeNet((1, 28, 28), 10, num_convolutions=3)
    yield "LeNet, 28×28", Network(draw(lenet, "uniform"), 28, 0)


def digits(size: int, train: bool, indices: list[int]) -> Batch:
    """Digits with pixels in [0, 1], made smaller by averaging."""
    found = embedded_mnist(mean=(0.0,), std=(1.0,))[0 if train else 1].batch(indices)
    return Batch(F.adaptive_avg_pool2d(found.inputs, size), found.targets)


def fit(network: Network, seed: int) -> None:
    """Adam with a learning rate of 1e-3 in batches of 32."""
    data = digits(network.size, True, list(range(2000)))
    optimizer = torch.optim.Adam(network.model.train().requires_grad_(True).parameters(), 1e-3)
    order = lab.generator(seed)
    for _ in range(network.epochs):
        lab.train(network.model, optimizer, lab.shuffled(data, 32, order))
    network.model.eval()


def margins(model: nn.Module, batch: Batch) -> Tensor:
    """Log p_y/(1 − p_y) of each digit."""
    with torch.no_grad():
        logits = model(batch.inputs).double()
    others = logits.scatter(1, batch.targets[:, None], -torch.inf).logsumexp(1)
    return logits.gather(1, batch.targets[:, None])[:, 0] - others


def by_margin(network: Network) -> Batch:
    """Test digits at the quantiles of the margin."""
    data = digits(network.size, False, list(range(100, 900)))
    order = margins(network.model, data).argsort()
    return data[order[[int(q * (len(data) - 1)) for q in QUANTILES]]]


@dataclass(frozen=True)
class InverseSum(SampleScore):
    """Σ1/λ, which no score has alone, from ``spectral.inverse_sum``."""

    def measure(self, problem, draws):  # type: ignore[no-untyped-def]
        """``inverse_sum``."""
        found = inverse_sum(problem.operator)
        values, notes, errors, states = numbers_of(found, "at least")
        return [Column("inverse_sum", values, "1", "larger is safer", notes, errors, states)]


def scores_in(precision: Precision) -> dict[str, Score]:
    """All scores of the table in one precision."""
    return {
        "norm": GradientNorm(precision=precision),
        "top": LambdaMax(precision=precision),
        "lavp": LAVP(("angular_max", "lambda_min"), precision=precision),
        "influence": InversionInfluence(DAMPINGS, expected="always", precision=precision),
        "jacobian": JacobianNorm(precision=precision),
        "inverse": InverseSum(precision=precision),
        "krylov": InfluenceKrylovBound(precision=precision),
    }


def exposure_of(gradient_map: GradientMap, batch: Batch, seed: int) -> Exposure:
    """One step over the batch, whose update is released with noise of standard deviation 1e-3."""
    params, buffers = gradient_map.params, gradient_map.buffers
    schedule = LocalSchedule(1.0, 1, len(batch))
    delta = local_update(gradient_map, params, batch, schedule, buffers)
    draw = lab.generator(seed)
    noisy = {k: v + 1e-3 * torch.randn(v.shape, generator=draw) for k, v in delta.items()}
    raw, released = (Update(each, buffers, schedule, len(batch)) for each in (delta, noisy))
    return Exposure(params, buffers, batch, batch, raw, released)


def truths(gradient_map: GradientMap, exposure: Exposure) -> Mapping[str, Tensor]:
    """Every quantity from the dense J in float64, by its measurement's name."""
    params, buffers, batch = exposure.params, exposure.buffers, exposure.private
    weights = exposure.sample_weights()
    samples = separate(gradient_map, params, buffers, batch, weights, torch.float64)
    (problem,) = ClientSamples(gradient_map, exposure).problems(precision="float64")
    rows = []
    for place in range(len(batch)):
        operator: SampleJacobian = samples[place : place + 1].jacobian()
        dense = operator.to_dense()[0]
        _, singular, turned = torch.linalg.svd(torch.linalg.qr(dense, mode="r").R)
        eigenvalues = singular**2
        direction = operator.value[0] / operator.value.norm()
        turning = (dense - direction[:, None] * (direction @ dense)) / operator.value.norm()
        along = turned @ (dense.T @ problem.deltas[place])
        row = {
            "gradient_norm": operator.value.norm(),
            "lambda_max": eigenvalues[0],
            "lambda_min": eigenvalues[-1],
            "angular_max": torch.linalg.eigvalsh(turning.T @ turning)[-1],
            "jacobian_norm": singular[0],
            "jacobian_frobenius_norm": eigenvalues.sum().sqrt(),
            "inverse_sum": (1 / eigenvalues).sum(),
        }
        for damping in DAMPINGS:
            shifted = eigenvalues + damping * eigenvalues[0]
            rmse = (eigenvalues / shifted**2).mean().sqrt()
            row[f"inversion_influence_{damping:.0e}"] = (along / shifted).norm()
            row[f"expected_influence_rmse_{damping:.0e}"] = rmse
        rows.append(row)
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    krylov = InfluenceKrylovBound(precision="float64")(ClientSamples(gradient_map, exposure), 0)[0]
    columns[krylov.name] = torch.tensor(
        [torch.nan if value is None else value for value in krylov.values], dtype=torch.float64
    )
    return columns


@dataclass
class Tally:
    """What became of the values of one quantity in one precision."""

    worst: float = 0.0
    worst_stated: float = 0.0
    within: int = 0
    numbers: int = 0
    marked: int = 0

    def add(self, measured: Measurement, truth: Tensor) -> list[str]:
        """Count a measurement; return what is wrong and not marked."""
        wrong = []
        for value, error, exact in zip(
            measured.values, measured.errors, truth.tolist(), strict=True
        ):
            if value is None or error is None:
                self.marked += 1
                continue
            self.numbers += 1
            true, stated = abs(value - exact) / exact, error / exact
            self.worst, self.worst_stated = max(self.worst, true), max(self.worst_stated, stated)
            self.within += true <= stated
            if true > stated:
                wrong.append(f"{measured.name}: {true:.1e} off, stated {stated:.1e}")
        return wrong


def tally(seed: int, only: str = "", without: str = "") -> dict[tuple[str, str], Tally]:
    """The tallies by quantity and precision, over all networks; what is wrong is printed."""
    found: dict[tuple[str, str], Tally] = {}
    for label, network in networks(seed):
        if only not in label or (without and without in label):
            continue
        fit(network, seed)
        batch = by_margin(network)
        gradient_map = GradientMap(network.model)
        exposure = exposure_of(gradient_map, batch, seed)
        exact = truths(gradient_map, exposure)
        sure = margins(network.model, batch).tolist()
        condition = float((exact["lambda_max"] / exact["lambda_min"].clamp_min(1e-300)).max())
        print(
            f"{label}: margins {', '.join(f'{m:.0f}' for m in sure)}, λmax/λmin ≤ {condition:.0e}",
            flush=True,
        )
        for precision in PRECISIONS:
            for result in compute_scores(
                scores_in(precision), gradient_map, exposure, seed
            ).values():
                if result.error:
                    print("FAILED", result.error)
                for measured in result:
                    if measured.name in exact:
                        own = found.setdefault((measured.name, precision), Tally())
                        for line in own.add(measured, exact[measured.name]):
                            print(f"  {precision} {line}", flush=True)
    return found


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="below 100 for development")
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--without", default="", help="none whose name contains this")
    arguments = lab.start(parser)
    found = tally(arguments.seed, arguments.only, arguments.without)
    lab.print_header(
        "quantity", "precision", "worst error", "worst stated", "within stated", "marked"
    )
    for (name, precision), own in sorted(found.items()):
        total = own.numbers + own.marked
        lab.print_row(
            name,
            precision,
            f"{own.worst:.1e}",
            f"{own.worst_stated:.1e}",
            f"{own.within} of {own.numbers}",
            f"{own.marked} of {total}",
        )


if __name__ == "__main__":
    main()
