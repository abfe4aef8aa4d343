"""Compute the inversion influence (I²F) of a whole update, with all its samples unknown at once."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators import UpdateJacobian
from flwr_leakage.per_sample import ClientSamples, Point, update_perturbation
from flwr_leakage.per_sample.client import DEFAULT_MEMORY_BYTES, NOT_USED
from flwr_leakage.per_sample.samples import converted
from flwr_leakage.records import Measurement, State
from flwr_leakage.scores.base import UNDEFENDED, Column, measured, notes_where
from flwr_leakage.scores.eigenvalue_mean import fits
from flwr_leakage.spectral import solve_damped
from flwr_leakage.spectral.least_squares import solve_dense


@dataclass(frozen=True)
class JointInfluence:
    """A score: each sample's part of A⁺δ, with A the Jacobian of the whole update, as an RMSE.

    A maps a change of the inputs of all samples to the change of the pseudo-gradient, A⁺ is its
    pseudoinverse, and δ is the defense's perturbation of the pseudo-gradient.

    This is the I²F of Zhang et al. (2023, equation 4) for an attacker who knows none of the
    samples. A is the exact derivative through all local steps and batch statistics
    (``UpdateJacobian``), so that no weights of samples are needed. It is computed in float64. The
    quantities are:

    - ``joint_influence_rmse``: the norm of the sample's part of A⁺δ, divided by √N for N inputs;
    - ``joint_unit_noise_rmse``: √(sum of the diagonal of (AᵀA)⁻¹ over the sample's inputs / N), if
      A is formed and has full rank. It is the Cramér–Rao bound for noise of standard deviation 1 on
      the pseudo-gradient, and never below the bound for an attacker who knows the other samples.

    A lacks rank if the inputs of all samples outnumber the parameters, or if units are inactive.
    Then the update does not reveal some directions at all, and ``joint_influence_rmse`` is a lower
    bound.

    Attributes:
        point: ``defended`` to score the samples as they entered training; ``private`` to score them
            as they were before the defense encoded them.
        max_dense_inputs: the largest number of inputs of all samples together for which A is
            formed; beyond, LSQR is used.
        rank_cutoff: singular values below this share of the largest count as zero.
        relative_damping: the damping of LSQR, relative to the largest eigenvalue of AᵀA, > 0.
        tolerance: the relative error of LSQR's result.
        max_steps: the largest number of LSQR steps, of two products with A each.
        memory_bytes: the most bytes that A may take.
    """

    point: Point = "defended"
    max_dense_inputs: int = 2048
    rank_cutoff: float = 1e-12
    relative_damping: float = 1e-10
    tolerance: float = 1e-2
    max_steps: int = 500
    memory_bytes: int = field(default=DEFAULT_MEMORY_BYTES, kw_only=True)

    def __post_init__(self) -> None:
        if not self.relative_damping > 0:
            raise ValueError(f"relative_damping must be positive, got {self.relative_damping}.")

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return the measurement ``joint_influence_rmse``; and ``joint_unit_noise_rmse`` if the
        Jacobian A of the whole update is formed and has full rank.
        """
        before = client.meter.products
        delta = update_perturbation(client.gradient_map, client.exposure.whole, self.point)
        joint = self._solve(_operator(client, self.point), delta[None])
        note = joint.note if bool(delta.any()) else UNDEFENDED
        state: State = joint.state if bool(delta.any()) else "exact"
        squares = joint.solution.square()
        name, unit = "joint_influence_rmse", "model input"
        found = [_measurement(name, unit, squares, client, joint, state, note)]
        if joint.variances is not None:
            name, unit = "joint_unit_noise_rmse", "model input per unit of noise"
            squares = joint.variances
            found.append(_measurement(name, unit, squares, client, joint, "lower bound", ""))
        return [replace(found[0], products=client.meter.products - before), *found[1:]]

    def _solve(self, operator: UpdateJacobian, delta: Float[Tensor, "1 P"]) -> "_Joint":
        size = (operator.num_inputs, operator.num_outputs)
        if fits(*size, self.max_dense_inputs, self.memory_bytes):
            dense = solve_dense(operator, delta, self.rank_cutoff)
            rank, solution = int(dense.rank), dense.solutions[0]
            error = float(dense.errors) / max(float(solution.norm()), 1e-300)
            if rank == operator.num_inputs:
                return _Joint(solution, dense.inverse_diagonal[0], "exact", error, "")
            note = f"at least this: the update's Jacobian has rank {rank} of {size[0]}"
            return _Joint(solution, None, "lower bound", error, note)
        dampings = (self.relative_damping,)
        solved = solve_damped(operator, delta, dampings, self.tolerance, self.max_steps)
        # The norm of a damped solution is below that of the undamped solution, and the norm of an
        # early iterate is below both. So the norm found is a lower bound.
        note = f"about this or more: damped by {self.relative_damping:g} λmax"
        if not bool(solved.converged[0, 0]):
            note += f", and stopped after {self.max_steps} steps"
        return _Joint(solved.solutions[0, 0].double(), None, "lower bound", self.tolerance, note)


@dataclass(frozen=True)
class _Joint:
    """The influence of a perturbation on all inputs of a round: the least-squares solution A⁺δ.

    Attributes:
        solution: (n,) A⁺δ, with the Jacobian A of the update by all n input values, and the
            update's perturbation δ; it is damped if A is too large for a dense solution.
        variances: (n,) diagonal of (AᵀA)⁻¹; ``None`` if A is too large, or has a rank below n.
        state: ``exact`` for a dense solution with A of rank n; else ``lower bound``.
        error: the relative error of ‖solution‖: the rounding error or, if the solution is damped,
            the solver's tolerance.
        note: why the solution is a lower bound; empty if it is exact.
    """

    solution: Float[Tensor, " n"]
    variances: Float[Tensor, " n"] | None
    state: State
    error: float
    note: str


def _operator(client: ClientSamples, point: Point) -> UpdateJacobian:
    exposure = client.exposure.whole
    shown = exposure.defended if point == "defended" else exposure.private
    params, batch = converted(exposure.params, shown, torch.float64)
    schedule = exposure.raw.schedule
    used = schedule.num_samples_used(exposure.raw.num_examples)
    if len(batch) < used:
        raise ValueError(
            f"the joint influence needs all {used} samples of the round, but only the first "
            f"{len(batch)} were kept: raise max_samples."
        )
    reason, gradient_map = client.derivable(), client.gradient_map
    if reason and not gradient_map.one_by_one:
        gradient_map = gradient_map.differentiated_by_autograd(reason)
    return UpdateJacobian(gradient_map, params, batch, schedule, exposure.buffers, client.meter)


def _measurement(
    name: str,
    unit: str,
    squares: Float[Tensor, " n"],
    client: ClientSamples,
    joint: _Joint,
    state: State,
    note: str,
) -> Measurement:
    """Return the measurement ``name``: for each scored sample, the square root of the mean of
    ``squares`` over its inputs, with the relative error of ``joint``. ``squares`` has an entry for
    each of the n inputs of all samples. A sample that no training step uses gets no number.
    """
    exposure = client.exposure
    count = len(exposure.whole.private)
    own = squares.reshape(count, -1).mean(1).sqrt()[list(exposure.indices)]
    notes = [note if known else "no number: the solution is not finite" for known in own.isfinite()]
    column = Column(name, own, unit, "larger is safer", notes, own * joint.error, state)
    return measured(column, notes_where(exposure.sample_weights() <= 0, NOT_USED))
