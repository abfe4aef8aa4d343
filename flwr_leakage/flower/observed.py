"""Wrap a server's strategy by one line, ``strategy = observe(strategy, Net(), "leakage")``."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from flwr_leakage._conf import DEFAULT_ATTACK
from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit.candidates import Candidates
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.flower.accuracy import tell_accuracy
from flwr_leakage.flower.log_lines import LogProgress, RecentRecords, tell_end, tell_round
from flwr_leakage.flower.round_view import Seen
from flwr_leakage.flower.shared_truth import TruthFolder
from flwr_leakage.flower.strategy import BadReplies, HonestButCurious
from flwr_leakage.flower.told import UNTOLD_SCHEDULE, UNTOLD_SPEC, Given, ToldAudit
from flwr_leakage.flower.undisturbed import random_states_kept
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import NextToken
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker

MAX_SAMPLES = 64
"""The default limit on the samples that the steps of an attacked client use, all steps together."""

MAX_SECONDS = 60.0
"""The default limit on the CPU seconds of an attack on one target, an update or a mean update. The
portfolio of attacks ended within this time on 23 of its 30 held-out cases
(simulations/benchmarks/results/portfolio.md); the others took up to 122."""

MAX_ROUND_SECONDS = 600.0
"""The default limit on the CPU seconds of all attacks of a round, enough for ten targets. The
training is delayed by as much."""

MAX_BYTES = 2**30
"""The default limit on the bytes of an attack on one target, by an estimate from one forward pass.
By this estimate, a step on 64 images takes a fifth of the limit with the network of Flower's
quickstart; a step on two images of 32 × 32 pixels takes seven tenths with a ResNet-18. Attacks on
32 images were measured to take at most 0.35 GB (simulations/benchmarks/results/portfolio.md, "What
one line says")."""


def observe(
    strategy: Strategy,
    model: nn.Module | GradientMap,
    folder: str | Path,
    *,
    attack: Attack | str | None = DEFAULT_ATTACK,
    spec: InputSpec | None = None,
    schedule: LocalSchedule | None = None,
    max_samples: int | None = MAX_SAMPLES,
    max_seconds: float | None = MAX_SECONDS,
    max_round_seconds: float | None = MAX_ROUND_SECONDS,
    max_bytes: int | None = MAX_BYTES,
    truth: str | Path | None = None,
    candidates: Candidates | None = None,
    weighted_by_key: str | None = None,
    bad_replies: BadReplies = "pass",
    reproducible: bool = False,
    **settings: Any,
) -> "Observed":
    """Return a strategy that trains like the given one, and audits each round.

    The returned strategy's ``start`` runs that of the given strategy, whose attributes it has, too.
    Flower's log gets a line after each round. When ``start`` ends, the records are closed,
    ``report.html`` is written, and the log names its path. An accuracy of the app's own evaluation
    is recorded as the test accuracy.

    Args:
        strategy: a strategy of any class of ``flwr.serverapp``, also one with server-side
            differential privacy: use ``observe`` on the outermost.
        model: the model that is trained, with the mean cross-entropy as its loss (of the next
            token, if the spec says so); or its gradient map.
        folder: the folder for the records and the report of the run.
        attack: an attack, the name of a preset, or ``None`` for none. The default tries every
            attack that applies, within a budget of CPU seconds for each target (an update, or the
            mean of several).
        spec: shapes, classes and normalisation of the inputs; by default as the clients' notes tell
            them.
        schedule: the schedule of local training; by default as each client's note tells it.
        max_samples: the largest number of samples that the steps of an attacked client use, all
            steps together; clients beyond it are only recorded. ``None`` attacks all, which may
            take hours.
        max_seconds: the CPU seconds that an attack may take for each target; ``None`` for no limit.
        max_round_seconds: the CPU seconds that all attacks of a round may take; ``None`` for no
            limit. If they are not enough, the attacked clients are drawn anew in each round, and
            the others are only recorded.
        max_bytes: the bytes that an attack on a target may need by an estimate, which is made
            before anything is allocated; ``None`` for no limit. A client beyond it is recorded with
            the reason.
        truth: in a simulation, the folder into which clients write their samples: the argument
            ``truth`` of the clients' ``audit``.
        candidates: samples that are tested for membership in every update. If ``truth`` is given,
            the report says whether the tests were right.
        weighted_by_key: the name of the metric that holds a reply's number of samples; by default
            the given strategy's, or else ``num-examples``.
        bad_replies: ``pass`` hands every reply on to the strategy; ``drop`` leaves out replies that
            would break or poison an aggregation. :class:`HonestButCurious` lists their faults.
        reproducible: whether clients are sampled by the audit's seed and replies are handed on in
            the order of the clients; for simulations.
        settings: further settings of :class:`ServerAudit`: ``threat``, ``selection``,
            ``evaluator``, ``large_clients``, …

    Raises:
        TypeError: the strategy is one of ``flwr.server`` (use ``observe_legacy``), the model is
            neither a module of torch nor a gradient map, or ``ServerAudit`` has no such setting.
        FileExistsError: the folder already holds a run.
    """
    if not hasattr(strategy, "configure_train"):
        raise TypeError(
            f"strategy must be one of flwr.serverapp.strategy, got "
            f"{type(strategy).__module__}.{type(strategy).__name__}; for those of flwr.server "
            f"there is observe_legacy."
        )
    audit = told_audit(
        model, folder, spec, schedule,
        attack=attack,
        max_samples=max_samples,
        max_seconds=max_seconds,
        max_round_seconds=max_round_seconds,
        max_bytes=max_bytes,
        truth=truth,
        candidates=candidates,
        **settings,
    )  # fmt: skip
    observed = Observed(
        strategy, audit, weighted_by_key, bad_replies=bad_replies, reproducible=reproducible
    )
    observed.folder = Path(folder)
    return observed


def told_audit(
    model: nn.Module | GradientMap,
    folder: str | Path,
    spec: InputSpec | None,
    schedule: LocalSchedule | None,
    *,
    attack: Attack | str | None,
    max_samples: int | None = MAX_SAMPLES,
    max_seconds: float | None = MAX_SECONDS,
    max_round_seconds: float | None = MAX_ROUND_SECONDS,
    max_bytes: int | None = MAX_BYTES,
    truth: str | Path | None = None,
    **settings: Any,
) -> ToldAudit:
    """Return the audit that ``observe`` and ``observe_legacy`` use, which records into ``folder``.

    The arguments are those of these two functions. If ``spec`` or ``schedule`` is ``None``, each
    client's is taken from the note beside its update. ``settings`` are further settings of
    ``ServerAudit``.
    """
    names = {each.name for each in fields(ServerAudit) if each.init}
    if unknown := sorted(settings.keys() - names):
        raise TypeError(
            f"observe and observe_legacy take no argument {unknown[0]}; their further settings are "
            f"those of ServerAudit: {', '.join(sorted(names))}."
        )
    gradient_map = gradient_map_of(model, spec)
    if truth is not None:
        settings.setdefault("truth", TruthFolder(Path(truth)))
        settings.setdefault("evaluator", Evaluator())
    mode = gradient_map.batch_norm if gradient_map is model else None
    if attack is not None:
        settings.setdefault("progress", LogProgress(max_seconds))
    return ToldAudit(
        gradient_map,
        spec or UNTOLD_SPEC,
        schedule or UNTOLD_SCHEDULE,
        JsonlTracker(folder) if attack is None else RecentRecords(folder),
        attack=load_preset(attack) if isinstance(attack, str) else attack,
        given=Given(spec, schedule, mode, max_samples),
        max_seconds=max_seconds,
        max_round_seconds=max_round_seconds,
        max_bytes=max_bytes,
        **settings,
    )


def gradient_map_of(model: nn.Module | GradientMap, spec: InputSpec | None) -> GradientMap:
    """Return the gradient map of a model: its parameters and loss, as the attacks take them.

    The loss is the mean cross-entropy; for a spec whose model predicts the next token of a text, it
    is :class:`~flwr_leakage.losses.NextToken`. A gradient map is returned as it is.

    Raises:
        TypeError: the model is neither a module of torch nor a gradient map.
    """
    if isinstance(model, GradientMap):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module or a GradientMap, got {type(model).__module__}."
            f"{type(model).__name__}: only models of torch are observed."
        )
    if spec is not None and spec.next_token:
        return GradientMap(model, NextToken(spec.padding))
    return GradientMap(model)


