"""Give an attacker the facts about the true samples that a threat model grants, and no others."""

from dataclasses import dataclass, replace

from flwr_leakage.audit.targets import Target
from flwr_leakage.audit.truth import Truth, TruthSource
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, Disclosure, Observation, ThreatModel


@dataclass(frozen=True)
class Case:
    """One target of an attack, ready to be attacked and then evaluated.

    Attributes:
        observation: the input of the attack, with the facts that the threat model grants.
        truth: the samples with which the answer is compared; ``None`` outside of simulations.
    """

    observation: Observation
    truth: Truth | None


def check_grantable(threat: ThreatModel, source: TruthSource | None) -> None:
    """Refuse a threat model that grants a fact about the true samples where nobody knows them.

    Raises:
        ValueError: the labels, the mixing (MixUp, InstaHide) or the exact BatchNorm statistics are
            granted, and ``source``, the source of the true samples, is ``None``.
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
    """Return a target with its true samples, and with the facts about them that ``threat`` grants.

    ``source`` is the source of the true samples, ``None`` outside of simulations.

    Raises:
        ValueError: the source does not have the target's samples, as where a client lies about
            their number.
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
    """Return the labels and the BatchNorm statistics that the threat model grants.

    Both are of the samples of one round, as the defense encoded them for the training. The
    BatchNorm statistics of the finished model (``batch_norm="final"``) are taken from the
    observation, to which they were added after the training. A fact that is not granted is
    ``None``.
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
    """Return the true samples that a target's local steps used; ``None`` without a source.

    Samples that no step used are left out, as they leave no trace in the update.
    """
    if source is None:
        return None
    server_round = target.observation.server_round
    return target.join([source(server_round, client, count) for client, count in target.members])


def _statistics(gradient_map: GradientMap, seen: Observation, batch: Batch) -> Params:
    """Return the BatchNorm statistics by which the first local step of an update normalised its
    samples.

    ``batch`` holds the client's samples in the order of training.
    """
    first = seen.update.schedule.slices(len(batch))[0]
    return gradient_map.statistics(seen.params, batch.inputs[first], seen.buffers)
