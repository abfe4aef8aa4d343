"""Features of a ReLU network read from its gradients, through pooling and skip connections.

Let a be the output of a ReLU that a convolution takes in, and δ the error of the convolution's
output. Its weight gradient is linear in a: ``∂L/∂W[o, c, k] = Σ_p δ[o, p] a[c, p + k]`` (Zhu and
Blaschko 2021, R-GAP, eq. 8). With all later ReLUs' masks known, δ is exact: the errors travel
back from the logits' error, which is the last bias's gradient. Where the equations determine a,
its zeros are the mask of its ReLU, and the recursion goes one ReLU further. Networks whose
channels grow as their maps shrink have far more equations than unknowns in all but the first
layers. What the recursion needs of the architecture is only which ReLU feeds which convolution:
BatchNorm with given statistics and skip connections are walked by automatic differentiation.

After global average pooling the last mask is not known from the features. But then all positions
share one error u per channel, and the weight gradient of the last convolution, divided by u, is
``B A``: B (channels × positions) the mask, A the patches. A basis of its column space is known,
and the binary vectors in it are the columns of B: few enough positions can be enumerated.

Max pooling over windows that do not overlap, flattened into the last layer, leaves other unknowns:
which position of its window each channel took. All positions of a window share one error, so
that its masks, times the errors, are again in a known space; with a 1 in exactly one position
for each active channel they are sparse, and linear programs find them. Pooling further in front
ends the recursion: the pooled features are still determined, the maxima behind them are not.

The input is at last fitted to the shallowest features found, a residual continuous in x: from
grey; or, through pooling, from what a regression on synthetic images reads from the features,
with a preference for smooth images that fades.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.binary_columns import arrange, binary_columns, disjoint_columns
from flwr_leakage.attacks.exact.relu_walk import ReluWalk, Use
from flwr_leakage.attacks.exact.synthetic_start import read_input
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.idlg import SignOfGradient
from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.optimizers.base import Minimum
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.records import Batch, Reconstruction

LAST_GEOMETRY = ((3, 3), (1, 1), (1, 1), (1, 1))
"""Kernel, dilation, padding and stride of the convolution that tells the last mask."""

TRIMS = 3
"""Solutions of one layer's equations; after each, channels that contradict it are left out."""


def solve_features(
    uses: Sequence[Use],
    errors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rank_tolerance: float,
) -> Tensor:
    """The features (1, C, H, W) that several convolutions take in, from their weight gradients.

    Args:
        uses: the convolutions.
        errors: of their outputs.
        gradients: of their weights.
        rank_tolerance: see :class:`FeatureRecursion`.

    Raises:
        ValueError: the equations do not determine them.
    """
    channels, height, width = uses[0].input_shape
    like = errors[0]
    positions = torch.eye(height * width, dtype=like.dtype, device=like.device)
    left, right = [], []
    for use, error, gradient in zip(uses, errors, gradients, strict=True):
        patches = F.unfold(positions.reshape(-1, 1, height, width), *use.geometry)
        rows = torch.einsum(
            "ikp,op->oki",
            patches.reshape(height * width, -1, error[0, 0].numel()),
            error.flatten(2)[0],
        )
        left += list(rows)
        right += list(gradient.flatten(2).mT)
    kept = torch.arange(len(left))
    for _ in range(TRIMS):
        matrix = torch.cat([left[i] for i in kept])
        if len(matrix) < height * width:
            raise ValueError("there are fewer equations than features.")
        gram = torch.linalg.eigvalsh(matrix.T @ matrix)
        if gram[0] < rank_tolerance**2 * gram[-1]:
            raise ValueError("the equations do not determine the features.")
        solution = torch.linalg.lstsq(matrix, torch.cat([right[i] for i in kept])).solution
        # A channel with a wrong entry in its mask contradicts all others.
        residuals = torch.stack(
            [(a @ solution - t).norm() for a, t in zip(left, right, strict=True)]
        )
        kept = (residuals <= 5 * residuals[residuals > 0].median()).nonzero()[:, 0]
    return solution.T.reshape(1, channels, height, width)


