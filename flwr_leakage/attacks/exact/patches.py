"""Recover one image exactly through the patches that a vision transformer cuts it into."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.analytic import one_image
from flwr_leakage.attacks.network.calls import Affine
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.one_by_one import Applicability, ExactAttack
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE, FLOAT32_RELATIVE_ERROR, FLOAT32_ROUNDING
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.values import require

SAME = 1e-6
"""Relative error up to which ``∂L/∂W = Δᵀ X`` of :class:`Patches` counts as true for a dummy image
in float64. Rounding leaves an error of 1e-12. A table that does not hold the positions, or a wrong
first row in the right table, leaves 0.5 or more. Any limit between the two separates them."""

PROVEN_ERROR = 1e-3
"""Largest estimated error of pixels that count as proven, relative to the root mean square of the
patches' pixels. It is 60 dB, and about three times the standard deviation of 3e-4 that
:mod:`~flwr_leakage.attacks.exact.batch_proof` allows for a proven sample."""

SHARP_ERROR = PROVEN_ERROR / 10
"""Estimated error of pixels, that of 80 dB, above which all layers' gradients are fitted, too."""

LINEAR_MISFIT = 100.0
"""Largest root mean square residual of the whole gradient, in standard deviations of its rounding,
at which it is fitted by one linear step. Images of 56 to 73 dB left 3 to 13 (four development
draws). The part that a linear step ignores is the square of the relative residual, 1e-8 here."""

MOST_PARAMETERS = 10_000_000
"""Largest number of trained parameters whose gradients are fitted. An iteration of the fit took 0.1
CPU s with 1.2 million parameters, and 0.2 with 3.6 million."""


@dataclass(frozen=True)
class Patches(ExactAttack):
    """Solve for an image by the gradients of a table of positions and of a layer of patches.

    A vision transformer embeds patch t of the image, with n pixels x_t, as ``z_t = W x_t + b`` of
    width d, and adds a trained row Q_t for its position. So the table's gradient is
    ``∂L/∂Q_t = δ_t``, where δ_t is the derivative of the loss by ``z_t + Q_t``. For all T patches,

        ∂L/∂W = Σ_t δ_t x_tᵀ = Δᵀ X,

    with the rows δ_t of Δ (T, d) and x_t of X (T, n). X follows by least squares, if T ≤ d and Δ
    has full rank (after Lu et al. 2022, APRIL). For several local steps, both sides are sums over
    the steps, so that the equation still holds. Dropout behind ``z_t + Q_t`` does not change it.

    The table may begin with other rows, such as one for a class token. The equation holds for a
    dummy image, too. So the attacker's own gradient of a dummy image shows which parameters are the
    layer and the table, and at which row of the table the patches begin. The attack takes one
    image, and no weight decay.

    Where patches look alike, the rows of Δ nearly depend on each other, and least squares amplify
    rounding. If the estimated PSNR is below 80 dB, and the model has at most ten million
    parameters, one Gauss–Newton step on the gradients of all layers follows. It begins at the
    solution, before this is clamped to the pixels' range.

    Attributes:
        iterations: largest number of iterations of conjugate gradients in the Gauss–Newton step.
    """

    iterations: int = 100

    purpose: ClassVar[str] = "patches"

    def __post_init__(self) -> None:
        require(self, "be at least 0", "iterations")

    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Return a statement that the attack applies, with the layer and the table that it uses.

        Raises:
            ValueError: the update has several images or weight decay, or the model has no trained
                layer of patches with trained positions.
        """
        found = _find(problem, generator)
        return Applicability(
            True,
            f"{found.layer.removesuffix('.weight')!r} takes {found.count} patches of "
            f"{found.size} values, and {found.table!r} holds the error of each: x is exact.",
        )

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the one image that explains a problem's update, with its label.

        The image is a least-squares solution. It does not depend on ``restart``, the number of the
        start. The iterations that follow end early once the ``budget`` is spent.

        Raises:
            ValueError: the update has several images or weight decay, or the model has no trained
                layer of patches with trained positions.
        """
        found = _find(problem, generator)
        weight = problem.gradient[found.layer].flatten(1)
        errors = _rows(problem.gradient[found.table])[found.offset : found.offset + found.count]
        left, values, right = torch.linalg.svd(errors.T, full_matrices=False)
        kept = values > FLOAT32_RELATIVE_ERROR / 100 * values[0]
        patches = right[kept].T @ ((left[:, kept].T @ weight) / values[kept, None])
        misfit = float((errors.T @ patches - weight).square().sum() / weight.square().sum())
        # The pixels' standard deviation is the rounding of ∂L/∂W divided by the singular values of
        # the errors Δ.
        rounding = FLOAT32_RELATIVE_ERROR / 10 * weight.norm() / weight.numel() ** 0.5
        deviation = rounding * values[kept].square().reciprocal().sum().div(found.count).sqrt()
        error = float(deviation / patches.square().mean().sqrt().clamp_min(1e-30))
        rank = int(kept.sum())
        stage = f"{found.count} patches by the gradient of {found.table}, of rank {rank}"
        stats: dict[str, Any] = {"stage": stage}
        is_whole = rank == found.count and error <= PROVEN_ERROR
        if is_whole and misfit <= FLOAT32_RELATIVE_ERROR**2:
            stats |= {"verdicts": ("proven",), "relative_errors": [error]}
        image = found.image(patches)
        answer = one_image(problem, image, misfit, stats, generator)
        if rank < found.count or error <= SHARP_ERROR or not problem.is_single_gradient:
            return answer
        assert answer.batch is not None
        inverse = torch.linalg.pinv(errors @ errors.T)
        start = Batch(image, answer.batch.targets)
        better = _sharpened(problem, found, start, inverse, self.iterations, budget)
        if better is None:
            return answer
        stats["stage"] = f"{stage}, and a step on all layers"
        return one_image(problem, better, misfit, stats, generator)


