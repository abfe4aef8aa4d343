"""Grant an attacker the facts of a threat model; the rest of the truth stays hidden."""

from dataclasses import dataclass, replace

from flwr_leakage.audit.targets import Target
from flwr_leakage.audit.truth import Truth, TruthSource
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, Disclosure, Observation, ThreatModel


@dataclass(frozen=True)
class Case:
    """One target, ready to be attacked and then evaluated.

    Attributes:
        observation: all that the attack is given.
        truth: the samples with which the answer is compared, or ``None`` outside of simulations.
    """

    observation: Observation
    truth: Truth | None


def check_grantable(threat: ThreatModel, source: TruthSource | None) -> None:
    """Refuse a threat model that grants a fact which nobody knows.

    Raises:
        ValueError: labels, a mixing or exact BatchNorm statistics are granted without a truth.
    """
    granted = (threat.labels, threat.mixing) != ("inferred", "unknown")
    if (granted or threat.batch_norm == "exact") and source is None:
        raise ValueError(
            "labels='known', mixing='known' and batch_norm='exact' are granted by a simulation, "
            f"which knows the truth; got {threat.describe()} and no truth."
        )


def grant(
    target: Target, threat: ThreatModel, gradient_map: GradientMap, source: TruthSource | None
) -> Case:
    """Look up the target's truth, and disclose the facts of it that the threat model grants.

    Raises:
        ValueError: there is no such truth, as where a client lies about its number of samples.
    """
    seen, truth = target.observation, _truth(target, source)
    earlier = tuple(
        replace(e, disclosed=disclose(e, threat, gradient_map, truth)) for e in seen.earlier
    )
    disclosed = disclose(seen, threat, gradient_map, truth)
    return Case(replace(seen, disclosed=disclosed, earlier=earlier), truth)


def disclose(
    seen: Observation, threat: ThreatModel, gradient_map: GradientMap, truth: Truth | None
) -> Disclosure:
    """Return the facts that the threat model grants of one round: targets, statistics, or none.

    Targets and statistics are those of the samples as the defense encoded them for the training.
    The statistics of the finished model are no grant: they were disclosed when training had ended.
    """
    targets = statistics = None
    if truth is not None and threat.labels == "known":
        targets = truth.defended.targets
    if truth is not None and threat.batch_norm == "exact":
        statistics = _statistics(gradient_map, seen, truth.defended)
    if threat.batch_norm == "final":
        statistics = seen.disclosed.statistics
    return Disclosure(targets, statistics)


def _truth(target: Target, source: TruthSource | None) -> Truth | None:
    """Return the samples that the local steps used; the others leave no trace to attack."""
    if source is None:
        return None
    server_round = target.observation.server_round
    return target.join([source(server_round, client, count) for client, count in target.members])


def _statistics(gradient_map: GradientMap, seen: Observation, batch: Batch) -> Params:
    """Return the BatchNorm statistics that the first local step normalised with."""
    first = seen.update.schedule.slices(len(batch))[0]
    return gradient_map.statistics(seen.params, batch.inputs[first], seen.buffers)
