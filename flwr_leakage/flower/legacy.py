"""The observer for strategies of ``flwr.server``, with and without secure aggregation.

SecAgg+ exists in Flower 1.41 for these strategies only. Its workflow unmasks the clients' sum, and
shows the strategy that sum in the place of each client's model.
"""

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord
from flwr.common import FitIns, FitRes, Parameters, parameters_to_ndarrays
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from torch import nn

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit import ServerAudit
from flwr_leakage.flower.arrays import read_arrays
from flwr_leakage.flower.guarded import guarded
from flwr_leakage.flower.names import ClientNames
from flwr_leakage.flower.shared_truth import TruthFolder
from flwr_leakage.flower.undisturbed import random_states_kept
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.params import Params, subtract
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, ThreatModel, Update
from flwr_leakage.report import write_report
from flwr_leakage.tracking import JsonlTracker

Results = list[tuple[ClientProxy, FitRes]]
Failures = list[tuple[ClientProxy, FitRes] | BaseException]


class LegacyHonestButCurious(Strategy):
    """Wrap a strategy of ``flwr.server``; observe what it is shown, and delegate everything.

    Where all clients show the same model, as under secure aggregation, the mean update is all that
    there is, and the audit's threat model must say so (``view="aggregate"``).

    Args:
        strategy: the strategy that trains.
        audit: what is done with the observations.
        client_id_key: the fit metric in which clients tell their partition id; those that do not,
            and those whose claim is disputed (:class:`ClientNames`), are known by their node id.
            It decides under which name numbers are recorded, and against whose samples they are
            measured.
    """

    def __init__(
        self, strategy: Strategy, audit: ServerAudit, client_id_key: str = "partition-id"
    ) -> None:
        self.strategy = strategy
        self.audit = audit
        self.client_id_key = client_id_key
        self._names = ClientNames()
        self._sent: dict[str, Parameters] = {}

    def __getattr__(self, name: str) -> Any:
        """What is not here is the wrapped strategy's."""
        if name == "strategy":  # before __init__, as copying does
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Delegate, and remember what was sent."""
        guarded(self.audit, server_round, self.audit.begin_round, server_round)
        chosen: list[tuple[ClientProxy, FitIns]] = self.strategy.configure_fit(
            server_round, parameters, client_manager
        )
        # A strategy may send something else than it is given, and to each client another thing.
        self._sent = {proxy.cid: instruction.parameters for proxy, instruction in chosen}
        return chosen

    def aggregate_fit(self, server_round: int, results: Results, failures: Failures) -> Any:
        """Look at what the strategy is shown, delegate, then let the audit attack it."""
        looked = guarded(self.audit, server_round, self._look, server_round, results, failures)
        seen, unknown = looked or ([], frozenset())
        aggregated = self.strategy.aggregate_fit(server_round, results, failures)
        guarded(
            self.audit, server_round, self.audit.inspect, server_round, seen, [],
            unknown, len(results),
        )  # fmt: skip
        return aggregated

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters | None:
        """Delegate."""
        return self.strategy.initialize_parameters(client_manager)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> Any:
        """Delegate."""
        return self.strategy.configure_evaluate(server_round, parameters, client_manager)

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        """Delegate."""
        return self.strategy.aggregate_evaluate(server_round, results, failures)

    def evaluate(self, server_round: int, parameters: Parameters) -> Any:
        """Delegate."""
        return self.strategy.evaluate(server_round, parameters)

    def _look(
        self, server_round: int, results: Results, failures: Failures
    ) -> tuple[list[Observation], Set[int]]:
        """What can be attacked, and which clients' samples nobody can know."""
        for failure in failures:
            what = failure if isinstance(failure, BaseException) else failure[1].status.message
            self.audit.warn(server_round, -1, f"a client failed: {what}")
        unknown = self._learn_names(server_round, results)
        is_sum = len(results) > 1 and len({id(fit.parameters) for _, fit in results}) == 1
        if is_sum and self.audit.threat.view != "aggregate":
            self.audit.warn_once(
                server_round, -1,
                f"nothing was attacked: the server is shown the sum of {len(results)} clients only "
                f"(secure aggregation), so that threat.view must be 'aggregate', got "
                f"{self.audit.threat.view!r}.",
            )  # fmt: skip
            return [], unknown
        models = _distinct(self._sent[proxy.cid] for proxy, _ in results if proxy.cid in self._sent)
        if len(models) > 1 and self.audit.threat.view == "aggregate":
            self.audit.warn(
                server_round, -1,
                f"nothing was attacked: a mean update is of one model, and the clients were sent "
                f"{len(models)} different ones.",
            )  # fmt: skip
            return [], unknown
        sent = [(model, self._read(model)) for model in models]
        shared = self._read(results[0][1].parameters) if is_sum else None
        observations = []
        for proxy, fit in results:
            client, count = self._names.of(int(proxy.node_id)), fit.num_examples
            try:
                if proxy.cid not in self._sent:
                    raise ValueError("it answers, and was sent nothing")
                mine = self._sent[proxy.cid]
                params, buffers = next(arrays for model, arrays in sent if model == mine)
                local_params, local_buffers = shared or self._read(fit.parameters)
                schedule = self.audit.schedule.for_client(count)
            except ValueError as error:
                self.audit.warn(server_round, client, f"client {client} was not observed: {error}")
                continue
            if not self.audit.wants(server_round, client):
                self.audit.spare(server_round, client, count)
                continue
            update = Update(subtract(local_params, params), local_buffers, schedule, count)
            observations.append(Observation(server_round, client, params, buffers, update))
        return observations, unknown

    def _learn_names(self, server_round: int, results: Results) -> Set[int]:
        """Take the round's claims; the clients whose claim is not believed."""
        claims = {
            int(proxy.node_id): claim
            for proxy, fit in results
            if (claim := self._claim(fit)) is not None
        }
        for node, reason in self._names.learn(claims).items():
            message = f"the name of node {node} is not certain: {reason}"
            self.audit.warn(server_round, self._names.of(node), message)
        return claims.keys() - self._names.known

    def _read(self, parameters: Parameters) -> tuple[Params, Params]:
        """Parameters and buffers of arrays in the order of the model's ``state_dict``."""
        arrays = parameters_to_ndarrays(parameters)
        names = list(self.audit.gradient_map.model.state_dict())
        if len(arrays) != len(names):
            raise ValueError(
                f"expected the {len(names)} arrays of the model's state_dict, got {len(arrays)}"
            )
        pairs = zip(names, arrays, strict=True)
        record = ArrayRecord({name: Array(value) for name, value in pairs})
        return read_arrays(record, self.audit.gradient_map)

    def _claim(self, fit: FitRes) -> int | None:
        claim = fit.metrics.get(self.client_id_key)
        if isinstance(claim, int) and not isinstance(claim, bool) and 0 <= claim < 2**63:
            return claim
        return None


