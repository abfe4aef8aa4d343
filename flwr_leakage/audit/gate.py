"""Judge a client's updates by its owner's limits, and withhold or defend those that exceed one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from flwr_leakage.defenses.base import Defense
from flwr_leakage.records import Measurement
from flwr_leakage.values import require_option

if TYPE_CHECKING:
    from flwr_leakage.audit.self_attack import SelfAttacked
else:  # a gate of scores works without the packages that attacks need
    SelfAttacked = Any

GradeLimit = Literal["nothing", "partly", "recognisable"]
"""The grades of a reconstruction that a gate can name as the most leaking one that it allows; see
``flwr_leakage.report.grades``.
"""

_WORSE = {
    "nothing": ("partly", "recognisable", "exact"),
    "partly": ("recognisable", "exact"),
    "recognisable": ("exact",),
}


@dataclass(frozen=True)
class Judgement:
    """The decision of a gate, a client's limits, on one defended update.

    Attributes:
        passes: whether the update may be sent.
        reasons: the limits that the update exceeds, and the quantities that could not be measured,
            in words for the owner only.
    """

    passes: bool
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gate:
    """Limits on a client's updates, which its owner sets. The server has no say in them.

    An update passes if no sample exceeds a limit. Otherwise each defense of ``stronger`` is applied
    to the undefended update in turn, and the result is measured again; the first update that passes
    is sent. If none passes, the client answers with an error that names no reason.

    A value is compared with its error on the risky side: ``value + error ≤ limit`` must hold where
    a larger value leaks more, ``value − error ≥ limit`` where a larger value is safer. A quantity
    counts as not measured if a score has no number, an attack has no answer or was ended by its
    time budget, samples were not kept, or the scored model does not explain the update. A missing
    measurement is no evidence of safety.

    A gate protects against a server that is honest but curious, and not against one that chooses
    weights, as everything is measured under the weights that the server sent. Such a server passed
    a limit of the gradient's norm in 60 of 60 rounds (30 of an MLP and 30 of a ConvNet), and
    reconstructed 188 of the 240 images of digits in them at 30 dB or more
    (``simulations/benchmarks/gate_crafted.py``).

    A server learns from a refusal that limits were exceeded, and it can tell from an update that a
    stronger defense was used. The choice between defenses depends on the samples, so that the ε
    (differential privacy) of a single defense does not hold for the whole.

    Attributes:
        scores: the limit of each score, by the name of a measurement of ``ClientAudit.scores``.
        psnr: the largest PSNR in dB that the client's attack on its own update may reach for any
            sample; ``None`` for no limit.
        grade: the most leaking grade that a sample may have in that attack. The grades are, in this
            order, ``nothing``, ``partly``, ``recognisable``, ``exact``; ``None`` for no limit.
        stronger: defenses of updates that are tried in this order; each replaces the client's own.
        unmeasured: ``refuse`` counts a quantity that was not measured as beyond its limit; ``send``
            lets the update pass.
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    psnr: float | None = None
    grade: GradeLimit | None = None
    stronger: Sequence[Defense] = ()
    unmeasured: Literal["refuse", "send"] = "refuse"

    def __post_init__(self) -> None:
        if not self.scores and self.psnr is None and self.grade is None:
            raise ValueError("a gate needs a limit: scores, psnr or grade, got none.")
        limits = {**self.scores, **({} if self.psnr is None else {"psnr": self.psnr})}
        for name, limit in limits.items():
            if not math.isfinite(limit):
                raise ValueError(f"the limit of {name} must be finite, got {limit}.")
        if self.grade is not None:
            require_option(self, "grade", GradeLimit)
        if self.unmeasured not in ("refuse", "send"):
            raise ValueError(f"unmeasured must be refuse or send, got {self.unmeasured!r}.")
        object.__setattr__(self, "stronger", tuple(self.stronger))
        for defense in self.stronger:
            if defense.encodes_batches:
                raise ValueError(
                    f"stronger must change updates, as training is over by then, got "
                    f"{type(defense).__name__}, which changes samples."
                )

    @property
    def needs_attack(self) -> bool:
        """Return whether the gate limits the result of the client's attack on its own update."""
        return self.psnr is not None or self.grade is not None

    def judge(
        self,
        scores: Sequence[Measurement],
        attacked: SelfAttacked | None,
        doubts: Sequence[str] = (),
    ) -> Judgement:
        """Return whether a defended update passes the limits, and the reasons if it does not.

        ``scores`` are measured on the update. ``attacked`` is the result of the client's attack on
        it, ``None`` if the round was not attacked. ``doubts`` are sentences on why scores and
        attack may not describe the update that is sent.
        """
        exceeded: list[str] = []
        unknown = list(doubts)
        found = {measurement.name: measurement for measurement in scores}
        for name, limit in self.scores.items():
            if name not in found or all(value is None for value in found[name].values):
                unknown.append(f"{name} was not measured")
            else:
                _hold(found[name], limit, exceeded, unknown)
        if self.needs_attack:
            problem = "the round was not attacked" if attacked is None else attacked.problem
            if problem:
                unknown.append(f"the self-attack does not tell: {problem}")
            if attacked is not None:
                self._hold_attack(attacked, exceeded)
        refuses = bool(exceeded) or (bool(unknown) and self.unmeasured == "refuse")
        return Judgement(not refuses, (*exceeded, *unknown))

    def _hold_attack(self, attacked: SelfAttacked, exceeded: list[str]) -> None:
        best = max(attacked.psnr, default=-math.inf)
        if self.psnr is not None and best > self.psnr:
            exceeded.append(f"the self-attack reached {best:.1f} dB, above {self.psnr:g}")
        if self.grade is not None:
            worse = [grade for grade in attacked.grades if grade in _WORSE[self.grade]]
            if worse:
                exceeded.append(
                    f"{len(worse)} of {len(attacked.grades)} images of the self-attack are "
                    f"{' or '.join(sorted(set(worse)))}, worse than {self.grade}"
                )


def _hold(found: Measurement, limit: float, exceeded: list[str], unknown: list[str]) -> None:
    """Compare the riskiest sample of a score with the score's limit.

    A sentence is added to ``exceeded`` if the limit is exceeded, and to ``unknown`` if samples have
    no value or the score does not say if larger values are safer.
    """
    errors = found.errors or (None,) * len(found.values)
    pairs = [(v, e or 0.0) for v, e in zip(found.values, errors, strict=True) if v is not None]
    missing = len(found.values) - len(pairs)
    if missing:
        unknown.append(f"{found.name} was not measured of {missing} of {len(found.values)} samples")
    if found.direction == "":
        unknown.append(f"{found.name} has no direction, so that no limit of it can be held")
    elif found.direction == "larger is safer":
        worst = min(value - error for value, error in pairs)
        if worst < limit:
            exceeded.append(f"{found.name} may be {worst:.4g}, below {limit:g}")
    else:
        worst = max(value + error for value, error in pairs)
        if worst > limit:
            exceeded.append(f"{found.name} may be {worst:.4g}, above {limit:g}")