class Observed(HonestButCurious):
    """A wrapped strategy that ends its records and writes the report when ``start`` ends."""

    folder: Path

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the wrapped strategy's own ``start``, then close the records and write the report.

        The arguments and the result are those of the strategy's ``start``.
        """
        try:
            result = super().start(*args, **kwargs)
            self._guarded(0, self._tell_evaluations, result.evaluate_metrics_serverapp)
            return result
        finally:
            self._guarded(0, self._finish)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the wrapped strategy's aggregate of evaluations, and record their accuracy."""
        result = super().aggregate_evaluate(server_round, replies)
        if result is not None:
            told = tell_accuracy, self.audit, server_round, result, "the clients’ evaluation"
            self._guarded(server_round, *told)
        return result

    def _tell_evaluations(self, told: Mapping[int, MetricRecord]) -> None:
        """Record the accuracy among the metrics of each of the server's own evaluations, by
        round.
        """
        for server_round, metrics in told.items():
            tell_accuracy(self.audit, server_round, metrics, "the server’s evaluation")

    def _inspect(self, server_round: int, seen: Seen | None, num_updates: int) -> None:
        super()._inspect(server_round, seen, num_updates)
        self._guarded(server_round, tell_round, self.audit, server_round)

    def _finish(self) -> None:
        # Drawing the report's page may draw from the process-wide random generators. Their states
        # are restored, so that the app's own draws do not change.
        with random_states_kept():
            self.audit.tracker.close()
            tell_end(self.folder)