def _distinct(several: Iterable[Parameters]) -> list[Parameters]:
    """Equal ones once."""
    found: list[Parameters] = []
    for parameters in several:
        if parameters not in found:
            found.append(parameters)
    return found


@contextmanager
def observe_legacy(
    strategy: Strategy,
    model: nn.Module | GradientMap,
    folder: str | Path,
    spec: InputSpec,
    schedule: LocalSchedule,
    *,
    attack: Attack | str | None = "idlg",
    threat: ThreatModel | None = None,
    truth: str | Path | None = None,
    client_id_key: str = "partition-id",
    **settings: Any,
) -> Iterator[LegacyHonestButCurious]:
    """Let a strategy of ``flwr.server`` be honest but curious until the block ends.

    Then the records are closed and ``report.html`` is written. What a client's ``audit`` tells
    beside its update does not reach such strategies: the spec and the schedule are given.

    Args:
        strategy: of any class.
        model: the model that is trained, with the mean cross-entropy; or its gradient map.
        folder: of the run, with the records and the report.
        spec: of the inputs.
        schedule: of the clients' local training.
        attack: an attack, the name of a preset, or ``None``.
        threat: what the attacker knows; by default the clients' mean update only, which is what
            secure aggregation shows.
        truth: in a simulation, the folder that the clients' ``audit`` was given.
        client_id_key: see :class:`LegacyHonestButCurious`.
        settings: of :class:`ServerAudit`.
    """
    if truth is not None:
        settings.setdefault("truth", TruthFolder(Path(truth)))
        settings.setdefault("evaluator", Evaluator())
    audit = ServerAudit(
        model if isinstance(model, GradientMap) else GradientMap(model),
        spec,
        schedule,
        JsonlTracker(folder),
        attack=load_preset(attack) if isinstance(attack, str) else attack,
        threat=threat or replace(ThreatModel(), view="aggregate"),
        **settings,
    )
    observed = LegacyHonestButCurious(strategy, audit, client_id_key)
    try:
        yield observed
    except BaseException as error:
        message = f"the run ended early: {type(error).__name__}: {error}"
        guarded(audit, 0, audit.error, 0, message)
        raise
    finally:
        with random_states_kept():  # whatever draws a page
            guarded(audit, 0, audit.tracker.close)
            guarded(audit, 0, write_report, folder)