@dataclass(frozen=True)
class FeatureRecursion(OneByOne):
    """Reads features from behind as far as they are determined, and fits the input to them.

    For one sample and one plain gradient, ReLU networks whose last layer is linear with a bias,
    on features that were averaged over few positions, or pooled to maxima and flattened;
    BatchNorm by given statistics.

    Attributes:
        rank_tolerance: equations whose singular values fall below this fraction of the largest
            do not determine features.
        zeros: features below this fraction of their layer's largest are zeros. No one value suits
            all networks, so that each is tried, until one reconstruction's gradient is within
            ``solved`` of the observed one; else the one whose gradient is nearest is kept.
        solved: relative squared distance of gradients.
        fitted: how many of the shallowest known layers the input is fitted to, ≥ 1.
        iterations: of the fit.
        initialisation: of the fit, where no pooling is in its way.
        synthetic: images of noise from whose features a start is learned where pooling is; each
            of ``zeros`` draws its own.
        smoothing: weights of the total variation in the successive fits from there to the
            shallowest layer known, before the last one without.
        smoothed_iterations: of each of those.
        rounds: of all those fits, each from where the last ended, until the features' relative
            squared distance is within ``solved``.
        shaking: standard deviation of the noise that a round adds to where the last ended, in
            units of the model's input.
    """

    purpose: ClassVar[str] = "feature recursion"

    rank_tolerance: float = 1e-5
    zeros: Sequence[float] = (1e-6, 1e-5, 1e-4)
    solved: float = 1e-8
    fitted: int = 3
    iterations: int = 300
    initialisation: Initialisation = field(default_factory=Grey)
    synthetic: int = 300
    smoothing: Sequence[float] = (0.3, 0.1, 0.03, 0.01)
    smoothed_iterations: int = 100
    rounds: int = 4
    shaking: float = 0.2

    def __post_init__(self) -> None:
        for name in ("fitted", "iterations", "synthetic", "smoothed_iterations", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.zeros or min(self.zeros) < 0:
            raise ValueError(f"zeros must hold fractions of at least 0, got {self.zeros}.")

    def solve(self, problem: Problem, generator: torch.Generator, restart: int) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: with no threshold could features be read.
        """
        began = time.process_time()
        start = self.initialisation(problem.spec, 1, restart, generator).double()
        best: Reconstruction | None = None
        reason: ValueError | RuntimeError | None = None
        for zero in self.zeros:
            try:
                found, sure = self._attempt(problem, start, zero, generator)
            except (ValueError, RuntimeError) as error:
                reason = reason or error
                continue
            if sure or best is None or not found.objective >= best.objective:
                best = found
            if sure or best.objective <= self.solved:
                break
        if best is None:
            assert reason is not None
            raise reason
        return replace(best, stats={**best.stats, "cpu_seconds": time.process_time() - began})

    def _attempt(
        self, problem: Problem, start: Tensor, zero: float, generator: torch.Generator
    ) -> tuple[Reconstruction, bool]:
        """The input whose features are those recovered with one threshold.

        And whether it is sure: where pooled features outnumber pixels, only the truth has them
        all. Rounding on the client's side may still have chosen other maxima, which the gradient
        shows.
        """
        features, pooled = recover_features(problem, self.rank_tolerance, zero)
        chosen = dict(sorted(features.items())[: self.fitted])
        steps = evaluations = 0
        if min(chosen) in pooled:
            # Far from a solution rounding does not count, and single precision is twice as fast.
            single = problem.to(torch.float32)
            chosen = {min(chosen): chosen[min(chosen)]}
            coarse = {number: values.float() for number, values in chosen.items()}
            start = self._read(single, coarse, pooled, generator)
            start, steps, evaluations = self._search(single, coarse, pooled, start, generator)
        last = LBFGS(self.iterations, relative_tolerance=1e-3, tolerance=1e-16)
        fit = _fit(problem, chosen, pooled, start.double(), 0.0, last)
        steps += int(fit.iterations[0])
        evaluations += int(fit.evaluations[0])
        targets = assume_targets(problem, SignOfGradient(), generator).values
        batch = Batch(fit.points.reshape(start.shape), targets)
        found = Reconstruction(
            answer(batch.inputs, batch.targets),
            gradient_distance(problem, batch),
            {
                "iterations": steps,
                "gradients": evaluations,
                "layers": len(features),
                "zero": zero,
            },
        )
        known = chosen[min(chosen)]
        outnumbered = min(chosen) in pooled and known.numel() > start.numel()
        return found, outnumbered and float(fit.values[0]) <= self.solved

    def _read(
        self,
        problem: Problem,
        chosen: Mapping[int, Tensor],
        pooled: Mapping[int, tuple[int, int]],
        generator: torch.Generator,
    ) -> Tensor:
        """A start read from the shallowest known features."""
        number = min(chosen)

        def features(inputs: Tensor) -> Tensor:
            walk = ReluWalk({}, last=number, pooled=pooled)
            walk.run(problem, inputs)
            return walk.compared(number).clamp_min(0)

        return read_input(features, chosen[number], problem.spec, self.synthetic, generator)

    def _search(
        self,
        problem: Problem,
        chosen: Mapping[int, Tensor],
        pooled: Mapping[int, tuple[int, int]],
        start: Tensor,
        generator: torch.Generator,
    ) -> tuple[Tensor, int, int]:
        """The input after all rounds, and the optimizer's steps and evaluations."""
        optimizer = LBFGS(self.smoothed_iterations, relative_tolerance=1e-4, tolerance=1e-16)
        steps = evaluations = 0
        for index in range(self.rounds):
            if index:
                start = start + self.shaking * torch.randn(start.shape, generator=generator)
            for weight in (*self.smoothing, 0.0):
                found = _fit(problem, chosen, pooled, start, weight, optimizer)
                start = found.points.reshape(start.shape)
                steps += int(found.iterations[0])
                evaluations += int(found.evaluations[0])
            if float(found.values[0]) <= self.solved:
                break
        return start, steps, evaluations


def _fit(
    problem: Problem,
    chosen: Mapping[int, Tensor],
    pooled: Mapping[int, tuple[int, int]],
    start: Tensor,
    weight: float,
    optimizer: LBFGS,
) -> Minimum:
    """The input fitted to features, with a weight of its total variation."""

    def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        inputs = points.reshape(start.shape).detach().requires_grad_()
        walk = ReluWalk({}, last=max(chosen), pooled=pooled)
        walk.run(problem, inputs)
        value = torch.stack(
            [feature_distance(walk.compared(number), known) for number, known in chosen.items()]
        ).sum()
        if weight:
            value = value + weight * smooth_variation(inputs)
        (gradient,) = torch.autograd.grad(value, inputs)
        return value.detach().reshape(1), gradient.reshape(1, -1)

    def project(points: Tensor) -> Tensor:
        return problem.spec.clamp(points.reshape(start.shape)).reshape(1, -1)

    return optimizer(evaluate, start.reshape(1, -1), project)


def feature_distance(preactivations: Tensor, known: Tensor) -> Tensor:
    """Squared distance from known ReLU outputs, as a share of theirs.

    Where the output is positive it tells the preactivation; elsewhere only that this is ≤ 0.
    """
    residual = torch.where(known > 0, preactivations - known, preactivations.clamp_min(0))
    return residual.square().sum() / known.square().sum()


def recover_features(
    problem: Problem, rank_tolerance: float, zero: float
) -> tuple[dict[int, Tensor], dict[int, tuple[int, int]]]:
    """The outputs of ReLUs, by their number in the order of a pass, as far as they are determined.

    Returns:
        The outputs, after pooling where a ReLU's are pooled, and the windows of those that are.

    Raises:
        ValueError: the update is not the plain gradient of one sample, the last layer has no
            bias, or not even the last mask can be found.
    """
    if not problem.is_single_gradient or problem.num_samples != 1 or len(problem.rounds) > 1:
        raise ValueError("features are read from one plain gradient of one sample.")
    layer = find_last_layer(problem)
    if layer.bias is None:
        raise ValueError("the last layer must have a bias.")
    logit_error = problem.gradient[layer.bias]
    inputs = logit_error.new_zeros(1, *problem.spec.shape).requires_grad_()
    names = {id(value): name for name, value in problem.params.items()}

    def walk(masks: dict[int, Tensor]) -> tuple[ReluWalk, list[Tensor]]:
        """A pass with those masks, and the errors of all convolutions' outputs."""
        passed = ReluWalk(names, masks)
        logits = passed.run(problem, inputs)
        assert logits is not None
        outputs = [use.outputs for use in passed.uses]
        return passed, list(torch.autograd.grad((logits * logit_error).sum(), outputs))

    probe = ReluWalk(names)
    probe.run(problem, inputs)
    count, pooled = len(probe.preactivations), probe.windows
    masks = {number: torch.ones_like(z) for number, z in enumerate(probe.preactivations)}
    passed, errors = walk(masks)
    if any(use.source == count - 1 for use in passed.uses):
        raise ValueError("the last ReLU must not feed a convolution.")
    last = [i for i, use in enumerate(passed.uses) if use.geometry == LAST_GEOMETRY]
    if not last:
        raise ValueError("the last convolution must be 3×3 with padding 1 and stride 1.")
    observed = problem.gradient[passed.uses[last[-1]].name]
    if count - 1 in pooled:
        outputs = mean_feature(problem.gradient[layer.weight], logit_error)
        active = outputs > zero * outputs.max()
        masks[count - 1] = maxima_mask(errors[last[-1]], observed, active, pooled[count - 1])
    else:
        masks[count - 1] = averaged_mask(errors[last[-1]], observed)
    features: dict[int, Tensor] = {}
    for number in reversed(range(count - 1)):
        passed, errors = walk(masks)
        own = [i for i, use in enumerate(passed.uses) if use.source == number]
        try:
            values = solve_features(
                [passed.uses[i] for i in own],
                [errors[i] for i in own],
                [problem.gradient[passed.uses[i].name] for i in own],
                rank_tolerance,
            )
        except (ValueError, IndexError):
            break
        features[number] = torch.where(values > zero * values.max(), values, 0.0)
        # What follows from the features found is more exact, near zero, than the equations.
        forward = ReluWalk(names, outputs=features, pooled=pooled)
        forward.run(problem, inputs)
        for later in range(number + 1, count):
            if not forward.preactivations[later].requires_grad:
                masks[later] = forward.mask(later)
                if later in features:
                    features[later] = forward.compared(later).clamp_min(0)
        if number in pooled:
            break
        masks[number] = (features[number] > 0).to(values.dtype)
    if not features:
        raise ValueError("the gradients determine no features.")
    return features, pooled


def averaged_mask(error: Tensor, gradient: Tensor) -> Tensor:
    """The mask (1, N, H, W) of the last ReLU, before global average pooling of a square map.

    Args:
        error: (1, N, H, W) of the last convolution's output, as if every ReLU were active.
        gradient: (N, C, 3, 3) of its weight; its padding and stride are 1.

    Raises:
        ValueError: the errors differ between positions, or the masks are not found.
    """
    shared = error.flatten(2)[0, :, 0]
    if not torch.allclose(error.flatten(2)[0], shared[:, None].expand(-1, error[0, 0].numel())):
        raise ValueError(
            "features must be averaged over positions before the last layer, or be the maxima of "
            "windows that do not overlap."
        )
    product = gradient.flatten(1) / shared[:, None]
    positions = error[0, 0].numel()
    columns = binary_columns(product, positions)
    patches = torch.linalg.lstsq(columns, product).solution
    order = arrange(patches.reshape(positions, *gradient.shape[1:]))
    return columns[:, order].reshape(error.shape)


def maxima_mask(error: Tensor, gradient: Tensor, active: Tensor, window: tuple[int, int]) -> Tensor:
    """The mask (1, N, H, W) of the last ReLU, before max pooling that is flattened.

    Args:
        error: (1, N, H, W) of the last convolution's output, as if every entry were its window's
            maximum.
        gradient: (N, C, 3, 3) of its weight; its padding and stride are 1.
        active: (N · windows,) where the pooled outputs are positive.
        window: height and width; together the windows cover a square.

    Raises:
        ValueError: the errors differ within windows, the pooled outputs are not those that the
            last layer takes in, or the masks are not found.
    """
    channels, height, width = error.shape[1:]
    grid = (height // window[0], width // window[1])
    covered = (grid[0] * window[0], grid[1] * window[1])
    if len(active) != channels * grid[0] * grid[1]:
        raise ValueError("the maxima of the last pooling must be what the last layer takes in.")
    blocks = F.unfold(error[0, :, None, : covered[0], : covered[1]], window, stride=window)
    shared = blocks[:, 0]
    if not torch.allclose(blocks, shared[:, None].expand_as(blocks)):
        raise ValueError("errors must be shared within each window of the last pooling.")
    shared = shared * active.reshape(shared.shape)
    left, singular, _ = torch.linalg.svd(gradient.flatten(1), full_matrices=False)
    count = covered[0] * covered[1]
    if len(singular) < count or singular[count - 1] < 1e-6 * singular[0]:
        raise ValueError(f"the masks must have rank {count}.")
    columns = torch.cat(
        [
            disjoint_columns(left[:, :count], scales, window[0] * window[1]) * scales[:, None]
            for scales in shared.T
        ],
        1,
    )
    patches = torch.linalg.lstsq(columns, gradient.flatten(1)).solution
    order = arrange(patches.reshape(count, *gradient.shape[1:]))
    mask = (columns[:, order] != 0).to(error.dtype).reshape(1, channels, *covered)
    return F.pad(mask, (0, width - covered[1], 0, height - covered[0]))


def smooth_variation(images: Tensor, kink: float = 0.02) -> Tensor:
    """Total variation of images (B, C, H, W), with |d| replaced by √(d² + kink²)."""
    vertical = images[..., 1:, :] - images[..., :-1, :]
    horizontal = images[..., :, 1:] - images[..., :, :-1]
    return sum(
        ((d.square() + kink**2).sqrt().mean() for d in (vertical, horizontal)),
        start=images.new_zeros(()),
    )
