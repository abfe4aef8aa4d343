"""One line on the server: ``strategy = observe(strategy, Net(), "leakage")``."""

import warnings
from pathlib import Path
from typing import Any, TypeVar

from flwr.serverapp.strategy import Strategy
from torch import nn

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.flower.shared_truth import TruthFolder
from flwr_leakage.flower.strategy import HonestButCurious
from flwr_leakage.flower.told import UNTOLD_SCHEDULE, UNTOLD_SPEC, Given, ToldAudit
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.report import write_report
from flwr_leakage.tracking import JsonlTracker

S = TypeVar("S", bound=Strategy)


def observe(
    strategy: S,
    model: nn.Module | GradientMap,
    folder: str | Path,
    *,
    attack: Attack | str | None = "idlg",
    spec: InputSpec | None = None,
    schedule: LocalSchedule | None = None,
    max_samples: int | None = 64,
    truth: str | Path | None = None,
    weighted_by_key: str = "num-examples",
    **settings: Any,
) -> S:
    """Let a strategy be honest but curious; it is the same object, and runs its own ``start``.

    Its ``configure_train`` and ``aggregate_train`` are looked at (by ``HonestButCurious``). When
    its ``start`` ends, the records are closed and ``report.html`` is written.

    Args:
        strategy: of any class, with server-side differential privacy too: use it on the outermost.
        model: the model that is trained, with the mean cross-entropy; or its gradient map.
        folder: of the run, with the records and the report.
        attack: an attack, the name of a preset, or ``None``.
        spec: of the inputs; by default what the clients' captures tell.
        schedule: of local training; by default what each client's capture tells.
        max_samples: most samples that a client's steps use, all steps together, for it to be
            attacked; the others are recorded. ``None`` attacks all, which may take hours.
        truth: in a simulation, the folder that the clients' ``audit`` was given.
        weighted_by_key: the metric that holds the number of samples, as in the strategy.
        settings: of :class:`ServerAudit`: ``threat``, ``selection``, ``evaluator``, …
    """
    gradient_map = model if isinstance(model, GradientMap) else GradientMap(model)
    if truth is not None:
        settings.setdefault("truth", TruthFolder(Path(truth)))
        settings.setdefault("evaluator", Evaluator())
    tracker = JsonlTracker(folder)
    audit = ToldAudit(
        gradient_map,
        spec or UNTOLD_SPEC,
        schedule or UNTOLD_SCHEDULE,
        tracker,
        attack=load_preset(attack) if isinstance(attack, str) else attack,
        given=Given(
            spec,
            schedule,
            gradient_map.batch_norm if gradient_map is model else None,
            max_samples,
        ),
        **settings,
    )
    curious = HonestButCurious(_Original(strategy), audit, weighted_by_key)
    start = strategy.start

    def observed_start(*args: Any, **kwargs: Any) -> Any:
        try:
            return start(*args, **kwargs)
        finally:
            tracker.close()
            try:
                write_report(folder)
            except Exception as error:  # the training is done, and its result must not be lost
                warnings.warn(f"no report was written: {error}", stacklevel=2)

    for name in ("configure_train", "aggregate_train"):
        setattr(strategy, name, getattr(curious, name))
    strategy.start = observed_start  # type: ignore[method-assign]
    return strategy


class _Original(Strategy):
    """The methods of a strategy as they were before it was observed."""

    def __init__(self, strategy: Strategy) -> None:
        self._configure_train = strategy.configure_train
        self._aggregate_train = strategy.aggregate_train
        self._strategy = strategy

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate."""
        return self._configure_train(*args, **kwargs)

    def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate."""
        return self._aggregate_train(*args, **kwargs)

    def configure_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate."""
        return self._strategy.configure_evaluate(*args, **kwargs)

    def aggregate_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Delegate."""
        return self._strategy.aggregate_evaluate(*args, **kwargs)

    def summary(self) -> None:
        """Delegate."""
        self._strategy.summary()
