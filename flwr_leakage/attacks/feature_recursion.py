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

The input is at last fitted to the shallowest features found, a residual continuous in x.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flwr_leakage.attacks.initialisation import Grey, Initialisation
from flwr_leakage.attacks.labels.idlg import idlg_label
from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.objectives.euclidean import Euclidean
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.records import Batch, Reconstruction

_RELU = (F.relu, torch.relu, Tensor.relu)

LAST_GEOMETRY = ((3, 3), (1, 1), (1, 1), (1, 1))
"""Kernel, dilation, padding and stride of the convolution that tells the last mask."""

TRIMS = 3
"""Solutions of one layer's equations; after each, channels that contradict it are left out."""


@dataclass(frozen=True)
class Use:
    """One convolution as a pass met it.

    Attributes:
        name: of its weight.
        source: number of the ReLU whose output it takes in, or −1.
        input_shape: (C, H, W).
        outputs: (1, N, H', W').
        geometry: kernel size, dilation, padding, stride.
    """

    name: str
    source: int
    input_shape: torch.Size
    outputs: Tensor
    geometry: tuple[Any, ...]


class _ReachedError(Exception):
    """The last ReLU that is asked for has been passed."""


class _Walk(TorchFunctionMode):
    """Number the ReLUs, put what is known in their place, note who takes in whose output.

    Args:
        names: of parameters, by identity.
        masks: of ReLUs, by number: these become products with the mask.
        outputs: of ReLUs, by number: these become constants.
        last: the number of the ReLU at which to stop.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        masks: Mapping[int, Tensor] | None = None,
        outputs: Mapping[int, Tensor] | None = None,
        last: int | None = None,
    ) -> None:
        super().__init__()
        self.names = names
        self.masks = masks or {}
        self.outputs = outputs or {}
        self.last = last
        self.preactivations: list[Tensor] = []
        self.sources: dict[int, int] = {}
        self.kept: list[Tensor] = []  # keeps ids from being used again
        self.uses: list[Use] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function in _RELU:
            inputs = args[0] if args else kwargs["input"]
            number = len(self.preactivations)
            self.preactivations.append(inputs)
            if number == self.last:
                raise _ReachedError
            if number in self.outputs:
                outputs = self.outputs[number].clone()
            elif number in self.masks:
                outputs = inputs * self.masks[number]
            else:
                outputs = inputs.clamp_min(0)
            self.sources[id(outputs)] = number
            self.kept.append(outputs)
            return outputs
        outputs = function(*args, **kwargs)
        if function is F.conv2d:
            self._note(outputs, *args, **kwargs)
        return outputs

    def _note(
        self,
        outputs: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        if groups != 1 or isinstance(padding, str):
            raise ValueError("convolutions must have one group and padding given in numbers.")
        geometry = (tuple(weight.shape[2:]), dilation, padding, stride)
        source = self.sources.get(id(input), -1)
        name = self.names.get(id(weight), "")
        self.uses.append(Use(name, source, input.shape[1:], outputs, geometry))


def binary_columns(product: Tensor, count: int, tolerance: float = 0.05) -> Tensor:
    """The columns of a binary B (N, P) from ``B A`` (N, Q), in any order.

    The column space is that of the P leading left singular vectors. A binary vector in it is told
    by P of its entries; all 2^P choices of those are tried.

    Args:
        product: ``B A``.
        count: P ≤ 20.
        tolerance: how far entries may be from 0 or 1.

    Raises:
        ValueError: the rank is not P, or there are not P such vectors.

    Example:
        >>> masks = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]).double()
        >>> binary_columns(masks @ torch.tensor([[1.0, 2.0], [3.0, -1.0]]).double(), 2).sum(0)
        tensor([2., 2.], dtype=torch.float64)
    """
    if count > 20:
        raise ValueError(f"at most 20 columns can be enumerated, got {count}.")
    left, singular, _ = torch.linalg.svd(product, full_matrices=False)
    if len(singular) < count or singular[count - 1] < 1e-6 * singular[0]:
        raise ValueError(f"the masks must have rank {count}.")
    basis = left[:, :count]
    remaining, pivots = basis.clone(), []
    for _ in range(count):
        pivots.append(int(remaining.square().sum(1).argmax()))
        direction = remaining[pivots[-1]] / remaining[pivots[-1]].norm()
        remaining = remaining - (remaining @ direction)[:, None] * direction
    to_all = basis @ torch.linalg.inv(basis[pivots])
    # Most choices fail at the first few entries already: test a growing number of them.
    bits = torch.arange(1, 2**count)
    for rows in (to_all[: 4 * count], to_all):
        patterns = (bits[:, None] >> torch.arange(count)) & 1
        entries = patterns.to(product.dtype) @ rows.T
        bits = bits[((entries - entries.round().clamp(0, 1)).abs() <= tolerance).all(1)]
    if len(bits) != count:
        raise ValueError(f"{count} masks were sought, {len(bits)} fit.")
    patterns = (bits[:, None] >> torch.arange(count)) & 1
    return (patterns.to(product.dtype) @ to_all.T).round().T


def arrange(patches: Tensor) -> Tensor:
    """Put unordered 3×3 patches of one map in their places.

    The right neighbour of a position is the one whose centre equals the patch's right entry,
    and likewise below; the first has zeros above and on the left, from the padding.

    Args:
        patches: (P, C, 3, 3) with padding 1 and stride 1, of a square map.

    Returns:
        (P,) the patches' numbers, row by row.

    Raises:
        ValueError: P is no square number, or the neighbours contradict each other.
    """
    side = math.isqrt(len(patches))
    centres = patches[:, :, 1, 1]
    right, below = (
        torch.cdist(entry, centres).argmin(1).tolist()
        for entry in (patches[:, :, 1, 2], patches[:, :, 2, 1])
    )
    corner = patches[:, :, 0, :].square().sum((1, 2)) + patches[:, :, :, 0].square().sum((1, 2))
    order: list[int] = []
    first = int(corner.argmin())
    for _ in range(side):
        row = first
        for _ in range(side):
            order.append(row)
            row = right[row]
        first = below[first]
    if side * side != len(patches) or sorted(order) != list(range(len(patches))):
        raise ValueError("the patches do not fit together to a square map.")
    return torch.tensor(order)


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
    on features that were averaged over few positions; BatchNorm by given statistics.

    Attributes:
        rank_tolerance: equations whose singular values fall below this fraction of the largest
            do not determine features.
        zeros: features below this fraction of their layer's largest are zeros. No one value suits
            all networks, so that each is tried, until one reconstruction's gradient is within
            ``solved`` of the observed one; else the one whose gradient is nearest is kept.
        solved: relative squared distance of gradients.
        fitted: how many of the shallowest known layers the input is fitted to, ≥ 1.
        iterations: of the fit.
        initialisation: of the fit.
    """

    purpose: ClassVar[str] = "feature recursion"

    rank_tolerance: float = 1e-5
    zeros: Sequence[float] = (1e-6, 1e-5, 1e-4)
    solved: float = 1e-8
    fitted: int = 3
    iterations: int = 300
    initialisation: Initialisation = field(default_factory=Grey)

    def __post_init__(self) -> None:
        for name in ("fitted", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not self.zeros or min(self.zeros) < 0:
            raise ValueError(f"zeros must hold fractions of at least 0, got {self.zeros}.")

    def solve(self, problem: Problem, generator: torch.Generator) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: with no threshold could features be read.
        """
        began = time.process_time()
        start = self.initialisation(problem.spec, 1, 0, generator).double()
        best: Reconstruction | None = None
        reason: ValueError | RuntimeError | None = None
        for zero in self.zeros:
            try:
                found = self._fit(problem, start, zero)
            except (ValueError, RuntimeError) as error:
                reason = reason or error
                continue
            if best is None or not found.objective >= best.objective:
                best = found
            if best.objective <= self.solved:
                break
        if best is None:
            assert reason is not None
            raise reason
        return replace(best, stats={**best.stats, "cpu_seconds": time.process_time() - began})

    def _fit(self, problem: Problem, start: Tensor, zero: float) -> Reconstruction:
        """The input whose features are those recovered with one threshold."""
        features = recover_features(problem, self.rank_tolerance, zero)
        chosen = dict(sorted(features.items())[: self.fitted])
        names = {id(value): name for name, value in problem.params.items()}

        def evaluate(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
            inputs = points.reshape(1, *problem.spec.shape).detach().requires_grad_()
            walk = _Walk(names, last=max(chosen))
            _run(problem, inputs, walk)
            value = torch.stack(
                [
                    feature_distance(walk.preactivations[number], known)
                    for number, known in chosen.items()
                ]
            ).sum()
            (gradient,) = torch.autograd.grad(value, inputs)
            return value.detach().reshape(1), gradient.reshape(1, -1)

        def project(points: Tensor) -> Tensor:
            return problem.spec.clamp(points.reshape(start.shape)).reshape(1, -1)

        optimizer = LBFGS(self.iterations, relative_tolerance=1e-3, tolerance=1e-16)
        found = optimizer(evaluate, start.reshape(1, -1), project)
        bias = find_last_layer(problem).bias
        assert bias is not None
        batch = Batch(found.points.reshape(start.shape), idlg_label(problem.gradient[bias]))
        gradient = simulate_gradient(
            problem.gradient_map, problem.params, problem.buffers, problem.schedule, batch
        )
        return Reconstruction(
            Batch(batch.inputs.float(), batch.targets),
            float(Euclidean()(gradient, problem.gradient).detach()),
            {
                "iterations": int(found.iterations[0]),
                "gradients": int(found.evaluations[0]),
                "layers": len(features),
                "zero": zero,
            },
        )


def feature_distance(preactivations: Tensor, known: Tensor) -> Tensor:
    """Squared distance from known ReLU outputs, as a share of theirs.

    Where the output is positive it tells the preactivation; elsewhere only that this is ≤ 0.
    """
    residual = torch.where(known > 0, preactivations - known, preactivations.clamp_min(0))
    return residual.square().sum() / known.square().sum()


def _run(problem: Problem, inputs: Tensor, walk: _Walk) -> Tensor | None:
    try:
        with walk:
            return problem.gradient_map.logits(problem.params, inputs, problem.buffers)
    except _ReachedError:
        return None


def recover_features(problem: Problem, rank_tolerance: float, zero: float) -> dict[int, Tensor]:
    """The outputs of ReLUs, by their number in the order of a pass, as far as they are determined.

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

    def walk(masks: dict[int, Tensor]) -> tuple[_Walk, list[Tensor]]:
        """A pass with those masks, and the errors of all convolutions' outputs."""
        passed = _Walk(names, masks)
        logits = _run(problem, inputs, passed)
        assert logits is not None
        outputs = [use.outputs for use in passed.uses]
        return passed, list(torch.autograd.grad((logits * logit_error).sum(), outputs))

    probe = _Walk(names)
    _run(problem, inputs, probe)
    count = len(probe.preactivations)
    masks = {number: torch.ones_like(z) for number, z in enumerate(probe.preactivations)}
    passed, errors = walk(masks)
    if any(use.source == count - 1 for use in passed.uses):
        raise ValueError("the last ReLU must not feed a convolution.")
    last = [i for i, use in enumerate(passed.uses) if use.geometry == LAST_GEOMETRY]
    if not last:
        raise ValueError("the last convolution must be 3×3 with padding 1 and stride 1.")
    masks[count - 1] = last_mask(passed.uses[last[-1]], errors[last[-1]], problem.gradient)
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
        masks[number] = (features[number] > 0).to(values.dtype)
        # What follows from the features found is more exact, near zero, than the equations.
        forward = _Walk(names, outputs=features)
        _run(problem, inputs, forward)
        for later in range(number + 1, count):
            if not forward.preactivations[later].requires_grad:
                z = forward.preactivations[later]
                masks[later] = (z > 0).to(z.dtype)
                if later in features:
                    features[later] = z.clamp_min(0)
    if not features:
        raise ValueError("the gradients determine no features.")
    return features


def last_mask(use: Use, error: Tensor, gradient: Mapping[str, Tensor]) -> Tensor:
    """The mask (1, N, H, W) of the last ReLU, before global average pooling.

    Args:
        use: the last convolution: 3×3, padding 1, stride 1, on a square map.
        error: of its output, as if every ReLU were active.
        gradient: the observed one.

    Raises:
        ValueError: the errors differ between positions, or the masks are not found.
    """
    shared = error.flatten(2)[0, :, 0]
    if not torch.allclose(error.flatten(2)[0], shared[:, None].expand(-1, error[0, 0].numel())):
        raise ValueError("features must be averaged over positions before the last layer.")
    observed = gradient[use.name]
    product = observed.flatten(1) / shared[:, None]
    positions = error[0, 0].numel()
    columns = binary_columns(product, positions)
    patches = torch.linalg.lstsq(columns, product).solution
    order = arrange(patches.reshape(positions, *observed.shape[1:]))
    return columns[:, order].reshape(error.shape)
