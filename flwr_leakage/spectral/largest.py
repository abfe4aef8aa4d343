"""Estimate the largest eigenvalue of AᵀA for S matrices A at once, by the Lanczos process."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from flwr_leakage.operators import FunctionJacobian
from flwr_leakage.operators.base import LinearOperator
from flwr_leakage.randomness import Draws, normal_rows
from flwr_leakage.spectral.estimate import Estimate, Process, normalize_rows, remaining_growth
from flwr_leakage.spectral.lanczos import EigenPairs, Lanczos


@dataclass(frozen=True)
class TopPairs(EigenPairs):
    """The largest eigenvalue of AᵀA for each of S matrices A, with the Krylov space that gave it.

    Attributes:
        angle: (S,) approximate error of the eigenvector, in radians.
        basis: (S, k, N) orthonormal basis of the Krylov space. For a matrix that took fewer than k
            steps, the last vectors are zero.
        trace: (S,) Σ‖Av‖² over the basis vectors v.
    """

    angle: Float[Tensor, " S"]
    basis: Float[Tensor, "S k N"]
    trace: Float[Tensor, " S"]


class LargestEigenvalue:
    """An estimator of the largest eigenvalue λmax of AᵀA, for each of S matrices A.

    The estimate is a lower bound, from a Lanczos process that continues in later calls. It is taken
    at the first step that passes two tests. Let θ be the largest Ritz value (eigenvalue of AᵀA in
    the Krylov space), r its residual, and gap its distance to the second largest:

    - min(r, r²/gap)/θ ≤ tolerance (Parlett, theorem 11.7.1). This bounds the error of θ as *an*
      eigenvalue, which need not be the largest.
    - θ has not grown by more than the tolerance over the last quarter of the steps (three at
      least). Otherwise a neighbour of λmax could be taken for it, while the start's small component
      along the true eigenvector still grows.

    An estimate depends only on the matrix, the start, the tolerance and the limit of steps, not on
    earlier calls or other matrices. A matrix that has its estimate takes no part in further steps.

    Args:
        operator: the S matrices A (P, N).
        start: (S, N) vectors that are not orthogonal to the eigenvector; ``random_start`` gives
            such vectors.
        image: (S, P) A·start if it is known, which saves half of the first product.
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
        """Return the largest eigenvalue of AᵀA to a relative tolerance, its eigenvector and its
        Krylov space, after at most ``max_steps`` ≥ 1 steps, of one product with AᵀA each; those of
        earlier calls count.

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
        """Take steps until the largest eigenvalue λmax of AᵀA is known to the relative tolerance
        for each matrix A of a group, or ``max_steps`` are used up. Matrices whose λmax is known
        leave the group.
        """
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


class _Group(Process):
    """The G of S matrices A that have taken the same number of Lanczos steps, and their estimates.

    The estimates are of the largest eigenvalue λmax of each AᵀA after each step.

    Args:
        blocks: (G,) indices of these matrices among the S.
        process: the Lanczos process of these matrices.
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

    def first_within(self, tolerance: float, num_steps: int) -> Int[Tensor, " G"]:
        """Return the index (G,) of the first step after which λmax is known to the tolerance.

        λmax is the largest eigenvalue of AᵀA for each of G matrices A, which the Lanczos process
        estimates. It is known if two numbers are within the tolerance, both relative to its
        estimate: the error that the residual allows, and the growth that is still expected. The
        index is −1 if λmax is known after none of the first ``num_steps`` steps.
        """
        first = torch.full_like(self.blocks, -1)
        for step in reversed(range(num_steps)):
            within = (self._residuals[step] <= tolerance) & (self._growths[step] <= tolerance)
            first = torch.where(within, step, first)
        return first

    def answer(self, tolerance: float, max_steps: int) -> tuple[Tensor, ...]:
        """Return the estimates for the group's G matrices A after at most ``max_steps`` steps, as
        seven tensors: the largest eigenvalue λmax of AᵀA (G,); whether it is within the relative
        tolerance (G,); its relative error (G,); the eigenvectors (G, N); their angles of error
        (G,); the traces Σ‖Av‖² over the basis (G,); and the basis (G, k, N) of the Krylov space.
        """
        taken = min(max_steps, self.num_steps)
        first = self.first_within(tolerance, taken)
        last = torch.where(first >= 0, first, taken - 1)
        rows = torch.arange(len(last), device=last.device)
        histories = (self._tops, self._residuals, self._growths, self._angles)
        top, residual, growth, angle = (torch.stack(each)[last, rows] for each in histories)
        # After three steps or fewer the growth is unknown, and the residual alone gives the error.
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
        """Take one more Lanczos step for the matrices A of the group, and record the estimates of
        the largest eigenvalue λmax of AᵀA after it. If the operator's budget does not allow the
        step, ``BudgetExhausted`` is raised, and nothing changes.
        """
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
    """Return the largest eigenvalue λmax of AᵀA, as a lower bound, and its eigenvector; see
    :class:`LargestEigenvalue`.

    Args:
        operator: S matrices A.
        start: (S, N) vectors that are not orthogonal to the eigenvector, as by ``random_start``.
        tolerance: relative error of λmax.
        max_steps: largest number of steps, of one product with AᵀA each.
    """
    return LargestEigenvalue(operator, start)(tolerance, max_steps)


def gradient_start(operator: FunctionJacobian, generator: Draws) -> Float[Tensor, "S N"]:
    """Return start vectors (S, N) for the largest eigenvalue of JJᵀ: J g / ‖J g‖, which has a large
    component along the top eigenvectors, plus 0.1 times random noise of length 1. If J g is zero, a
    start is the noise alone.

    Args:
        operator: S matrices Jᵀ (P, N), each the Jacobian of a function at a point where the
            function has the value g (P,).
        generator: the generator of the noise, without which a start could miss an eigenvector.
    """
    return _with_noise(operator.value_product, generator)


def last_layer_start(
    operator: FunctionJacobian, last_layer: FunctionJacobian, generator: Draws
) -> Float[Tensor, "S N"]:
    """Return start vectors (S, N) for the largest eigenvalue of JJᵀ, from the last layer alone.

    Jᵀ is the Jacobian of a gradient ∇_θ L by the N inputs, so that JJᵀ is a sum over the layers'
    parameters. A start is the top eigenvector of the last layer's term, plus a tenth of noise. A
    product with this term costs a third (LeNet) to a tenth (ResNet-18) of a whole one. If the
    largest eigenvalues lie close together, as on untrained ReLU networks, most steps then use this
    cheap product.

    Args:
        operator: S matrices Jᵀ for the whole gradient.
        last_layer: S matrices Jᵀ for the last layer's gradient.
        generator: the generator of the noise.
    """
    start = gradient_start(operator, generator)
    # The eigenvector is computed roughly, to 1e-3 in at most 20 steps: a tenth of noise is added to
    # it.
    found = largest_eigenvalue(last_layer, start, 1e-3, 20)
    return _with_noise(found.vectors, generator)


def _with_noise(vectors: Tensor, generator: Draws) -> Tensor:
    unit, length = normalize_rows(vectors)
    noise, _ = normalize_rows(normal_rows(unit.shape, generator).to(unit))
    return torch.where(length[:, None] > 0, unit + 0.1 * noise, noise)
