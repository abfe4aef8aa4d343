"""The weights that the prior fades through in each stage of a fit through ReLUs."""

from dataclasses import dataclass, field, replace

from flwr_leakage.attacks.exact.fading import Fading, StepSettings
from flwr_leakage.attacks.exact.fading_stages import Stage
from flwr_leakage.attacks.settings import require


@dataclass(frozen=True)
class FadingPrior:
    """The settings of a fit through ReLUs with a prior of images that fades.

    The stages are those of :class:`flwr_leakage.attacks.exact.fading_stages.Stage`. Three fadings
    are *deep*: they end at a negligible weight of the prior. One starts from the best candidate,
    one from grey, and the last one has a prior that is fitted to the best candidate. They share
    ``last_weight``, ``factor`` and ``iterations``, and their last steps have no blur.

    Attributes:
        rounds: largest number of fadings, each of which yields a candidate, ≥ 1.
        last_weight: last weight of the prior in deep fadings, in (0, fitted_first).
        factor: factor from one weight to the next in deep fadings, in (0, 1).
        iterations: largest number of iterations of conjugate gradients in a step of deep fadings,
            ≥ 1.
        near: value of ‖r‖² up to which a candidate meets the equations, ≥ 0. Each set of equations
            is in units of its right-hand side. The first two deep fadings end there.
        enough: value of ‖r‖² at which the deep fading with the fitted prior ends, ≥ 0.
        rough: the first fading, with the masks that are proven without a candidate.
        middle: the fadings that follow, with masks that candidates helped to prove.
        longer: factor of the last weight of ``middle`` after a candidate that proved no mask, in
            (0, 1].
        deep_first: first weight of the deep fading from the best candidate, > last_weight.
        deep_blur: blur of that fading and of the one with the fitted prior, ≥ 0.
        grey_first: first weight of the deep fading from grey, > last_weight.
        grey_blur: blur of that fading, ≥ 0. It is wider, so that the fading ends elsewhere than
            the one before.
        fitted_first: first weight of the deep fading with the fitted prior. It is small, as this
            fading starts from the best candidate.
        solver: the settings of the solution of the steps' linear systems.
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
        require(self, "be at least 1", "rounds")
        if not 0 < self.last_weight < self.fitted_first:
            raise ValueError(
                f"last_weight must lie in (0, {self.fitted_first:g}), got {self.last_weight}."
            )
        require(self, "lie in (0, 1]", "longer")
        require(self, "be at least 0", "near")
        # Each Fading checks its values. Making them here finds errors before an attack begins.
        self.fitted()
        self.of(Stage.ROUGH)

    def of(self, stage: Stage) -> Fading:
        """Return the fading of a stage.

        Raises:
            ValueError: nothing fades in that stage.
        """
        fadings = {
            Stage.ROUGH: self.rough,
            Stage.MIDDLE: self.middle,
            Stage.LONGER: replace(self.middle, last=self.longer * self.middle.last),
            Stage.DEEP: self._deep(self.deep_first, self.deep_blur, self.near),
            Stage.DEEP_FROM_GREY: self._deep(self.grey_first, self.grey_blur, self.near),
        }
        if stage not in fadings:
            raise ValueError(f"nothing fades in stage {stage}.")
        return fadings[stage]

    def fitted(self) -> Fading:
        """Return the deep fading whose prior is fitted to the best candidate."""
        return self._deep(self.fitted_first, self.deep_blur, self.enough)

    def _deep(self, first: float, blur: float, enough: float) -> Fading:
        """Return a deep fading, which ends at ``last_weight`` or once ‖r‖² ≤ ``enough``."""
        first_to_last = first, self.last_weight, self.factor
        return Fading(*first_to_last, blur, self.iterations, sharpens=True, enough=enough)
