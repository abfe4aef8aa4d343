"""Attacks against the bounds that hold for them, over levels of Gaussian noise.

    python -m simulations.benchmarks.attacks_bounds --root FOLDER --first 100 --seed 100

prints a Markdown table. One gradient of one image each, with independent Gaussian noise of the same
σ on every entry, σ being a level times the median root mean square of the images' gradients.
Labels are known, so that a wrong one does not hide in the error. Two sets of ``--images`` images of
16×16 grey pixels:

- ``prior``: draws of the attacker's own Gaussian prior (1/f² spectrum), not clipped;
- ``CIFAR-10``: test images from ``--first`` on, in grey, means of 2×2 pixels.

Three attackers:

- ``least squares``: a minimum of ‖g(x) − g*‖² near the truth. No prior, no clamping: unbiased as
  far as the network is linear within the error. The **Cramér–Rao bound** holds for it.
- ``posterior mode``: the same with the prior's (x − μ)ᵀC⁻¹(x − μ).
- ``gauss_newton``: the preset, from grey, σ estimated by itself, the answer clamped to pixels in
  [0, 1]. It and the posterior mode are biased, and the Cramér–Rao bound does not hold for them.
  On ``prior`` the **Bayesian bound** holds for both as a mean over images: tr((JJᵀ/σ² + C⁻¹)⁻¹)/N,
  linearised at each image, and with JJᵀ averaged over the images that of van Trees. On CIFAR-10 no
  bound of this kind holds: these images are no draws of the prior. The formula is shown for
  comparison, and marked so.

Draws of the prior leave [0, 1] in 5 % of the pixels, where the clamped answer of ``gauss_newton``
cannot follow: that alone costs it an RMSE of about 0.11, which is printed. The Bayesian bound holds
all the same.

The first two start where a linear attacker under *another* draw of noise would end, which nobody
can know: they tell what the best attackers of their class could reach. ``RMSE`` and ``bound`` are
roots of means over all runs, in model input units; ``ratio`` is theirs, with a 99 % interval from
2,000 bootstrap samples over images. ``same noise`` is the RMSE over what a linear attacker gets
from the very same draws of noise (for least squares the undamped I²F), which removes the luck of
the draw. ``bias`` is the share of the squared error that repeats from draw to draw. ``unfinished``
runs did not settle, and are counted in everything.

Where the Cramér–Rao bound exceeds 1, the spread of standardised images, an unbiased attacker is of
no use to anybody, and is not run. It is marked as not binding where runs did not settle. A ReLU
network's gradient jumps where a unit changes sides. Jumps tell about the image, too, and neither
bound knows of them: for that network both are those of the linearisation.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet, initialize
from flwr_leakage.operators import SampleJacobian
from flwr_leakage.params import ravel, unravel
from flwr_leakage.records import Batch, Disclosure, InputSpec, ThreatModel
from flwr_leakage.spectral.image_prior import ImagePrior
from simulations.benchmarks import lab

SHAPE = (1, 16, 16)
SPEC = InputSpec(SHAPE, lab.CLASSES, (0.48,), (0.24,))
CHUNK = 8
"""Images whose dense Jacobians are held at a time."""
BOOTSTRAPS = 2000
SETTLED = 1e-6
"""Newton's decrement, as a share of the number of inputs, below which a run is finished."""
OUTER, INNER, SHORTENINGS = 10, 15, 5
"""Steps of Gauss–Newton, of conjugate gradients in each, and trials of its length."""


@dataclass(frozen=True)
class Bounds:
    """What is known of some images under one network, and the prior.

    Attributes:
        gram: JJᵀ of each image, (S, N, N).
        precision: C⁻¹, (N, N).
        grey: μ, (N,).
    """

    gram: Float[Tensor, "S N N"]
    precision: Float[Tensor, "N N"]
    grey: Float[Tensor, " N"]

    def cramer_rao(self, noise_std: float) -> Float[Tensor, " S"]:
        """Squared error per input of an unbiased attacker, for each image."""
        return noise_std**2 * _mean_diagonal(torch.linalg.inv(self.gram))

    def bayesian(self, noise_std: float) -> Float[Tensor, " S"]:
        """That of an attacker with the prior, linearised at each image."""
        return _mean_diagonal(torch.linalg.inv(self.gram / noise_std**2 + self.precision))

    def van_trees(self, noise_std: float) -> float:
        """The same with JJᵀ averaged over the images."""
        mean = self.gram.mean(0) / noise_std**2 + self.precision
        return float(_mean_diagonal(torch.linalg.inv(mean)))


