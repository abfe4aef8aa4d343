"""Observe strategies of ``flwr.server``, with and without secure aggregation.

In Flower 1.41, SecAgg+ exists only for these strategies. Its workflow unmasks the mean over
clients, and shows the strategy this mean in place of each client's model.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from flwr.app import Array
from flwr.common import FitIns, FitRes, Parameters, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import nn

from flwr_leakage._conf import DEFAULT_ATTACK
from flwr_leakage.attacks.base import Attack
from flwr_leakage.audit import ClientNote, ServerAudit
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.flower.accuracy import tell_accuracy
from flwr_leakage.flower.arrays import NotFiniteError, diverged
from flwr_leakage.flower.heard import Heard
from flwr_leakage.flower.log_lines import tell_end, tell_round
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.flower.observed import told_audit
from flwr_leakage.flower.part import Part, Variates, change_made, observation_of
from flwr_leakage.flower.replies import MAX_EXAMPLES
from flwr_leakage.flower.undisturbed import guarded, random_states_kept
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.measurements import ENDED_EARLY
from flwr_leakage.params import Params
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, ThreatModel, Update

Results = list[tuple[ClientProxy, FitRes]]
Failures = list[tuple[ClientProxy, FitRes] | BaseException]


class LegacyHonestButCurious(Strategy):
    """A wrapper of a strategy of ``flwr.server`` that hands each round's updates to an audit.

    Every method of the wrapped strategy works as without the wrapper. Under secure aggregation the
    strategy is shown the same model for all clients. Then only their mean update is known, and the
    audit's threat model must have ``view="aggregate"``. Clients tell their partition id in the fit
    metric ``partition-id``. Their results are recorded under this id, and compared with this
    partition's samples. A client that tells no id, or one that contradicts another client's, is
    known by its node id.

    Args:
        strategy: the strategy that trains.
        audit: the audit that attacks the observed updates.
    """

    def __init__(self, strategy: Strategy, audit: ServerAudit) -> None:
        self.strategy = strategy
        self.audit = audit
        self._names = ClientNames()
        self.heard = Heard(audit, self._names)
        self._sent: dict[str, Parameters] = {}
        self._variates = Variates()

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped strategy's attribute of a name that this class lacks.

        An app's own server may call another method than ``aggregate_fit``, such as FedNova's
        ``aggregate_fit_custom``. If the name begins with ``aggregate_fit``, the updates among the
        method's arguments are audited, too.
        """
        # ``copy`` looks up attributes before ``__init__`` has set ``strategy``. Without this error,
        # the lookup would call this method for ``strategy`` again and again.
        if name == "strategy":
            raise AttributeError(name)
        found = getattr(self.strategy, name)
        return partial(self._aggregate, found) if name.startswith("aggregate_fit") else found

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return the clients and instructions that the wrapped strategy chooses, and remember the
        sent models.
        """
        guarded(self.audit, server_round, self.audit.begin_round, server_round)
        chosen: list[tuple[ClientProxy, FitIns]] = self.strategy.configure_fit(
            server_round, parameters, client_manager
        )
        # A strategy may send another model than ``parameters``, and a different one to each client.
        self._sent = {proxy.cid: instruction.parameters for proxy, instruction in chosen}
        proxies = [proxy for proxy, _ in chosen]
        guarded(self.audit, server_round, self.heard.listen, server_round, proxies)
        return chosen

    def aggregate_fit(self, server_round: int, results: Results, failures: Failures) -> Any:
        """Return the wrapped strategy's aggregate of the results, and attack the clients' updates.

        The results are read before the strategy aggregates them.
        """
        return self._aggregate(self.strategy.aggregate_fit, server_round, results, failures)

    def _aggregate(self, aggregate: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Read the clients' results, call the method ``aggregate``, then attack the updates; return
        its result.

        The round and the clients' results are found among the method's arguments, ``given`` and
        ``named``. If they are not there, a warning is recorded and nothing is attacked.
        """
        try:
            called = inspect.signature(aggregate).bind(*given, **named).arguments
            server_round, results = called["server_round"], called["results"]
        except (KeyError, TypeError, ValueError):
            self.audit.warn_once(
                0, -1,
                f"nothing is observed: {aggregate.__name__} of the strategy takes no server_round "
                "and results.",
            )  # fmt: skip
            return aggregate(*given, **named)
        failures = called.get("failures", [])
        looked = guarded(self.audit, server_round, self._look, server_round, results, failures)
        try:
            aggregated = aggregate(*given, **named)
        # The strategy's error ends the run, but the updates that were sent are still audited.
        except Exception:
            self._inspect(server_round, looked, len(results))
            raise
        self._inspect(server_round, looked, len(results))
        return aggregated

    def _inspect(self, server_round: int, looked: Any, num_updates: int) -> None:
        """Let the audit attack the updates of a round, if they could be read.

        ``looked`` is the result of ``_look``, ``None`` after an error; ``num_updates`` is the
        number of updates that were aggregated.
        """
        if looked is not None:
            seen, notes, unknown = looked
            guarded(
                self.audit, server_round, self.audit.inspect, server_round, seen, notes,
                unknown, num_updates,
            )  # fmt: skip
            guarded(self.audit, server_round, tell_round, self.audit, server_round)

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Return the result of the wrapped strategy's method of the same name."""
        return self.strategy.initialize_parameters(client_manager)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> Any:
        """Return the result of the wrapped strategy's method of the same name."""
        return self.strategy.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        """Return the result of the wrapped strategy's method of the same name."""
        return self.strategy.aggregate_evaluate(server_round, results, failures)

    def evaluate(self, server_round: int, parameters: Parameters) -> Any:
        """Return the result of the wrapped strategy's method of the same name."""
        return self.strategy.evaluate(server_round, parameters)

    def _look(
        self, server_round: int, results: Results, failures: Failures
    ) -> tuple[list[Observation], list[ClientNote], Set[int]]:
        """Return a round's observations to attack, the clients' notes, and the clients of uncertain
        identity.

        The notes are those that clients put beside their updates. A client's identity is uncertain
        if its claimed id is not believed; an evaluator then cannot know its samples.
        """
        told = self.heard.notes()
        unknown = self._learn_names(server_round, results, told)
        self.heard.end_round({int(proxy.node_id) for proxy, _ in results}, failures)
        notes = [replace(note, client_id=self._names.of(node)) for node, note in told.items()]
        facts = {node: note.training for node, note in told.items()}
        return self._observe(server_round, results, facts), notes, unknown

    def _observe(
        self, server_round: int, results: Results, facts: Mapping[int, TrainingFacts | None]
    ) -> list[Observation]:
        """Return the observations to attack, and record why a client was not observed.

        Under secure aggregation all clients show the same mean, which is attacked only if every
        client in it can be observed. ``facts`` are, by node id, the facts on each training from the
        client's note.
        """
        is_sum = len(results) > 1 and len({id(fit.parameters) for _, fit in results}) == 1
        if is_sum and self.audit.threat.view != "aggregate":
            self.audit.warn_once(
                server_round, -1,
                f"nothing was attacked: the server is shown the sum of {len(results)} clients only "
                f"(secure aggregation), so that threat.view must be 'aggregate', got "
                f"{self.audit.threat.view!r}.",
            )  # fmt: skip
            return []
        models = _distinct(self._sent[proxy.cid] for proxy, _ in results if proxy.cid in self._sent)
        if len(models) > 1 and self.audit.threat.view == "aggregate":
            self.audit.warn(
                server_round, -1,
                f"nothing was attacked: a mean update is of one model, and the clients were sent "
                f"{len(models)} different ones.",
            )  # fmt: skip
            return []
        try:
            sent = [(model, self._whole(server_round, model)) for model in models]
        # Reading the arrays of an unknown app may raise any error. It becomes a warning, so that
        # the clients' notes are recorded in any case.
        except NotFiniteError as error:
            self.audit.warn_once(server_round, -1, diverged(error))
            return []
        except Exception as error:
            self.audit.warn_once(
                server_round, -1,
                f"nothing is observed: what the strategy sends is not the model that "
                f"observe_legacy was given ({error}) Give it the torch module whose state_dict is "
                f"sent; models of other libraries are not observed.",
            )  # fmt: skip
            return []
        shared = self._read(server_round, results[0][1].parameters) if is_sum else None
        observations = []
        for proxy, fit in results:
            client, count = self._names.of(int(proxy.node_id)), fit.num_examples
            try:
                if not 1 <= count <= MAX_EXAMPLES:
                    raise ValueError(f"num_examples must lie in [1, 2^53], got {count}")
                if proxy.cid not in self._sent:
                    raise ValueError("it answers, and was sent nothing")
                mine = self._sent[proxy.cid]
                params, buffers, held = next(arrays for model, arrays in sent if model == mine)
                local = shared or self._read(server_round, fit.parameters)
                local_params, local_buffers, change = local
                told = facts.get(int(proxy.node_id))
                delta = change_made(told, local_params, params)
                self._variates.hear(client, change, params)
                delta = self._variates.without(client, told, delta, held)
                schedule = self.audit.schedule.for_client(count)
            except Exception as error:  # reading a client's bytes may raise any error
                reason = str(error) or type(error).__name__
                self.audit.warn(server_round, client, f"client {client} was not observed: {reason}")
                continue
            if not self.audit.wants(server_round, client):
                self.audit.spare(server_round, client, count)
                continue
            made, where = Update(delta, local_buffers, schedule, count), (server_round, client)
            observations.append(observation_of(self.audit, where, (params, buffers), made))
        if is_sum and 0 < len(observations) < len(results):
            self.audit.warn(
                server_round, -1,
                f"nothing was attacked: the sum is of {len(results)} clients, and only "
                f"{len(observations)} of them are to be attacked.",
            )  # fmt: skip
            return []
        return observations

    def _learn_names(
        self, server_round: int, results: Results, told: dict[int, ClientNote]
    ) -> Set[int]:
        """Learn the client ids that nodes claim, and return the ids of nodes whose claim is not
        believed.

        The notes that clients put beside their updates, ``told`` by node id, hold such claims. The
        metrics of ``results`` may hold them, too.
        """
        claims = {node: note.client_id for node, note in told.items()}
        claims |= {
            int(proxy.node_id): claim
            for proxy, fit in results
            if (claim := self._claim(fit)) is not None
        }
        for node, reason in self._names.learn(claims).items():
            message = f"the name of node {node} is not certain: {reason}"
            self.audit.warn_once(server_round, self._names.of(node), message)
        return claims.keys() - self._names.known

    def _whole(self, server_round: int, parameters: Parameters) -> tuple[Params, Params, Params]:
        """Return the parameters and buffers of the model that was sent, and the sent control
        variates (SCAFFOLD).

        Entries that were not sent have the values of the audit's model. The control variates are
        empty if none were sent.
        """
        params, buffers, variates = self._read(server_round, parameters)
        gradient_map = self.audit.gradient_map
        return {**gradient_map.params, **params}, {**gradient_map.buffers, **buffers}, variates

    def _read(self, server_round: int, parameters: Parameters) -> tuple[Params, Params, Params]:
        """Return the parameters, the buffers and the control variates (SCAFFOLD) that unnamed
        arrays hold.

        The arrays follow the order of the model's ``state_dict``. They may be only a part of the
        model, and other arrays may follow. An event, recorded once per run, says how they were
        matched. The control variates are empty if none were sent.
        """
        arrays = parameters_to_ndarrays(parameters)
        named = {str(place): Array(value) for place, value in enumerate(arrays)}
        shapes = {name: tuple(array.shape) for name, array in named.items()}
        part = Part.of(shapes, self.audit.gradient_map)
        if said := part.sentence():
            self.audit.inform_once(server_round, -1, f"{said}.")
        params, buffers, _ = part.read(named, self.audit.gradient_map)
        return params, buffers, part.variates(named, self.audit.gradient_map)

    def _claim(self, fit: FitRes) -> int | None:
        claim = fit.metrics.get("partition-id")
        if isinstance(claim, int) and not isinstance(claim, bool) and 0 <= claim < 2**63:
            return claim
        return None