def _sharpened(
    problem: Problem,
    layout: "_Layout",
    start: Batch,
    inverse: Float[Tensor, "T T"],
    iterations: int,
    budget: Budget,
) -> Tensor | None:
    """Return the image (1, C, H, W) after one Gauss–Newton step on the gradients of all layers.

    The step d minimises ``‖w (g(x) + J d − g*)‖²``, with the gradient g of an image x, its
    derivative J and the observed gradient g*. The weights w are the inverse standard deviations of
    rounding: of the gradient in float32, and of parameters θ that are sent in float32 after a step
    of the learning rate η. Conjugate gradients solve for d in single precision. Their
    preconditioner is ``(Δ Δᵀ)⁻¹`` for each pixel of the patches, which ``inverse`` holds for the
    errors Δ of the patches.

    ``start`` is the image x in double precision, with its label. There are at most ``iterations``
    iterations; they end early once the ``budget`` is spent. The result is ``None`` if there are
    more parameters than ``MOST_PARAMETERS``, if patches overlap or leave pixels out, if x does not
    explain g* up to a multiple of rounding, as with noise or dropout, or if the step does not lower
    the residual.
    """
    image = start.inputs
    # The index of each pixel in the flattened patches, if each pixel is in one patch.
    number = torch.arange(layout.count * layout.size).to(image)
    places = layout.image(number.reshape(layout.count, layout.size)).flatten().long()
    if not torch.equal(places.sort().values.to(number), number):
        return None
    trained = [name for name in problem.gradient if name in problem.gradient_map.trained]
    if sum(problem.gradient[name].numel() for name in trained) > MOST_PARAMETERS:
        return None
    rate = problem.schedule.learning_rate
    observed = ravel({name: problem.gradient[name] for name in trained})
    # A gradient that is zero but for rounding, as that of a bias of keys, has no relative accuracy.
    least = 1e-3 * observed.square().mean().sqrt()

    def deviation(name: str) -> Tensor:
        gradient, values = problem.gradient[name], problem.params[name]
        rough = FLOAT32_NOISE * gradient.square().mean().sqrt().clamp_min(least)
        rough = rough + FLOAT32_ROUNDING * values.square().mean().sqrt() / rate
        return rough.expand(gradient.shape)

    weights = 1 / ravel({name: deviation(name) for name in trained})

    def gradient(images: Tensor, of: Problem) -> Tensor:
        wanted: Params = {name: of.params[name] for name in trained}
        batch = Batch(images, start.targets)
        return ravel(of.gradient_map.gradient_of(wanted, of.params, batch, of.buffers))

    def residual(images: Tensor) -> Tensor:
        return weights * (gradient(images, problem) - observed)

    before = residual(image)
    limit = float(before.square().mean().sqrt())
    if not 1 < limit <= LINEAR_MISFIT:
        return None
    # The scales are 1 at most, as products must not exceed the range of single precision.
    single, scales = problem.to(torch.float32), (weights / weights.max()).float()
    here = Linearization(partial(gradient, of=single), image.float())

    def product(flat: Tensor) -> Tensor:
        change = here.push(flat.reshape(image.shape))
        return here.pull(scales.square() * change).flatten()

    def precondition(flat: Tensor) -> Tensor:
        patches = torch.empty_like(flat).scatter_(0, places, flat)
        patches = inverse.to(flat) @ patches.reshape(layout.count, layout.size)
        return layout.image(patches).flatten()

    slope = here.pull(scales * (before / weights.max()).float()).flatten()
    step, _ = conjugate_gradients(
        product, -slope, 1e-6, iterations, precondition, lambda: budget.is_spent
    )
    better = image + step.reshape(image.shape)
    return better if float(residual(better).square().mean().sqrt()) < limit else None