def _mean_diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).mean(-1)


def networks(name: str, seed: int) -> nn.Module:
    """LeNet with sigmoids or the ReLU network, untrained, for 16×16 grey images."""
    torch.manual_seed(seed)
    if name == "lenet":
        return initialize(
            LeNet(SHAPE, lab.CLASSES, num_convolutions=3), "uniform", lab.generator(seed)
        ).eval()
    return lab.small_convnet(SHAPE).eval()


def prior_draws(prior: ImagePrior, count: int, seed: int) -> Batch:
    """Images of the prior, in double precision, with labels in turn."""
    draws = torch.randn(count, *SHAPE, generator=lab.generator(seed), dtype=torch.float64)
    return Batch(prior.inputs(draws), torch.arange(count) % lab.CLASSES)


def grey_images(root: str, first: int, count: int) -> Batch:
    """CIFAR-10 test images in grey, 16×16, in double precision."""
    images = lab.load(root, "test", first, count)
    small = F.avg_pool2d(images.inputs.mean(1, keepdim=True), 2).double()
    return Batch(SPEC.normalize(small), images.targets)


def jacobian(network: nn.Module, batch: Batch) -> SampleJacobian:
    """Of each image on its own, in double precision."""
    gradient_map = GradientMap(network)
    params = {name: value.double() for name, value in gradient_map.params.items()}
    return SampleJacobian(gradient_map, params, batch)


def gram_matrices(network: nn.Module, batch: Batch) -> Float[Tensor, "S N N"]:
    """JJᵀ of each image."""
    found = []
    for start in range(0, len(batch), CHUNK):
        dense = jacobian(network, batch[start : start + CHUNK]).to_dense()
        found.append(dense.transpose(1, 2) @ dense)
    return torch.cat(found)


def minimise(
    network: nn.Module,
    batch: Batch,
    start: Float[Tensor, "S N"],
    observed: Float[Tensor, "S P"],
    bounds: Bounds,
    noise_std: float,
    prior_weight: float,
) -> tuple[Float[Tensor, "S N"], Tensor]:
    """Argmin ‖g(x) − g*‖²/σ² + w (x − μ)ᵀC⁻¹(x − μ) near a start, and which runs settled.

    Gauss–Newton, each step by conjugate gradients that the curvature at the truth preconditions,
    shortened until it descends. The truth enters as a preconditioner and not as a point.
    """
    shape = batch.inputs.shape
    factor = torch.linalg.cholesky(bounds.gram / noise_std**2 + prior_weight * bounds.precision)
    point, length = start.clone(), torch.ones(len(batch), dtype=torch.float64)
    settled = torch.zeros(len(batch), dtype=torch.bool)

    def evaluate(x: Tensor) -> tuple[SampleJacobian, Tensor, Tensor]:
        here = jacobian(network, Batch(x.reshape(shape), batch.targets))
        pulled = prior_weight * (x - bounds.grey) @ bounds.precision
        misfit = (here.value - observed).square().sum(1) / noise_std**2
        return here, pulled, misfit + (pulled * (x - bounds.grey)).sum(1)

    for _ in range(OUTER):
        here, pulled, value = evaluate(point)
        slope = here.rmatvec((here.value - observed) / noise_std**2) + pulled

        def product(v: Tensor, here: SampleJacobian = here) -> Tensor:
            return here.gram(v) / noise_std**2 + prior_weight * v @ bounds.precision

        step = _conjugate_gradients(product, slope, factor)
        settled = settled | ((slope * step).sum(1) < SETTLED * slope.shape[1])
        if bool(settled.all()):
            break
        for _ in range(SHORTENINGS):
            trial = point - (length * ~settled)[:, None] * step
            better = evaluate(trial)[2] <= value
            point = torch.where((better & ~settled)[:, None], trial, point)
            if bool((better | settled).all()):
                length = torch.ones_like(length)
                break
            # Those that descended have moved, and wait; the others try a shorter step.
            length = torch.where(better, 0.0, length / 4)
        else:
            length = torch.ones_like(length)
    return point, settled


def _conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, factor: Tensor
) -> Tensor:
    """Rows x with product(x) = right, about, preconditioned by a Cholesky factor for each."""

    def precondition(rows: Tensor) -> Tensor:
        return torch.cholesky_solve(rows[..., None], factor)[..., 0]

    solution, residual = torch.zeros_like(right), right.clone()
    direction = better = precondition(residual)
    along = (residual * better).sum(1)
    first = along.clone()
    for _ in range(INNER):
        if bool((along <= 1e-4 * first).all()):
            break
        image = product(direction)
        size = (along / (direction * image).sum(1).clamp_min(1e-300))[:, None]
        solution, residual = solution + size * direction, residual - size * image
        better = precondition(residual)
        previous, along = along, (residual * better).sum(1)
        direction = better + (along / previous.clamp_min(1e-300))[:, None] * direction
    return solution