def _distinct(several: Iterable[Parameters]) -> list[Parameters]:
    """Return the models in ``several``, each once, in the order in which they first occur."""
    found: list[Parameters] = []
    for parameters in several:
        if parameters not in found:
            found.append(parameters)
    return found


def observe_legacy(
    strategy: Strategy,
    model: nn.Module | GradientMap,
    folder: str | Path,
    spec: InputSpec | None = None,
    schedule: LocalSchedule | None = None,
    *,
    attack: Attack | str | None = DEFAULT_ATTACK,
    threat: ThreatModel | None = None,
    **settings: Any,
) -> "ObservedLegacy":
    """Return a strategy that trains like the given one of ``flwr.server``, and audits each round.

    The records are closed and ``report.html`` is written when the strategy is garbage-collected,
    which is at the end of the server's function. ``with observe_legacy(…) as strategy:`` does both
    at the end of the block, and the method ``close`` does both at once.

    Args:
        strategy: a strategy of any class of ``flwr.server``.
        model: the model that is trained, with the mean cross-entropy as its loss; or its gradient
            map.
        folder: the folder for the records and the report of the run.
        spec: shapes, classes and normalisation of the inputs; by default as the clients' notes tell
            them.
        schedule: the schedule of local training; by default as each client's note tells it.
        attack: an attack, the name of a preset, or ``None`` for none. The default tries every
            attack that applies, within a budget of CPU seconds for each target (a client's update,
            or the mean of all).
        threat: the attacker's knowledge. By default the attacker knows only the clients' mean
            update, as under secure aggregation.
        settings: ``max_samples``, ``max_seconds``, ``max_round_seconds``, ``max_bytes`` and
            ``truth``, as of :func:`~flwr_leakage.flower.observe`, and further settings of
            :class:`ServerAudit`.

    Raises:
        TypeError: the model is neither a module of torch nor a gradient map, or there is no such
            setting.
        FileExistsError: the folder already holds a run.
    """
    threat = threat or ThreatModel(view="aggregate")
    audit = told_audit(model, folder, spec, schedule, attack=attack, threat=threat, **settings)
    observed = ObservedLegacy(strategy, audit)
    observed.finish = weakref.finalize(observed, _finish, audit, observed.heard, Path(folder))
    return observed


