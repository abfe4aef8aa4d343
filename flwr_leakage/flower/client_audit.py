"""Set how a client scores, defends, attacks and withholds its own update.

The client's owner chooses these settings; a server cannot change them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from flwr_leakage._lazy import missing
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.sharing import Shared, Sharing
from flwr_leakage.defenses.base import Defense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec
from flwr_leakage.schedules import Schedule
from flwr_leakage.scores.base import Score
from flwr_leakage.scores.plan import ScorePlan
from flwr_leakage.scores.quantities import quantities
from flwr_leakage.values import require

if TYPE_CHECKING:
    from flwr_leakage.attacks.base import Attack
    from flwr_leakage.audit.self_attack import SelfAttack

    SelfAttacker = SelfAttack | Attack | None
else:  # a client without self-attack works without the packages that attacks need
    SelfAttacker = SelfAttack = Any


@dataclass(frozen=True)
class ClientAudit:
    """A client's own choice of how it scores, defends and withholds its update before it sends it.

    Attributes:
        gradient_map: the gradient map of the client's model and loss, with BatchNorm in the mode of
            the training.
        spec: shapes, classes and normalisation of the inputs.
        schedule: the steps, batch size and learning rate of the local training.
        defense: the defense, which may change mini-batches and the update; by default it changes
            nothing.
        scores: risk scores by name; none by default.
        seed: ``None``: the defense draws from the operating system's entropy, and nobody can repeat
            its draws. A number: for simulations only; draws are a function of (seed, round,
            client), and whoever knows the seed can subtract the noise from the update. The note
            beside the update says whether there was a seed.
        score_plan: the rounds and samples to score, the cost, and the scores to keep and send.
        max_samples: the number of samples that are kept for the scores and the defense, ≥ 1. Whole
            mini-batches are kept, from the first one of the round on, until the number is reached.
            DP-SGD needs all samples that a round uses.
        remark: the client's words on its settings, sent beside each update; empty by default.
        own_config: whether the client's samples and draws come from its own configuration, so that
            a simulation's server cannot derive them from the run's seed; the server is told.
        check_update: when the update is compared with a replay of the local training by the scored
            model. A replay costs as much as the training. ``once``: in the first round that is
            scored; later rounds report the result of that round. ``always``: in every round, scored
            or not. ``never``: in no round. If the replay does not explain the update, every score
            says so.
        check_rounds: a function of a round's number that returns true for rounds in which the
            update is compared with a replay in any case; ``None`` if there is no such round.
        num_threads: the number of torch threads while training, scoring and defending; ``None``
            keeps torch's setting.
        attack: the client's attack on its own defended update, or ``None``. It is a ``SelfAttack``,
            or an attack, which is run with the default settings of ``SelfAttack``. It needs the
            package's extra ``server``.
        share: the facts that travel beside the update: ``nothing`` but fixed categories,
            ``everything``, or any of ``numbers`` (all metrics of the self-attack), names of single
            metrics, ``replay``, ``training``, ``times`` and ``reasons``. ``Sharing`` tells what the
            server learns by each of them.
        gate: the limits beyond which an update is not sent; ``None`` sends everything.
        folder: the folder of the record that the client's owner keeps: scores, self-attacks with
            their images, and the gate's decisions. Each run and client has a folder within it.
            ``None`` keeps the record in the client's state only, without images. The path must be
            absolute if clients are separate processes. ``flwr-leakage client`` shows the record.
    """

    gradient_map: GradientMap
    spec: InputSpec
    schedule: Schedule
    defense: Defense = field(default_factory=Defense)
    scores: Mapping[str, Score] = field(default_factory=dict)
    seed: int | None = None
    score_plan: ScorePlan = field(default_factory=ScorePlan)
    max_samples: int = 1024
    num_threads: int | None = None
    remark: str = ""
    own_config: bool = False
    check_update: Literal["once", "always", "never"] = "once"
    check_rounds: Callable[[int], bool] | None = None
    attack: SelfAttacker = None
    share: Shared = "nothing"
    gate: Gate | None = None
    folder: str | None = None
    sharing: Sharing = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require(self, "be at least 1", "max_samples")
        if self.seed is not None and self.seed < 0:
            raise ValueError("seed must be None or ≥ 0, got a negative one.")
        if self.check_update not in ("once", "always", "never"):
            raise ValueError(
                f"check_update must be 'once', 'always' or 'never', got {self.check_update!r}."
            )
        if self.attack is not None:
            object.__setattr__(self, "attack", as_self_attack(self.attack))
        check_own(self.gate, self.scores, self.self_attack)
        object.__setattr__(self, "sharing", Sharing.of(self.share))
        if self.gate is not None and self.check_update == "never":
            raise ValueError(
                "a gate needs to know whether the scored model explains the update: check_update "
                "must be 'once' or 'always', got 'never'."
            )

    def always_checks(self, server_round: int) -> bool:
        """Return whether a round's update is compared with a replay even if it is not scored.

        A replay repeats the round's training with the gradient map from which scores are computed.
        """
        chosen = self.check_rounds is not None and self.check_rounds(server_round)
        return chosen or self.check_update == "always"

    @property
    def defends(self) -> bool:
        """Return whether the defense changes samples or updates."""
        return self.defense.encodes_batches or self.defense.changes_updates

    @property
    def may_defend(self) -> bool:
        """Return whether the trained update may be changed before it is sent.

        It may be changed by the client's defense, or by a stronger defense that a gate tries if the
        update exceeds its limits.
        """
        return self.defends or bool(self.gate and self.gate.stronger)

    @property
    def withholds(self) -> bool:
        """Return whether an update must be withheld if it could not be measured or defended.

        It must if there is a defense or a gate, the client's own limits beyond which nothing is
        sent.
        """
        return self.defends or self.gate is not None

    @property
    def self_attack(self) -> SelfAttack | None:
        """Return the client's attack on its own update, or ``None`` if there is none."""
        return cast("SelfAttack | None", self.attack)


