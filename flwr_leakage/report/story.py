"""Describe an audited run: its clients and model, the attacker's knowledge, the configuration."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr_leakage.report.attempts import (
    Fates,
    does,
)
from flwr_leakage.report.grades import EXACT_DB
from flwr_leakage.report.index import (
    CEILING_DB,
    Index,
    by_round,
    count,
    decibel,
    grouped,
    median,
    percent,
    section,
    several,
    span,
    values,
)

MAX_CLIENTS = 8


def sentences(
    index: Index, metadata: Mapping[str, Any], fate: Fates, rounds_done: int
) -> list[str]:
    """Return plain sentences that describe the run; unknown facts are left out. ``rounds_done`` is
    the number of the last round with a record.
    """
    if "threat" not in metadata:  # the notes on results hold it in apps, which have no settings
        notes = (record.note for record in index.series("attack", "objective").values())
        noted = next((note for note in notes if note.startswith("labels ")), "")
        metadata = {**metadata, "threat": noted.partition(";")[0]}
    told = (
        _training(index, metadata, rounds_done),
        _locally(index),
        _attacker(index, metadata, fate),
        _given(metadata, "test images" in blind_guess(index))
        if fate.answered or fate.unanswered
        else "",
    )
    return [sentence for sentence in told if sentence]


def blind_guess(index: Index) -> str:
    """Return sentences on the blind guess (what a server guesses of a sample without its update)
    and its median PSNR; empty if not recorded.
    """
    series = index.series("metric", "blind_psnr")
    reached = median(values(series))
    if reached is None:
        return ""
    meaning = next((record.note for record in series.values() if record.note), "")
    here = f": here {meaning}" if meaning else ""
    return (
        f"The blind guess is what the server could guess of {index.sample.a} without any "
        f"update{here}. It reaches {decibel(reached)} dB (median). Judged by PSNR alone, what is "
        f"no nearer to its original than that shows nothing of it."
    )


def psnr_told(index: Index) -> str:
    """Return sentences that explain PSNR in decibels; empty if no PSNR was recorded."""
    known = values(index.series("metric", "psnr"))
    if not known:
        return ""
    ceiling = f" The ceiling is {CEILING_DB:g} dB." if max(known) >= CEILING_DB else ""
    return (
        f"PSNR tells in decibels (dB) how near a reconstruction is to its original: 10 dB more is "
        f"a tenth of the squared error, and from {EXACT_DB:.1f} dB on it is graded “exact”."
        f"{ceiling}"
    )


def _part(metadata: Mapping[str, Any], group: str) -> str:
    """Return the name of a run's choice in a config group, such as its model; empty if unknown."""
    given = metadata.get(group)
    if isinstance(given, str) and given:
        return given
    return describe(section(metadata, "config").get(group))[0]


_PLAIN = {
    "embedded_mnist": "handwritten digits (MNIST)",
    "mnist": "handwritten digits (MNIST)",
    "mnist_npz": "handwritten digits (MNIST)",
    "fashion_mnist": "pictures of clothes (Fashion-MNIST)",
    "fashion_mnist_npz": "pictures of clothes (Fashion-MNIST)",
    "cifar10": "small photographs (CIFAR-10)",
    "cifar10_npz": "small photographs (CIFAR-10)",
    "lenet": "a small convolutional network (LeNet)",
    "lenet_tanh": "a small convolutional network (LeNet)",
    "lenet_zhu": "a small convolutional network (LeNet)",
    "fedavg": "federated averaging",
}
"""Plain words for data sets, networks and strategies, by their names in a config. The report's
appendix shows the names themselves.
"""


def _training(index: Index, metadata: Mapping[str, Any], rounds_done: int) -> str:
    sizes = [int(size) for size in values(index.series("client", "images")) if size]
    clients = {key[1] for key in index.series("client", "images")}
    model, data = _part(metadata, "model"), _part(metadata, "dataset")
    strategy, defense = _part(metadata, "strategy"), _part(metadata, "defense")
    who = count(len(clients), "client") if clients else "Clients"
    held = f" with {span(sizes, index.sample)}" if sizes else ""
    parts = [f"{who}{held}" + " each" * (len(clients) > 1 and len(set(sizes)) == 1)]
    model, data, strategy = (_PLAIN.get(name, name) for name in (model, data, strategy))
    parts.append(f"trained {model or 'a model'}" + f" on {data}" * bool(data))
    parts.append(f"for {count(rounds_done, 'round')}" + f" ({strategy})" * bool(strategy))
    accuracy = by_round(index.series("utility", "test_accuracy"))
    learnt = ""
    if len(accuracy) > 1:
        first, last = (median(accuracy[r]) or 0.0 for r in (min(accuracy), max(accuracy)))
        ends = percent(first, 1), percent(last, 1)
        word = "rose" if last > first else "fell"
        learnt = f"; test accuracy {word} from {ends[0]} to {ends[1]}"
        if ends[0] == ends[1]:
            learnt = f"; test accuracy stayed at {ends[0]}"
    told = defense_told(metadata) or defense
    if isinstance(metadata.get("seed"), int):  # only a simulation has a seed
        told += ". What it draws comes from the run's seed, which no attacker may know"
    guard = {"": "", "none": " No defense was used."}.get(defense, f" Defense: {told}.")
    return f"{' '.join(parts)}{learnt}.{guard}"


