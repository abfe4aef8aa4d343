"""Derive the guarantee of a Flower app's differential privacy from its settings.

Flower's mods and strategies take a clip, a sensitivity, a noise multiplier and an ε as separate
numbers, and do not check that they fit together. This check reads the numbers, and says which
guarantee follows, against whom it holds, and what an attacker can still read. Apps of both
generations of Flower's API are read alike, by the names of classes and attributes that both share.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flwr_leakage.bounds import guess_bound, image_psnr
from flwr_leakage.defenses.accounting import Adjacency, dp_epsilon, gaussian_epsilon
from flwr_leakage.flower.replies import unwrapped

Level = Literal["guarantee", "condition", "weaker", "none"]

_WORDS: dict[Level, str] = {
    "guarantee": "guarantees",
    "condition": "holds only if",
    "weaker": "weaker than it says",
    "none": "no guarantee",
}
_CENTRAL = "DifferentialPrivacy"
_CLIPPING_MODS = ("fixedclipping_mod", "adaptiveclipping_mod")


@dataclass(frozen=True)
class Finding:
    """One consequence of an app's settings for its differential privacy.

    Attributes:
        level: how far the app's privacy holds: ``guarantee`` as the message states it,
            ``condition`` only if the condition in the message is met, ``weaker`` less than the app
            says, ``none`` not at all.
        about: the name of the mod or strategy.
        message: the consequence in words and numbers.
        stated_epsilon: the ε that the app's settings state for a round; ``None`` if they state
            none.
        epsilon: ε over all rounds at ``delta``; infinite if there is no guarantee.
        delta: the δ for which ``epsilon`` holds.
        noise_multiplier: the noise's standard deviation in one round, divided by the largest norm
            of a change of the result that one client can cause under ``adjacency``.
        adjacency: the change of one client that ``epsilon`` protects. With ``replace-one`` the
            client sends another update; with ``add-or-remove`` it sends none. ``None`` if there is
            no guarantee.
    """

    level: Level
    about: str
    message: str
    stated_epsilon: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    adjacency: Adjacency | None = None

    def __str__(self) -> str:
        """Return the mod or strategy and the verdict on it, such as ``LocalDpMod, weaker than it
        says: …``.
        """
        return f"{self.about}, {_WORDS[self.level]}: {self.message}"


def check_privacy(
    strategy: Any = None,
    mods: Sequence[Callable[..., Any]] = (),
    *,
    num_clients: int,
    num_rounds: int,
    delta: float = 1e-5,
    num_pixels: int = 3072,
) -> list[Finding]:
    """Return the guarantees of an app's differential privacy over its rounds.

    ε protects one client's whole contribution. It is exact for Gaussian noise
    (``defenses/accounting``), and composed over all rounds, as if the client took part in each. The
    ε of ``LocalDpMod`` compares any two updates of a client (replace-one). The ε of a strategy
    compares a client's update with none (add-or-remove); its message states replace-one as well.
    Sampling of clients does not lower ε here: the server knows whom it asked, and Flower draws a
    fixed number.

    Args:
        strategy: the server's strategy, with its wrappers; ``None`` if it is not known.
        mods: the mods of the train function, the outermost first.
        num_clients: the number of nodes in the federation, ≥ 1.
        num_rounds: the number of rounds of training, ≥ 1.
        delta: the δ for which the ε of a strategy is computed, in (0, 1); ``LocalDpMod`` has a δ of
            its own.
        num_pixels: the number of values of an input, by which findings state how well an attacker
            can still read an image.

    Returns:
        The findings, those about the mods first. Printed, each is a sentence.

    Example:
        >>> from flwr.clientapp.mod import LocalDpMod
        >>> mod = LocalDpMod(clipping_norm=1.0, sensitivity=1e-4, epsilon=10.0, delta=1e-5)
        >>> finding, *_ = check_privacy(mods=[mod], num_clients=10, num_rounds=1)
        >>> finding.level, finding.stated_epsilon, f"{finding.epsilon:.2g}"
        ('weaker', 10.0, '8.5e+08')
    """
    if num_clients < 1 or num_rounds < 1:
        raise ValueError(
            f"num_clients and num_rounds must be at least 1, got {num_clients} and {num_rounds}."
        )
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    wrappers = list(unwrapped(strategy))
    central = [s for s in wrappers if type(s).__name__.startswith(_CENTRAL)]
    found = [
        *_mods(mods, central, num_rounds, num_pixels),
        *(
            finding
            for wrapper in central
            for finding in _central(wrapper, wrappers[-1], num_clients, num_rounds, delta)
        ),
    ]
    noisy = [f for f in found if f.noise_multiplier]
    if not noisy:
        found.append(
            Finding(
                "none",
                "the app",
                "nothing that was checked adds noise: what a client sends says all it says "
                "without differential privacy.",
                epsilon=math.inf,
                delta=delta,
            )
        )
    else:
        found.append(
            Finding(
                "condition",
                "Flower's noise",
                "nobody seeds NumPy: it is drawn from numpy.random's global generator (MT19937), "
                "and np.random.seed in the training code makes it known. It is drawn in floating "
                "point without the remedies of Mironov (2012).",
            )
        )
    return found


def _name(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


def _mods(
    mods: Sequence[Any], central: list[Any], num_rounds: int, num_pixels: int
) -> Iterator[Finding]:
    names = [_name(mod) for mod in mods]
    for index, (name, mod) in enumerate(zip(names, mods, strict=True)):
        if name == "LocalDpMod":
            yield from _local(mod, num_rounds, num_pixels)
            if "LeakageMod" in names[:index]:
                yield Finding(
                    "condition",
                    "LeakageMod",
                    "its defense does not recompute the update: it stands outside of LocalDpMod, "
                    "and DP-SGD there throws LocalDpMod's noise away. Put LeakageMod innermost.",
                )
        elif name in _CLIPPING_MODS:
            yield Finding(
                "none",
                name,
                "it clips to the norm that the server's message names, and adds no noise: the "
                "server sees the update as it is, up to its length.",
                epsilon=math.inf,
            )
            kind = "ClientSideFixed" if name.startswith("fixed") else "ClientSideAdaptive"
            if central and not any(kind in type(wrapper).__name__ for wrapper in central):
                yield Finding(
                    "condition",
                    name,
                    f"the strategy is DifferentialPrivacy{kind}Clipping, got "
                    f"{', '.join(type(wrapper).__name__ for wrapper in central)}.",
                )


def _local(mod: Any, num_rounds: int, num_pixels: int) -> Iterator[Finding]:
    """Yield the finding about a ``LocalDpMod``: whether its stated ε holds over ``num_rounds``
    rounds, or that a setting is out of range.

    The mod's noise has the standard deviation sensitivity · √(2 ln(1.25/δ)) / ε, whatever its
    clipping norm is. ``num_pixels`` is the number of values of an input.
    """
    clip, stated, delta = mod.clipping_norm, mod.epsilon, mod.delta
    if not 0 < delta < 1 or stated == 0:
        yield Finding(
            "condition", "LocalDpMod", f"δ lies in (0, 1) and ε > 0; got δ = {delta}, ε = {stated}."
        )
        return
    std = mod.sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / stated
    multiplier = std / (2 * clip)
    once, total = (_epsilon(multiplier, rounds, delta) for rounds in (1, num_rounds))
    level: Level = "guarantee" if total <= stated else "weaker"
    reasons = ""
    if mod.sensitivity < 2 * clip:
        reasons = (
            f" Two updates clipped to {clip:g} lie up to {2 * clip:g} apart; the noise is made for "
            f"sensitivity = {mod.sensitivity:g}, {2 * clip / mod.sensitivity:.3g} times less."
            if mod.sensitivity
            else " The sensitivity is 0: no noise is added."
        )
    elif once > stated:
        reasons = " The formula of the noise holds for ε < 1 only (Dwork and Roth 2014)."
    yield Finding(
        level,
        "LocalDpMod",
        f"clip {clip:g} and noise {std:.3g} give ε = {once:.3g} a round and {total:.3g} over "
        f"{num_rounds} rounds at δ = {delta:g}, between any two updates (replace-one); it shows "
        f"ε = {stated:g}.{reasons} "
        f"{_left_with(std / clip, multiplier, num_rounds, num_pixels)}",
        stated_epsilon=float(stated),
        epsilon=total,
        delta=delta,
        noise_multiplier=multiplier,
        adjacency="replace-one",
    )


def _left_with(noise_to_clip: float, multiplier: float, num_rounds: int, num_pixels: int) -> str:
    """Return a text on how well an attacker who sees a client's noisy update can still read an
    image from it.

    ``noise_to_clip`` is the noise's standard deviation divided by the clipping norm; ``multiplier``
    is the same standard deviation divided by the largest distance of two clipped updates.
    ``num_pixels`` is the number of values of an input.
    """
    if multiplier == 0:
        return "An attacker sees the clipped update as it is."
    psnr = image_psnr(noise_to_clip / math.sqrt(num_rounds), num_pixels)
    chance = guess_bound(math.sqrt(num_rounds) / multiplier, 0.1)
    return (
        f"An attacker tells which of ten records was used with a chance of at most {chance:.3g}; "
        f"an image of {num_pixels} values that makes up the whole update (batch of one, linear "
        f"first layer, the same in all rounds) is read at {psnr:.0f} dB without prior knowledge."
    )


def _central(
    wrapper: Any, inner: Any, num_clients: int, num_rounds: int, delta: float
) -> Iterator[Finding]:
    """Yield the findings about a strategy that adds noise on the server.

    The noise on the average of the clients has the standard deviation noise_multiplier · clip /
    num_sampled_clients. The strategy ``wrapper`` adds the noise; ``inner``, the innermost one that
    it wraps, asks clients and averages. ε is computed for ``delta``.
    """
    about = type(wrapper).__name__
    yield Finding(
        "none",
        about,
        "against the server: it reads each client's update and adds the noise afterwards. The "
        "noise is for those who see the global model only.",
        epsilon=math.inf,
        delta=delta,
    )
    sampled, multiplier = wrapper.num_sampled_clients, wrapper.noise_multiplier
    adaptive = "Adaptive" in about
    if adaptive and multiplier > 0:
        # The wrapper's ``noise_multiplier`` is that of the noise on the average. The noisy count of
        # clipped updates, by which the clip is adapted, reveals more. Both releases together are as
        # private as one with the smaller multiplier that is computed here.
        count = wrapper.clipped_count_stddev
        multiplier = (multiplier**-2 + (2 * count) ** -2) ** -0.5 if count else 0.0
    asked = asked_clients(inner, num_clients)
    effective = multiplier * min(1.0, asked / sampled)
    total = _epsilon(effective, num_rounds, delta)
    note = f" {_sampling(effective, asked, num_clients, num_rounds, delta)}"
    if asked < sampled:
        note = (
            f" num_sampled_clients = {sampled}, but {asked} clients are asked: the noise is "
            f"{sampled / asked:.3g} times too small."
        )
    level: Level = "none" if effective == 0 else "weaker" if asked < sampled else "guarantee"
    yield Finding(
        level,
        about,
        f"against those who see the global model: ε = {total:.3g} at δ = {delta:g} over "
        f"{num_rounds} rounds for a client that takes part or not (add-or-remove; noise multiplier "
        f"{effective:.3g}), and {_epsilon(effective / 2, num_rounds, delta):.3g} for a client that "
        f"sends another update (replace-one).{note}",
        epsilon=total,
        delta=delta,
        noise_multiplier=effective,
        adjacency="add-or-remove",
    )
    yield Finding(
        "condition",
        about,
        "all clients report the same number of examples: the noise is made for equal weights, and "
        "a client of weight w moves the average by w · clip.",
    )
    if not _averages(inner):
        yield Finding(
            "condition",
            about,
            f"the strategy averages: {type(inner).__name__} does something else with the updates, "
            "and the noise is made for an average.",
        )
    if adaptive:
        yield Finding(
            "condition",
            about,
            "the clip stays where you want it: Flower counts the updates that are clipped where "
            "Andrew et al. (2021) count those that are not, so that the clip shrinks while most "
            "are clipped, and grows while few are.",
        )


def _epsilon(multiplier: float, num_rounds: int, delta: float) -> float:
    return math.inf if multiplier == 0 else gaussian_epsilon(num_rounds**0.5 / multiplier, delta)


def asked_clients(inner: Any, num_clients: int) -> int:
    """Return the number of clients that a strategy asks to train in a round, as FedAvg computes it.

    All clients are asked if the strategy lacks FedAvg's settings.
    """
    fraction = getattr(inner, "fraction_train", getattr(inner, "fraction_fit", 1.0))
    least = getattr(inner, "min_train_nodes", getattr(inner, "min_fit_clients", 1))
    return min(num_clients, max(int(fraction * num_clients), least, 1))


def _averages(inner: Any) -> bool:
    """Return whether a strategy averages the clients' arrays by FedAvg's own method."""
    for kind in type(inner).__mro__:
        for method in ("aggregate_train", "aggregate_fit"):
            if method in vars(kind):
                return kind.__name__ == "FedAvg"
    return False


def _sampling(
    multiplier: float, asked: int, num_clients: int, num_rounds: int, delta: float
) -> str:
    if asked == num_clients or multiplier == 0:
        return "Every client takes part in every round."
    text = f"That {asked} of {num_clients} clients are asked a round is not credited"
    try:
        amplified = dp_epsilon(multiplier, asked / num_clients, num_rounds, delta, "add-or-remove")
    except ImportError:
        return f"{text}: it would take Poisson sampling that nobody sees."
    return (
        f"{text}; with Poisson sampling that nobody sees ε would be {amplified:.3g} "
        "(add-or-remove, Opacus)."
    )