def as_self_attack(attack: Any) -> SelfAttack:
    """Return a ``SelfAttack`` with default settings that runs ``attack``; a ``SelfAttack`` is
    returned as it is.

    Raises:
        ImportError: a library that attacks or measures is not installed. The message names the
            extra of this package that installs it.
        ValueError: the argument is no attack.
    """
    try:
        from flwr_leakage.attacks.base import Attack
        from flwr_leakage.audit.self_attack import SelfAttack
    except ModuleNotFoundError as error:
        raise missing("a self-attack", error) from error
    if isinstance(attack, SelfAttack):
        return attack
    if not isinstance(attack, Attack):
        raise ValueError(f"attack must be a SelfAttack or an attack, got {type(attack).__name__}.")
    return SelfAttack(attack)


def check_own(
    gate: Gate | None,
    scores: Mapping[str, Score],
    attack: SelfAttack | None,
) -> None:
    """Check that the client measures every quantity that its gate limits; an update beyond a limit
    is not sent.

    ``scores`` are the client's, by name, and ``attack`` is its attack on its own update, if any.

    Raises:
        ValueError: the gate limits a score, and there are no scores; or it limits the result of an
            attack, and there is no attack in every round.
    """
    if gate is None:
        return
    if gate.scores and not scores:
        raise ValueError(f"the gate limits {', '.join(gate.scores)}, and there are no scores.")
    if gate.needs_attack and (attack is None or attack.every != 1):
        raise ValueError("a gate on psnr or grade needs a self-attack in every round.")


def check_limits(gate: Gate | None, scores: Mapping[str, Score]) -> None:
    """Check that some score measures each quantity that the client's gate limits, to find misspelt
    names.

    One sample of a small model is scored to learn the quantities, which takes about as long as
    scoring a sample in a round. In a name such as ``layer_share/conv1.weight`` the part after the
    slash is a layer of the client's model, and is not checked.

    Raises:
        ValueError: no score measures a limited quantity. The error is not raised if some score does
            not declare its quantities.
    """
    if gate is None or not gate.scores:
        return
    measured, unknown = quantities(scores)
    known = {name.partition("/")[0] if "/" in name else name for name in measured}
    missing = sorted(name for name in gate.scores if name.partition("/")[0] not in known)
    # If a score failed on the small model, there is no error, as the score may still measure the
    # quantity on the client's model.
    if missing and not unknown:
        raise ValueError(
            f"the gate's limits must be of what the scores measure ({', '.join(measured)}), got "
            f"{', '.join(map(repr, missing))}."
        )
