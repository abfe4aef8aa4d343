"""The largest eigenvalue of AᵀA of each of S operators, by one Lanczos process.

The methods start from :func:`gradient_start` or :func:`last_layer_start`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from flwr_leakage.operators import FunctionJacobian
from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.spectral.estimate import Estimate, normalize_rows, remaining_growth
from flwr_leakage.spectral.lanczos import EigenPairs, Lanczos


@dataclass(frozen=True)
class TopPairs(EigenPairs):
    """The largest eigenvalue of each block, with the Krylov space of its estimate.

    Attributes:
        angle: (S,) approximate error of the eigenvector, in radians.
        basis: (S, k, N) orthonormal vectors of the block's own steps, padded with zeros.
        trace: (S,) Σ‖Av‖² over these vectors.
    """

    angle: Float[Tensor, " S"]
    basis: Float[Tensor, "S k N"]
    trace: Float[Tensor, " S"]


class LargestEigenvalue:
    """Estimates λmax of AᵀA from below, by a Lanczos process that continues in later calls.

    A block's answer is read at the first step that passes two tests. With θ the largest Ritz value,
    r its residual and gap its distance to the second one:

    - min(r, r²/gap)/θ ≤ tolerance (Parlett, theorem 11.7.1). This bounds the error of θ as *an*
      eigenvalue, which need not be the largest.
    - θ has not grown by more than the tolerance over the last quarter of the steps (three at
      least). Otherwise a neighbour of λmax could be taken for it, while the start's small component
      along the true eigenvector still grows.

    An answer depends only on the operator, the start, the tolerance and the limit of steps, not on
    earlier calls, nor on the other blocks. So one process serves several callers. A block that has
    its answer takes no part in the steps of the others, so that a batch takes as many products as
    its blocks alone.

    Args:
        operator: the operators A, of S blocks.
        start: (S, N) vectors that are not orthogonal to the eigenvector; ``random_start`` gives
            such vectors.
        image: (S, P) A·start if it is known.
    """

    def __init__(
        self,
        operator: LinearOperator,
        start: Float[Tensor, "S N"],
        image: Float[Tensor, "S P"] | None = None,
    ) -> None:
        self.operator = operator
        blocks = torch.arange(operator.num_blocks, device=operator.device)
        self._groups = [_Group(blocks, Lanczos(operator, start, image))]

    def __call__(self, tolerance: float, max_steps: int) -> TopPairs:
        """Return λmax and its eigenvector to a relative tolerance.

        Args:
            tolerance: relative error of λmax.
            max_steps: largest number of Gram products, ≥ 1.

        Raises:
            ValueError: ``max_steps`` is below 1.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {max_steps}.")
        first = self.operator.products
        for group in list(self._groups):
            self._settle(group, tolerance, max_steps)
        joined = torch.cat([group.blocks for group in self._groups]).argsort()
        found = [group.answer(tolerance, max_steps) for group in self._groups]
        widest = max(basis.shape[1] for *_, basis in found)
        wide = [(*rest, pad(basis, (0, 0, 0, widest - basis.shape[1]))) for *rest, basis in found]
        top, done, error, vectors, angle, trace, basis = (
            torch.cat(parts)[joined] for parts in zip(*wide, strict=True)
        )
        spent = self.operator.products - first
        estimate = Estimate(top, done, error, spent, "Lanczos")
        return TopPairs(estimate, vectors, angle, basis, trace)

    def _settle(self, group: "_Group", tolerance: float, max_steps: int) -> None:
        """Take steps until each block of a group has its answer; blocks leave once they do."""
        limit = min(max_steps, self.operator.num_inputs)
        while group.num_steps < limit:
            done = group.first_within(tolerance, group.num_steps) >= 0
            if bool(done.all()):
                return
            if bool(done.any()):
                place = self._groups.index(group)
                parts = [group.narrow(rows.nonzero()[:, 0]) for rows in (done, ~done)]
                self._groups[place : place + 1] = parts
                group = parts[1]
            group.extend()


