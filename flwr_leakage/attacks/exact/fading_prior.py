"""The weights that the prior fades through in each stage of a fit through ReLUs."""

from dataclasses import dataclass, field, replace

from flwr_leakage.attacks.exact.fading import Fading
from flwr_leakage.attacks.exact.fading_solver import StepSettings
from flwr_leakage.attacks.exact.fading_stages import Stage


@dataclass(frozen=True)
class FadingPrior:
    """The settings of a fit through ReLUs with a prior of images that fades.

    The stages are those of :class:`flwr_leakage.attacks.exact.fading_stages.Stage`. Deep fadings,
    and the last one with a prior that is fitted to the best candidate, share ``last_weight``,
    ``factor`` and ``iterations``; in their last steps ReLUs are exact.

    Attributes:
        rounds: candidates, at most, ≥ 1.
        last_weight: of the prior in deep fadings, in (0, fitted_first).
        factor: from one weight to the next in these, in (0, 1).
        iterations: of conjugate gradients in each of their steps, ≥ 1.
        near: a deep fading ends, and its candidate meets the equations, once ‖r‖², of the
            equations in units, is at most this, ≥ 0 …
        enough: … and the one with a fitted prior that then follows once it is at most this, ≥ 0.
        rough: the first fading, with the masks that are proven at the start.
        middle: with more of them.
        longer: share to which the last weight of ``middle`` falls when no mask was proven, in
            (0, 1].
        deep_first: first weight of a deep fading from the best candidate, > last_weight.
        deep_blur: its blur, and that of the fitted prior's, ≥ 0.
        grey_first: first weight of a deep fading from grey, > last_weight.
        grey_blur: its blur, ≥ 0: wider, so that it ends elsewhere than the one before.
        fitted_first: first weight with the prior that is fitted to the best candidate; it starts
            from there, so that there is less to fade.
        solver: of the steps' linear systems.
    """

    rounds: int = 12
    last_weight: float = 1e-8
    factor: float = 0.3
    iterations: int = 200
    near: float = 1e-3
    enough: float = 1e-5
    rough: Fading = field(default_factory=lambda: Fading(10.0, 3e-3, 0.3, 0.8, 60))
    middle: Fading = field(default_factory=lambda: Fading(0.3, 1e-3, 0.3, 0.8, 120))
    longer: float = 0.1
    deep_first: float = 1e-2
    deep_blur: float = 0.8
    grey_first: float = 10.0
    grey_blur: float = 1.5
    fitted_first: float = 1e-4
    solver: StepSettings = field(default_factory=StepSettings)

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}.")
        if not 0 < self.last_weight < self.fitted_first:
            raise ValueError(
                f"last_weight must lie in (0, {self.fitted_first:g}), got {self.last_weight}."
            )
        if not 0 < self.longer <= 1:
            raise ValueError(f"longer must lie in (0, 1], got {self.longer}.")
        if self.near < 0:
            raise ValueError(f"near must be at least 0, got {self.near}.")
        # The deep fadings check what is theirs, here rather than in the middle of an attack.
        self.fitted()
        for stage in (Stage.LONGER, Stage.DEEP, Stage.DEEP_FROM_GREY):
            self.of(stage)

    def of(self, stage: Stage) -> Fading:
        """The fading of a stage.

        Raises:
            ValueError: nothing fades in that stage.
        """
        if stage is Stage.ROUGH:
            return self.rough
        if stage is Stage.MIDDLE:
            return self.middle
        if stage is Stage.LONGER:
            return replace(self.middle, last=self.longer * self.middle.last)
        if stage is Stage.DEEP:
            return self._deep(self.deep_first, self.deep_blur, self.near)
        if stage is Stage.DEEP_FROM_GREY:
            return self._deep(self.grey_first, self.grey_blur, self.near)
        raise ValueError(f"nothing fades in stage {stage}.")

    def fitted(self) -> Fading:
        """The fading of a prior that is fitted to the best candidate."""
        return self._deep(self.fitted_first, self.deep_blur, self.enough)

    def _deep(self, first: float, blur: float, enough: float) -> Fading:
        """A fading to the last weight, or until ‖r‖² is enough."""
        return Fading(
            first=first,
            last=self.last_weight,
            factor=self.factor,
            blur=blur,
            iterations=self.iterations,
            sharpens=True,
            enough=enough,
        )