def _locally(index: Index) -> str:
    doing = does(index)
    if not any(doing.values()):
        return ""
    clients_by_deed = grouped((deed, client) for client, deed in doing.items() if deed)
    shown = list(clients_by_deed.items())[:MAX_CLIENTS]
    told = [f"{several(clients)}: {deed}" for deed, clients in shown]
    more = len(clients_by_deed) - len(shown)
    rest = f"; and {more} others (see Clients and classes)" if more else ""
    return f"What a client does in a round: {'; '.join(told)}{rest}."


def _attacker(index: Index, metadata: Mapping[str, Any], fate: Fates) -> str:
    attack = _part(metadata, "attack")
    attacked = fate.attacked
    if attack == "none" or (
        not attacked and fate.spared and all("no attack" in why for why in fate.spared.values())
    ):
        return "No attack was configured: nothing here says what an attacker could recover."
    if not attacked:
        return ""
    rounds = sorted({server_round for server_round, _ in attacked})
    clients = sorted({client for _, client in attacked if client >= 0})
    whom = several(clients) if clients else "the aggregate"
    named = f" with the attack “{attack}”" if attack else ""
    if attack == "strongest":
        so_far = ", as far as its time went," * bool(index.series("attack", "stopped_by_budget"))
        named = (
            f" with every attack that applies{so_far or ','} until one had solved it, and kept the "
            f"result that explains the update best"
        )
    return (
        f"The server kept to the protocol and attacked what it received (“honest but curious”)"
        f"{named}: the updates of {whom} in {several(rounds, 'round')}."
    )


def _given(metadata: Mapping[str, Any], with_test_images: bool) -> str:
    given, withheld = given_to_attacker(metadata), withheld_from_attacker(metadata)
    told = []
    if given:
        told.append(f"Besides the updates and the model it was given: {'; '.join(given)}.")
    if withheld:
        told.append(f"It was not given: {'; '.join(withheld)}.")
    threat = str(metadata.get("threat", ""))
    if "single view" in threat and "jointly" not in threat:
        told.append("It did not combine rounds: each update was attacked by itself.")
    if with_test_images and told:
        told.append(
            "The test images that the blind guess is made of are for the measures of this report: "
            "the attack does not use them."
        )
    return " ".join(told)


_WITHHELD = ("labels inferred", "batch norm none")


GROUPS = ("dataset", "partition", "model", "strategy", "defense", "attack")


_GIVEN = {
    "labels known": "the true labels",
    "labels inferred": "the labels (the attack infers them from the update)",
    "batch norm exact": "the exact statistics of batch normalisation of the private batch",
    "batch norm derived": "statistics of batch normalisation, derived from the client’s buffers",
    "batch norm running": "the running statistics of batch normalisation that it sent itself",
    "batch norm none": "statistics of batch normalisation",
    "local schedule known": "the number of samples, and the learning rate, number of steps and "
    "batch size of local training",
    "single view": "each client's update on its own",
    "aggregate view": "only the aggregate of the clients' updates",
}


BY_FIAT = {phrase: _GIVEN[phrase] for phrase in ("labels known", "batch norm exact")}
"""The knowledge that an attacker is given although no server receives it, by the phrase of the
threat model that grants it.
"""


class Fact(NamedTuple):
    """One line on a choice of the run, such as the attack: the choice, its name and its
    settings.
    """

    term: str
    value: str
    settings: str = ""