class _Group:
    """Blocks that have taken the same steps, with the largest Ritz value at each of them.

    Args:
        blocks: (G,) indices of the blocks.
        process: the Lanczos process of these blocks.
    """

    def __init__(self, blocks: Int[Tensor, " G"], process: Lanczos) -> None:
        self.blocks = blocks
        self.process = process
        self._tops: list[Tensor] = []
        self._residuals: list[Tensor] = []
        self._growths: list[Tensor] = []
        self._angles: list[Tensor] = []
        self._coefficients: list[Tensor] = []

    @property
    def num_steps(self) -> int:
        return len(self._tops)

    def narrow(self, rows: Int[Tensor, " R"]) -> "_Group":
        """Return some of the blocks, with their state."""
        other = _Group(self.blocks[rows], self.process.narrow(rows))
        for name in ("_tops", "_residuals", "_growths", "_angles", "_coefficients"):
            setattr(other, name, [entry[rows] for entry in getattr(self, name)])
        return other

    def first_within(self, tolerance: float, num_steps: int) -> Int[Tensor, " G"]:
        """Return the first of ``num_steps`` steps at which a block passes both tests, or −1."""
        first = torch.full_like(self.blocks, -1)
        for step in reversed(range(num_steps)):
            within = (self._residuals[step] <= tolerance) & (self._growths[step] <= tolerance)
            first = torch.where(within, step, first)
        return first

    def answer(self, tolerance: float, max_steps: int) -> tuple[Tensor, ...]:
        """Return λmax, whether it is within the tolerance, its error, and the rest of a result."""
        taken = min(max_steps, self.num_steps)
        first = self.first_within(tolerance, taken)
        last = torch.where(first >= 0, first, taken - 1)
        rows = torch.arange(len(last), device=last.device)
        histories = (self._tops, self._residuals, self._growths, self._angles)
        top, residual, growth, angle = (torch.stack(each)[last, rows] for each in histories)
        # After a few steps the growth is unknown, and only the residual bounds the error.
        error = torch.maximum(residual, torch.where(growth.isfinite(), growth, 0.0))
        error = error + 2 * self.process.operator.rounding.to(error)
        widest = int(last.max()) + 1
        coefficients = top.new_zeros(len(last), widest)
        for row, step in enumerate(last.tolist()):
            coefficients[row, : step + 1] = self._coefficients[step][row]
        own = torch.arange(widest, device=last.device) <= last[:, None]
        basis = torch.where(own[:, :, None], self.process.basis[:, :widest], 0.0)
        vectors = torch.einsum("sk,skn->sn", coefficients.to(basis.dtype), basis)
        quotients = self.process.rayleigh_quotients[:, :widest].double()
        trace = torch.where(own, quotients, 0.0).sum(1)
        return top, first >= 0, error, vectors, angle, trace, basis

    def extend(self) -> None:
        """Take one more step; a product that exceeds a budget raises and changes nothing."""
        process = self.process
        process.step()
        theta, vectors = process.ritz()
        top = theta[:, -1].clamp_min(0)
        residual = process.last_beta * vectors[:, -1, -1].abs()
        error, angle = residual, torch.ones_like(residual)
        if process.num_steps > 1:
            gap = (top - theta[:, -2]).clamp_min(torch.finfo(top.dtype).tiny)
            error = torch.minimum(residual, residual**2 / gap)
            angle = (residual / gap).clamp_max(1.0)
        self._angles.append(torch.where(process.last_beta == 0, 0.0, angle))
        self._tops.append(top)
        self._residuals.append(error / top.clamp_min(torch.finfo(top.dtype).tiny))
        growth = remaining_growth(self._tops)
        self._growths.append(torch.where(process.last_beta == 0, 0.0, growth))
        self._coefficients.append(vectors[:, :, -1])


def largest_eigenvalue(
    operator: LinearOperator,
    start: Float[Tensor, "S N"],
    tolerance: float = 1e-3,
    max_steps: int = 100,
) -> TopPairs:
    """Return λmax of AᵀA, from below, and its eigenvector; see ``LargestEigenvalue``.

    Args:
        operator: the operators A, of S blocks.
        start: (S, N) vectors that are not orthogonal to the eigenvector; ``random_start`` gives
            such vectors.
        tolerance: relative error of λmax.
        max_steps: largest number of Gram products.
    """
    return LargestEigenvalue(operator, start)(tolerance, max_steps)


def gradient_start(operator: FunctionJacobian, generator: Draws) -> Float[Tensor, "S N"]:
    """Return Jg plus a tenth of noise; Jg has a large component along JJᵀ's top eigenvectors.

    Args:
        operator: the operator Jᵀ, whose value is g.
        generator: draws the noise, without which a start could miss an eigenvector completely.
    """
    return _with_noise(operator.value_product, generator)


def last_layer_start(
    operator: FunctionJacobian, last_layer: FunctionJacobian, generator: Draws
) -> Float[Tensor, "S N"]:
    """Return the top eigenvector of the last layer's share of JJᵀ, plus a tenth of noise.

    JJᵀ is a sum over the layers' parameters. The last layer's term needs no other layer's weight
    gradient, and a product with it costs a third (LeNet) to a tenth (ResNet-18) of a whole one.
    If the largest eigenvalues lie close together, as on untrained ReLU networks, most steps then
    use the cheap product. If few steps are enough anyway, this start saves none.

    Args:
        operator: the operator Jᵀ of the whole gradient.
        last_layer: the operator Jᵀ of the last layer's gradient.
        generator: draws the noise.
    """
    start = gradient_start(operator, generator)
    # A start need not be exact, as a tenth of noise is added to it.
    found = largest_eigenvalue(last_layer, start, 1e-3, 20)
    return _with_noise(found.vectors, generator)


def _with_noise(vectors: Tensor, generator: Draws) -> Tensor:
    unit, length = normalize_rows(vectors)
    noise, _ = normalize_rows(normal_rows(unit.shape, generator).to(unit))
    return torch.where(length[:, None] > 0, unit + 0.1 * noise, noise)