@dataclass(frozen=True)
class Cell:
    """Runs of one attack at one noise level.

    Attributes:
        errors: squared error per input (draws, images).
        linear: what a linear attacker gets from the same noise, or ``None``.
        bias: share of the squared error that repeats from draw to draw, or ``None``.
        unfinished: runs that did not settle, of those that can tell.
    """

    errors: Float[Tensor, "D S"]
    linear: Float[Tensor, "D S"] | None
    bias: float | None
    unfinished: int


def from_nearby(
    network: nn.Module,
    batch: Batch,
    bounds: Bounds,
    noise: Float[Tensor, "D S P"],
    noise_std: float,
    prior_weight: float,
) -> Cell:
    """Least squares (weight 0) or the posterior mode (weight 1), for every draw of the noise.

    A run starts where a linear attacker under another draw of noise would end. It is as far from
    the truth as the bound, so that a run that gets stuck does not pass for a good one.
    """
    operator = jacobian(network, batch)
    truth = batch.inputs.flatten(1)
    curvature = bounds.gram / noise_std**2 + prior_weight * bounds.precision
    shrunk = prior_weight * (truth - bounds.grey) @ bounds.precision

    def linear(draw: Tensor) -> Tensor:
        pull = operator.rmatvec(draw) / noise_std**2 - shrunk
        return torch.linalg.solve(curvature, pull[..., None])[..., 0]

    generator = lab.generator(int(noise_std * 1e9) % 2**31)
    offsets, lines, unfinished = [], [], 0
    for draw in noise:
        other = noise_std * torch.randn(draw.shape, generator=generator, dtype=torch.float64)
        start, observed = truth + linear(other), operator.value + draw
        found, settled = minimise(network, batch, start, observed, bounds, noise_std, prior_weight)
        offsets.append(found - truth)
        lines.append(linear(draw).square().mean(1))
        unfinished += int((~settled).sum())
    stacked = torch.stack(offsets)
    errors = stacked.square().mean(2)
    bias = None
    if len(noise) > 1:
        repeated = stacked.mean(0).square().mean(1) - stacked.var(0).mean(1) / len(noise)
        bias = float(repeated.sum() / errors.mean(0).sum())
    return Cell(errors, torch.stack(lines), bias, unfinished)


def preset(
    network: nn.Module, batch: Batch, noise: Float[Tensor, "S P"], products: int | None
) -> Cell:
    """The attack ``gauss_newton``, as a server runs it but for the labels, which it is given."""
    attack = load_preset("gauss_newton")
    assert isinstance(attack, GaussNewton)
    attack = attack if products is None else replace(attack, products=products)
    gradient_map = GradientMap(network)
    threat = ThreatModel(labels="known")
    errors = []
    for index in range(len(batch)):
        one = Batch(batch.inputs[index : index + 1].float(), batch.targets[index : index + 1])
        seen = lab.observe(
            gradient_map, one, client_id=index, disclosed=Disclosure(targets=one.targets)
        )
        hidden = ravel(seen.update.delta) - noise[index].float()
        update = replace(seen.update, delta=unravel(hidden, seen.update.delta))
        (found,), _ = lab.run_attack(
            attack, gradient_map, SPEC, [replace(seen, update=update)], threat, seed=index
        )
        assert found.batch is not None, found.error
        errors.append(float((found.batch.inputs - batch.inputs[index]).square().mean()))
    return Cell(torch.tensor([errors], dtype=torch.float64), None, None, 0)


def interval(
    errors: Float[Tensor, " S"], bounds: Float[Tensor, " S"], seed: int = 0
) -> tuple[float, float, float]:
    """√(mean error / mean bound), with a 99 % interval over images."""
    draws = torch.randint(len(errors), (BOOTSTRAPS, len(errors)), generator=lab.generator(seed))
    ratios = (errors[draws].mean(1) / bounds[draws].mean(1)).sqrt()
    low, high = torch.quantile(ratios, torch.tensor([0.005, 0.995], dtype=torch.float64)).tolist()
    return float((errors.mean() / bounds.mean()).sqrt()), low, high