@dataclass(frozen=True)
class _Layout:
    """The names and sizes of a vision transformer's layer of patches and table of positions.

    Attributes:
        layer: the name of the weight of the layer that embeds the patches.
        table: the name of the table of positions.
        offset: the index of the table's row that is added to the first patch.
        count: the number T of patches.
        size: the number n of values in a patch.
        image: map from patches (T, n) to the image (1, C, H, W).
    """

    layer: str
    table: str
    offset: int
    count: int
    size: int
    image: Callable[[Tensor], Tensor]


def _rows(table: Tensor) -> Tensor:
    return table.reshape(-1, table.shape[-1])


def _find(problem: Problem, generator: torch.Generator) -> _Layout:
    """Return the layer of patches and the table of positions of a problem's network.

    Raises:
        ValueError: the update has several images or weight decay, the network has no such layer and
            table, there are more patches than the width of the layer, or no gradient reaches the
            patches.
    """
    if problem.num_samples != 1 or problem.members or problem.schedule.weight_decay:
        decay = " and weight decay" if problem.schedule.weight_decay else ""
        raise ValueError(f"it takes 1 sample without decay, got {problem.num_samples}{decay}.")
    like = problem.like
    dummy = torch.randn(1, *problem.spec.shape, generator=generator, dtype=torch.float64).to(like)
    with torch.no_grad():
        layer, patches, image = _patches(problem, dummy)
    count, size = patches.shape
    trained = problem.gradient_map.trained
    width = problem.params[layer].shape[0]
    tables = [
        name
        for name, value in problem.params.items()
        if name in trained and name != layer and value.ndim > 1
        and value.shape[-1] == width and value.numel() >= count * width
    ]  # fmt: skip
    if not tables:
        raise ValueError(
            f"no trained table of positions has a row of {width} for each of {count} patches."
        )
    targets = torch.zeros(1, dtype=torch.int64, device=like.device)
    zero = [  # the names of trained matrices whose entries are all zero
        name
        for name, value in problem.params.items()
        if name in trained and value.ndim > 1 and not bool(value.any())
    ]
    # Weights that are all zero let no gradient through, so that random ones stand in for them here.
    # Which parameters embed the patches does not depend on these weights.
    drawn = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        for name, value in problem.params.items()
        if name in zero
    }
    params = {**problem.params, **drawn}
    wanted = {name: params[name] for name in (layer, *tables)}
    gradient = problem.gradient_map.gradient_of(
        wanted, params, Batch(dummy, targets), problem.buffers
    )
    weight = gradient[layer].flatten(1)
    if not bool(weight.any()):
        raise ValueError("no gradient reaches the patches.")
    if not bool(problem.gradient[layer].any()):
        raise ValueError(
            f"{zero[-1]!r} is all zero, as torchvision starts the head of its vision transformers: "
            f"no gradient reaches the patches yet, and the update tells the label and the last "
            f"features alone. From the second step on that is over, and the image can be read off."
            if zero
            else f"the gradient of {layer!r} is zero: all of it was pruned."
        )
    if count > width:
        raise ValueError(
            f"{count} patches are more than the width {width}, so that their errors do not tell "
            f"them apart."
        )
    for table in tables:
        rows = _rows(gradient[table])
        for offset in range(len(rows) - count + 1):
            off = rows[offset : offset + count].T @ patches - weight
            if float(off.norm() / weight.norm()) < SAME:
                return _Layout(layer, table, offset, count, size, image)
    raise ValueError("no trained table is added to the patches, position by position.")


