"""Compute LAVP's bi-Lipschitz constants, and bound the progress of one step of an L2 attack."""

from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.per_sample import SampleProblem
from flwr_leakage.randomness import Draws, sign_rows
from flwr_leakage.records import State
from flwr_leakage.scores.base import FLAT, Column, first_notes, notes_where
from flwr_leakage.scores.extremes import ExtremesScore


@dataclass(frozen=True)
class OneStepBounds(ExtremesScore):
    """A score: bi-Lipschitz constants of a sample's gradient, and bounds of an attack's first step.

    One step of an L2 attack lowers its loss by a share that the score bounds from both sides (Hong
    et al. 2024).

    L = √λmax and M = √λmin are the largest and the smallest singular value of the Jacobian of a
    sample's gradient g(x) at the true x*. Near x*, M‖x₁ − x₂‖ ≤ ‖g(x₁) − g(x₂)‖ ≤ L‖x₁ − x₂‖ to
    first order. The attack's loss is ℓ(x) = ‖g(x) − g*‖² with the observed g* = g(x*), and it
    starts at x* + ρ·(random signs), as in the paper's appendix. The quantities are:

    - ``upper_lipschitz`` L, ``lower_lipschitz`` M: larger is safer, in the paper's reading;
    - ``one_step_drop_least`` ‖∇ℓ‖²/(4L²ℓ): the best step lowers the loss by at least this share
      (theorem 1, with the step size 1/(2L²));
    - ``one_step_drop_most`` min(1, ‖∇ℓ‖²/(4M²ℓ)): no step lowers the loss by a larger share
      (theorem 2).

    The theorems need constants L and M that hold everywhere between x* and the start. The score
    takes those at x*, so that both bounds are approximations, which improve with smaller ρ.

    Attributes:
        start: the distance ρ > 0 of each input entry from the truth, in model input units; 0.1 in
            the paper.
    """

    start: float = field(default=0.1, kw_only=True)

    def __post_init__(self) -> None:
        if not self.start > 0:
            raise ValueError(f"start must be positive, got {self.start}.")

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """Return ``upper_lipschitz`` and ``one_step_drop_least``, each as a column.

        If ``smallest`` is set, there are also ``lower_lipschitz`` and ``one_step_drop_most``.
        """
        slope, loss = self._at_start(problem, draws)
        found = []
        names = (
            ("upper_lipschitz", "one_step_drop_least"),
            ("lower_lipschitz", "one_step_drop_most"),
        )
        for (constant, drop), source in zip(
            names, self.extremes().measure(problem, draws), strict=False
        ):
            notes = first_notes(notes_where(source.values == 0, FLAT), source.notes)
            root = source.values.sqrt()
            bars = None if source.errors is None else source.errors / root / 2
            states = source.own_states
            found.append(Column(constant, root, "1", "larger is safer", notes, bars, states))
            share = (slope / (4 * source.values * loss)).clamp_max(1)
            kind: State = "lower bound" if drop.endswith("least") else "upper bound"
            found.append(Column(drop, share, "1", "larger leaks more", notes, None, kind))
        return found

    def _at_start(
        self, problem: SampleProblem, draws: Draws
    ) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
        """Return ‖∇ℓ‖² and ℓ, each (S,), of an L2 attack's loss ℓ at its random start."""
        signs = sign_rows(problem.inputs.shape, draws).to(problem.inputs)
        moved = problem.differentiable.with_inputs(problem.inputs + self.start * signs)
        operator = moved.jacobian(problem.meter)
        residual = operator.value - problem.gradients
        slope = 2 * operator.rmatvec(residual)
        return slope.double().square().sum(1), residual.double().square().sum(1)
