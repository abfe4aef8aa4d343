"""Find changes of parameters between an optimizer's steps, such as SCAFFOLD's control variates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_leakage.capture.training import Correction
from flwr_leakage.params import norm

_ROUNDING = 16 * torch.finfo(torch.float32).eps
"""The largest rounding error of a difference of two parameters in float32, as a share of the
parameters' norm. A smaller difference counts as no change."""
_ALIKE = 1e-3
"""The largest relative difference of the changes after two steps, each divided by its learning
rate, at which they count as equal. The error ``_ROUNDING`` is allowed in addition."""


class Outside:
    """A detector of changes of the given parameters between the steps of an optimizer.

    It compares the parameters after each step with those at the beginning of the next one. So it
    also finds writes through ``.data``, which autograd's version counters do not show. The change
    after the first step is stored; later ones are only compared with it.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._parameters = list(parameters)
        self._after: list[Tensor] = []
        self._rate = 0.0
        self._first: list[Tensor] | None = None
        self._steps = self._alike = 0
        self.changed = self.changed_at_end = False

    def step(self, rate: float) -> None:
        """Note that a step with this learning rate has ended, and remember the parameters."""
        self._after = [parameter.detach().clone() for parameter in self._parameters]
        self._rate = rate

    def look(self, *, at_end: bool = False) -> None:
        """Compare the parameters with those that :meth:`step` remembered, and store whether they
        changed.

        A second call after the same step does nothing. ``at_end`` says that it was the last step.
        """
        after, self._after = self._after, []
        if not after:
            return
        self._steps += 1
        now = [p.detach().to(old.device) for p, old in zip(self._parameters, after, strict=True)]
        if all(map(torch.equal, now, after)):
            return
        self.changed |= not at_end
        self.changed_at_end = at_end
        change = [new - old for new, old in zip(now, after, strict=True)]
        if self._first is None and self._steps == 1 and self._rate:
            self._first = [each / self._rate for each in change]
            self._alike = 1
        elif self._first is not None:
            expected = [self._rate * each for each in self._first]
            gap = norm(one - other for one, other in zip(change, expected, strict=True))
            self._alike += gap <= _ALIKE * norm(expected) + _ROUNDING * norm(now)

    def correction(self) -> Correction | None:
        """Return the change of the parameters, per learning rate, that followed every step.

        The result is ``None`` if there were fewer than two steps, or if the changes after the steps
        differ.
        """
        if self._first is None or self._steps < 2 or self._alike < self._steps:
            return None
        pairs = zip(self._parameters, self._first, strict=True)
        return Correction({id(parameter): change for parameter, change in pairs})