def facts(metadata: Mapping[str, Any]) -> list[Fact]:
    """Return a line on each known choice of the run.

    The choices are dataset, partition, model, strategy, defense, attack and seed.
    """
    found = []
    for group in GROUPS:
        name = _part(metadata, group)
        node = section(metadata, "config").get(group)
        if isinstance(node, Mapping):  # the page's head tells the time limit that holds
            node = {key: value for key, value in node.items() if key != "max_seconds"}
        _, settings = describe(node)
        if group == "defense" and metadata.get("own_config_clients"):
            # The recorded settings are those of the run's config, which these clients did not
            # follow, so none are shown.
            settings = ""
        if name:
            found.append(Fact(group, name, settings))
    if isinstance(metadata.get("seed"), int):
        found.append(Fact("seed", str(metadata["seed"])))
    return found


def describe(node: Any) -> tuple[str, str]:
    """Return the class name and the plain settings of an object's config, each as text; empty if
    unknown.

    Example:
        >>> describe({"_target_": "a.b.GradientPruning", "prune_ratio": 0.9})
        ('GradientPruning', 'prune ratio 0.9')
    """
    if isinstance(node, str):
        return node, ""
    if not isinstance(node, Mapping):
        return "", ""
    name = str(node.get("name") or _target(node))
    settings = [
        _setting(str(key).replace("_", " ").strip(), value)
        for key, value in node.items()
        if key not in ("_target_", "name")
        and not str(key).startswith("_")
        and (isinstance(value, bool | int | float | str) or _target(value))
    ]
    return name, ", ".join(settings[:8])


def _setting(words: str, value: Any) -> str:
    if isinstance(value, bool):
        return words if value else f"not {words}"
    return f"{words} {_target(value) or value}"


def _target(node: Any) -> str:
    """Return the class or function that a config names as ``_target_``, without its module; empty
    if it names none.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    return target.rpartition(".")[2] if isinstance(target, str) else ""


def given_to_attacker(metadata: Mapping[str, Any]) -> list[str]:
    """Return in words the knowledge that the threat model gives the attacker; empty if unknown.

    Example:
        >>> given_to_attacker({"threat": "labels known, batch norm none, single view"})
        ['the true labels', 'each client’s update on its own']
    """
    return [_words(phrase) for phrase in _threat(metadata) if phrase not in _WITHHELD]


def withheld_from_attacker(metadata: Mapping[str, Any]) -> list[str]:
    """Return in words the knowledge that the threat model does not give the attacker.

    Example:
        >>> withheld_from_attacker({"threat": "labels known, batch norm none, single view"})
        ['statistics of batch normalisation']
    """
    return [_words(phrase) for phrase in _threat(metadata) if phrase in _WITHHELD]


def _threat(metadata: Mapping[str, Any]) -> list[str]:
    threat = metadata.get("threat")
    told = threat.split(",") if isinstance(threat, str) else []
    return [phrase.strip() for phrase in told if phrase.strip()]


def _words(phrase: str) -> str:
    return _GIVEN.get(phrase, phrase).replace("'", "’")


def planned_rounds(metadata: Mapping[str, Any]) -> int | None:
    """Return the planned number of rounds; ``None`` if the run's settings do not tell it."""
    config = section(metadata, "config")
    for place in (metadata, config, *config.values()):
        if isinstance(place, Mapping):
            planned = place.get("num_rounds")
            if isinstance(planned, int) and not isinstance(planned, bool):
                return planned
    return None


def flatten(node: Any, path: str = "") -> list[tuple[str, str]]:
    """Return a nested configuration as (path, value) pairs of text, with paths as in Hydra's
    overrides.

    Example:
        >>> flatten({"attack": {"steps": 3, "parts": ["a", None]}})
        [('attack.steps', '3'), ('attack.parts.0', 'a'), ('attack.parts.1', 'null')]
    """
    entries: list[tuple[Any, Any]] = []
    if isinstance(node, Mapping):
        entries = list(node.items())
    elif isinstance(node, list):
        entries = list(enumerate(node))
    if not entries:
        return [(path, _scalar(node))]
    lines = []
    for key, value in entries:
        lines += flatten(value, f"{path}.{key}" if path else str(key))
    return lines


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return str(value)


def defense_of(metadata: Mapping[str, Any]) -> str:
    """Return the name of the defense that the run trained under; empty if none or unknown."""
    named = _part(metadata, "defense")
    return "" if named in ("none", "Defense") else named


def defense_told(metadata: Mapping[str, Any]) -> str:
    """Return words for the defense that the run trained under, with its settings where known."""
    own = defense_of(metadata)
    settings = next((fact.settings for fact in facts(metadata) if fact.term == "defense"), "")
    return f"{own} ({settings})" if own and settings else own


def is_defended(metadata: Mapping[str, Any]) -> bool:
    """Return whether a client may have changed its update by a defense before it sent it."""
    return bool(defense_of(metadata) or metadata.get("own_config_clients"))