def show(names: Sequence[str], cell: Cell, bounds: Float[Tensor, " S"], bound: str) -> None:
    """One row of the table."""
    per_image = cell.errors.mean(0)
    ratio, low, high = interval(per_image, bounds)
    same = "" if cell.linear is None else f"{math.sqrt(cell.errors.sum() / cell.linear.sum()):.3f}"
    lab.print_row(
        *names,
        cell.errors.numel(),
        f"{math.sqrt(per_image.mean()):.3g}",
        bound,
        f"{math.sqrt(bounds.mean()):.3g}",
        f"{ratio:.2f} ({low:.2f} to {high:.2f})",
        same,
        "" if cell.bias is None else f"{max(cell.bias, 0):.0%}",
        cell.unfinished if cell.linear is not None else "",
    )


def run(arguments: argparse.Namespace) -> None:
    """All cells of one command."""
    prior = ImagePrior.of(SPEC)
    pushed = prior.push(torch.eye(math.prod(SHAPE)).double().reshape(-1, *SHAPE)).flatten(1)
    precision = torch.linalg.inv(pushed.T @ pushed)
    sets = {
        "prior": prior_draws(prior, arguments.images, arguments.seed),
        "CIFAR-10": grey_images(arguments.root, arguments.first, arguments.images),
    }
    lab.print_header(
        "network", "images", "noise", "attack", "runs", "RMSE", "bound", "its value", "ratio",
        "same noise", "bias", "unfinished",
    )  # fmt: skip
    for name in arguments.networks.split(","):
        network = networks(name, arguments.seed)
        for kind in arguments.sets.split(","):
            batch = sets[kind]
            gradients = jacobian(network, batch).value
            unit = float(gradients.square().mean(1).sqrt().median())
            bounds = Bounds(gram_matrices(network, batch), precision, prior.grey.flatten())
            spectrum = torch.linalg.eigvalsh(bounds.gram)
            condition = float((spectrum[:, -1] / spectrum[:, 0]).max())
            print(f"<!-- {name}, {kind}: λmax/λmin up to {condition:.1e}, σ unit {unit:.3g} -->")
            if not 0 < condition < 1e12:
                raise ValueError(f"JJᵀ must be well enough conditioned, got {condition:.1e}.")
            floor = float((SPEC.clamp(batch.inputs) - batch.inputs).square().mean().sqrt())
            print(
                f"<!-- {name}, {kind}: clamping the truth itself costs an RMSE of {floor:.3g} -->"
            )
            nearby, attacked = (
                {float(level) for level in levels.split(",") if level}
                for levels in (arguments.nearby, arguments.attacked)
            )
            for level in sorted(nearby | attacked):
                generator = lab.generator(arguments.seed + int(1e6 * level))
                size = (arguments.draws, *gradients.shape)
                noise_std = level * unit
                noise = noise_std * torch.randn(size, generator=generator, dtype=torch.float64)
                row = (name, kind, f"{level:g}")
                unbiased, bayesian = bounds.cramer_rao(noise_std), bounds.bayesian(noise_std)
                told = f"van Trees' bound {math.sqrt(bounds.van_trees(noise_std)):.3g}, "
                told += f"Cramér–Rao {math.sqrt(unbiased.mean()):.3g}"
                print(f"<!-- {', '.join(row)}: {told} -->", flush=True)
                label = "Bayesian" if kind == "prior" else "Bayesian, not binding"
                if level in nearby and float(unbiased.mean()) <= 1:
                    cell = from_nearby(network, batch, bounds, noise, noise_std, 0.0)
                    bound = "Cramér–Rao" + ", not binding" * (cell.unfinished > 0)
                    show((*row, "least squares"), cell, unbiased, bound)
                if level in nearby:
                    cell = from_nearby(network, batch, bounds, noise, noise_std, 1.0)
                    show((*row, "posterior mode"), cell, bayesian, label)
                if level in attacked:
                    cell = preset(network, batch, noise[0], arguments.products)
                    show((*row, "gauss_newton"), cell, bayesian, label)


def main() -> None:
    """Parse the command line and print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    lab.add_window(parser, images=32)
    parser.add_argument("--sets", default="prior,CIFAR-10")
    parser.add_argument("--networks", default="lenet,relu")
    parser.add_argument(
        "--nearby", default="1e-5,1e-4,1e-3,1e-2,1e-1", help="levels for the first two"
    )
    parser.add_argument("--attacked", default="1e-2,1e-1,1", help="levels for gauss_newton")
    parser.add_argument("--draws", type=int, default=2, help="of the noise, for each image")
    parser.add_argument(
        "--products", type=int, help="of gauss_newton; the preset's own if not given"
    )
    run(lab.start(parser))


if __name__ == "__main__":
    main()
