"""Compute the I²F of a whole update, where all samples of the round are unknown at once."""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.operators import UpdateJacobian
from flwr_leakage.per_sample import ClientSamples, Point, update_perturbation
from flwr_leakage.per_sample.client import DEFAULT_MEMORY_BYTES, NOT_USED
from flwr_leakage.records import Batch, Measurement, State
from flwr_leakage.scores.base import UNDEFENDED
from flwr_leakage.scores.eigenvalue_mean import fits
from flwr_leakage.spectral import solve_damped
from flwr_leakage.spectral.least_squares import solve_dense


@dataclass(frozen=True)
class JointInfluence:
    """Each sample's share of ‖A⁺δ‖/√N, with A the Jacobian of the whole update and δ all of it.

    This is the I²F of Zhang et al. (2023, equation 4) for an attacker who knows none of the
    samples. A is exact over several local steps, batches and batch statistics (``UpdateJacobian``),
    so that no weight wᵢ enters. It is computed in float64.

    - ``joint_influence_rmse``: of this δ;
    - ``joint_unit_noise_rmse``: √(sum of the diagonal of (AᵀA)⁻¹ over the sample's inputs / N): the
      Cramér–Rao bound for noise of standard deviation 1 on the pseudo-gradient, where A is dense
      and of full rank. It is never below that of an attacker who knows the other samples.

    A lacks rank where the inputs of all samples outnumber the parameters, or units are off. Then
    some directions are not told at all, and the first value is a lower bound.

    Attributes:
        point: ``defended`` or ``private``, see ``ClientSamples.problems``.
        max_dense_inputs: inputs of all samples together up to which A is formed; beyond, LSQR.
        rank_cutoff: relative size of singular values that count as zero.
        relative_damping: ε/λmax > 0 of LSQR.
        tolerance: relative error of LSQR.
        max_steps: most steps of LSQR, of two products of the whole update each.
        memory_bytes: the most bytes that the dense route may take.
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
        """Return one or two quantities of the samples that are scored."""
        before = client.meter.products
        delta = update_perturbation(client.gradient_map, client.exposure.whole, self.point)
        joint = self._solve(_operator(client, self.point), delta[None])
        note = joint.note if bool(delta.any()) else UNDEFENDED
        state: State = joint.state if bool(delta.any()) else "exact"
        squares = joint.solution.square()
        found = [_measurement("joint_influence_rmse", squares, client, joint, state, note)]
        if joint.variances is not None:
            name = "joint_unit_noise_rmse"
            bound = _measurement(name, joint.variances, client, joint, "lower bound", "")
            found.append(replace(bound, unit="model input per unit of noise"))
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
        # The damped solution is shorter than the undamped one, and an early one shorter still.
        note = f"about this or more: damped by {self.relative_damping:g} λmax"
        if not bool(solved.converged[0, 0]):
            note += f", and stopped after {self.max_steps} steps"
        return _Joint(solved.solutions[0, 0].double(), None, "lower bound", self.tolerance, note)


@dataclass(frozen=True)
class _Joint:
    """The solution of a whole update, with the relative error of its length."""

    solution: Float[Tensor, " n"]
    variances: Float[Tensor, " n"] | None
    state: State
    error: float
    note: str


def _operator(client: ClientSamples, point: Point) -> UpdateJacobian:
    exposure = client.exposure.whole
    shown = exposure.defended if point == "defended" else exposure.private
    soft = shown.targets.is_floating_point()
    batch = Batch(shown.inputs.double(), shown.targets.double() if soft else shown.targets)
    params = {name: value.double() for name, value in exposure.params.items()}
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
    squares: Float[Tensor, " n"],
    client: ClientSamples,
    joint: _Joint,
    state: State,
    note: str,
) -> Measurement:
    """Return √ of the mean over each scored sample's inputs; none for a sample without a step."""
    exposure = client.exposure
    count = len(exposure.whole.private)
    own = squares.reshape(count, -1).mean(1).sqrt()[list(exposure.indices)]
    used = (exposure.sample_weights() > 0).tolist()
    known = torch.isfinite(own).tolist()
    values, errors, notes, states = [], [], [], []
    for value, there, sound in zip(own.tolist(), used, known, strict=True):
        good = there and sound
        values.append(value if good else None)
        errors.append(value * joint.error if good else None)
        notes.append(note if good else "no number: the solution is not finite")
        if not there:
            notes[-1] = NOT_USED
        states.append(state if good else "unresolved")
    return Measurement(
        name,
        tuple(values),
        "model input",
        "larger is safer",
        tuple(notes) if any(notes) else (),
        errors=tuple(errors),
        states=tuple(states),
    )
