"""Observe a training that is not captured, by hooks of the optimizer alone."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from flwr_leakage.capture.counting import Counting, parameters_of, settings_of, writes_of
from flwr_leakage.capture.facts import TrainingFacts
from flwr_leakage.capture.samples import check_settings
from flwr_leakage.capture.step_hooks import watch_steps
from flwr_leakage.capture.training import sgd_settings

Differing = Callable[[Mapping[str, Tensor]], list[str]]
"""A function that compares tensors by name with received or sent arrays, and returns the names of
those that differ."""

_NO_STEP = "no step of a torch.optim.Optimizer was seen in this thread"


class Glance:
    """An observer of a training's optimizer: of the start, the settings, the steps and the end.

    It observes the steps in a ``with`` block, at less cost than a capture. It needs an earlier
    captured training of the same client, from which the argument ``names`` is known.

    Args:
        names: for each parameter of the optimizer, in its order, the name under which it is
            received; empty for one that is not received.
        not_received: a function of tensors by name that returns the names of those whose values
            differ from the arrays that the server sent.
    """

    def __init__(self, names: Sequence[str], not_received: Differing) -> None:
        self._names, self._not_received = names, not_received
        self._counting: Counting | None = None
        self._optimizer: Optimizer | None = None
        self._own: list[str] = []
        self._live: dict[str, Tensor] = {}
        self._settings: list[dict[str, Any]] = []
        self._problem = ""
        self.writes = -1

    def __enter__(self) -> "Glance":
        self._end_of_steps = watch_steps(self._before_step, self._after_step)
        self._thread = threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_of_steps()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._counting is not None:
            self._counting.before_step(optimizer)
        elif threading.get_ident() == self._thread and not self._problem:
            try:
                self._begin(optimizer, args, kwargs)
            except Exception as error:  # an error of the observer must not break a training
                self._problem = str(error) or type(error).__name__

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = parameters_of(optimizer)
        self._settings = settings_of(optimizer)
        self._optimizer = optimizer
        self.writes = writes_of(parameters, args, kwargs)
        self._counting = Counting(optimizer, parameters)
        if len(parameters) != len(self._names):
            raise ValueError("the optimizer holds other parameters than when it was replayed")
        self._live = {n: p for n, p in zip(self._names, parameters, strict=True) if n}
        self._own = self._not_received(self._live)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._counting is not None:
            self._counting.after_step(optimizer, args, kwargs)

    def facts(self, known: TrainingFacts) -> TrainingFacts:
        """Return the facts about the observed training.

        The optimizer, its settings and its number of steps are those that were observed. All other
        facts are copied from ``known``, those of the client's captured training.

        Raises:
            ValueError: no step was observed, or two optimizers took steps.
        """
        if self._counting is None or self._optimizer is None:
            raise ValueError(self._problem or _NO_STEP)
        if self._counting.problem:
            raise ValueError(self._counting.problem)
        unscheduled = known.unscheduled
        try:
            check_settings(type(self._optimizer), self._settings, self._counting.settings_changed)
        except ValueError as error:
            unscheduled = unscheduled or str(error)
        return replace(
            known,
            optimizer=type(self._optimizer).__name__,
            **sgd_settings(self._settings),
            num_steps=self._counting.num_steps,
            unscheduled=unscheduled,
            repeated=True,
        )

    def causes(self, not_sent: Differing) -> tuple[str, ...]:
        """Return in words the evidence that something else than the training made the update.

        The result is empty if there is no such evidence. ``not_sent`` takes tensors by name, and
        returns the names of those that differ from the arrays that the client sends. Writes to
        parameters between the steps are detected if they raise autograd's version counter, which
        writes through ``.data`` do not. The model's calls and the loss are not observed.
        """
        seen = self._counting
        if self._problem or seen is None:
            return (self._problem or _NO_STEP,)
        if seen.problem:
            return (seen.problem,)
        found = []
        if own := self._own:
            found.append(f"{some_were(own)} not the server's before training")
        if changed := not_sent(self._live):
            found.append(
                f"{some(changed)} changed after training (noise, clipping, an average over steps "
                f"or a defense)"
            )
        if seen.changed_outside or seen.changed_at_end:
            found.append("parameters were changed by something else than the optimizer")
        elif seen.unclear_within:
            found.append(
                "a closure's step wrote to parameters otherwise than earlier ones; whether "
                "something else than the optimizer did could not be told"
            )
        return tuple(found)


def some(names: list[str]) -> str:
    """Return a text with the first few of several names and the number of the others."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def some_were(names: list[str]) -> str:
    """Return the text of :func:`some` followed by “was” for a single name, and by “were” for
    several.
    """
    return f"{some(names)} {'was' if len(names) == 1 else 'were'}"