def _patches(
    problem: Problem, dummy: Float[Tensor, "1 C H W"]
) -> tuple[str, Float[Tensor, "T n"], Callable[[Tensor], Tensor]]:
    """Return the layer that takes an image in patches, and how the patches make up the image.

    ``dummy`` is an image of distinct random pixels.

    Returns:
        The name of the layer's weight; the patches (T, n) of the dummy image; and the map from
        patches (T, n) to their image (1, C, H, W).

    Raises:
        ValueError: no trained layer takes the image in patches of its pixels.
    """
    for step in traced(problem, dummy).steps:
        op = step.op
        if not isinstance(op, Affine) or op.name not in problem.gradient_map.trained:
            continue
        if op.is_convolution:
            if op.inputs.shape != dummy.shape or not torch.equal(op.inputs, dummy):
                break
            geometry = op.geometry
            assert geometry is not None and op.settings is not None
            stride, padding, dilation, _ = op.settings
            if isinstance(padding, str) or any(op.zeros):
                break
            settings = {
                "kernel_size": op.weight.shape[2:], "dilation": dilation, "padding": padding,
                "stride": stride,
            }  # fmt: skip
            patches = F.unfold(dummy, **settings)[0].T
            return op.name, patches, partial(_folded, tuple(dummy.shape), settings)
        if op.inputs.numel() != dummy.numel() or op.inputs.shape[-1] == dummy.numel():
            break
        patches = op.inputs.reshape(-1, op.inputs.shape[-1])
        given, order = dummy.flatten().sort()
        taken, places = patches.flatten().sort()
        if not torch.equal(given, taken):
            break
        # Entry order[i] of the image is entry places[i] of the patches, so that ``back`` holds for
        # each pixel its index in the patches.
        back = torch.empty_like(order)
        back[order] = places
        return op.name, patches, partial(_picked, tuple(dummy.shape), back)
    raise ValueError("no trained layer takes the image in patches of its pixels.")


def _folded(
    shape: tuple[int, ...], settings: dict[str, Any], patches: Float[Tensor, "T n"]
) -> Float[Tensor, "1 C H W"]:
    """Return the image (1, C, H, W) of a convolution's patches, with their mean where they overlap.

    ``shape`` is the image's. ``settings`` holds kernel size, dilation, padding and stride of the
    convolution, for ``F.fold``.
    """
    columns = patches.T[None]
    covered = F.fold(torch.ones_like(columns), shape[2:], **settings)
    return F.fold(columns, shape[2:], **settings) / covered.clamp_min(1)


def _picked(
    shape: tuple[int, ...], places: Int[Tensor, " N"], patches: Float[Tensor, "T n"]
) -> Float[Tensor, "1 C H W"]:
    """Return the image (1, C, H, W) of a linear layer's patches, one in each row.

    ``shape`` is the image's. For each pixel of the flattened image, ``places`` tells its index in
    the flattened patches.
    """
    return patches.flatten()[places].reshape(shape)