class ObservedLegacy(LegacyHonestButCurious):
    """A wrapped strategy that ends its records and writes the report when it is garbage-collected.

    Strategies of ``flwr.server`` have no ``start`` that could be watched: a workflow, or Flower
    itself, calls their methods.
    """

    finish: "weakref.finalize[..., Any]"

    def __init__(self, strategy: Strategy, audit: ServerAudit) -> None:
        super().__init__(strategy, audit)
        # For these rounds the server's own evaluation was already recorded.
        self._evaluated: set[int] = set()

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        """Return the wrapped strategy's aggregate of evaluations, and record their accuracy."""
        told = super().aggregate_evaluate(server_round, results, failures)
        if server_round not in self._evaluated:
            source = "the clients’ evaluation"
            guarded(self.audit, server_round, self._tell, server_round, told, source)
        return told

    def evaluate(self, server_round: int, parameters: Parameters) -> Any:
        """Return the wrapped strategy's evaluation on the server, and record its accuracy."""
        told = super().evaluate(server_round, parameters)
        if told is not None:
            self._evaluated.add(server_round)
        guarded(self.audit, server_round, self._tell, server_round, told, "the server’s evaluation")
        return told

    def _tell(self, server_round: int, told: Any, source: str) -> None:
        """Record the accuracy among the metrics of an evaluation, if there was one.

        ``told`` is the evaluation's (loss, metrics), or ``None`` without an evaluation. ``source``
        is the side that evaluated, in words.
        """
        if told is not None:
            _, metrics = told
            tell_accuracy(self.audit, server_round, metrics, source)

    def close(self) -> None:
        """End the records and write the report now; a second call does nothing."""
        self.finish()

    def __enter__(self) -> "ObservedLegacy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self.finish.alive:
            message = f"{ENDED_EARLY}: {type(error).__name__}: {error}"
            guarded(self.audit, 0, self.audit.error, 0, message)
        self.close()


def _finish(audit: ServerAudit, heard: Heard, folder: Path) -> None:
    # Drawing the report's page may draw from the process-wide random generators. Their states are
    # restored, so that the app's own draws do not change.
    with random_states_kept():
        guarded(audit, 0, heard.stop)
        guarded(audit, 0, audit.tracker.close)
        guarded(audit, 0, tell_end, folder)
