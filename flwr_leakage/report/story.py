"""What was tested, in sentences: who trained what, what the attacker was given."""

from collections.abc import Mapping
from typing import Any

from flwr_leakage.report.attempts import Fates, does
from flwr_leakage.report.grades import EXACT_DB
from flwr_leakage.report.header import describe, given_to_attacker, withheld_from_attacker
from flwr_leakage.report.index import CEILING_DB, Index, by_round, count, decibel, median, values
from flwr_leakage.report.words import several

MAX_CLIENTS = 8


def sentences(
    index: Index, metadata: Mapping[str, Any], fate: Fates, rounds_done: int
) -> list[str]:
    """What was run, in plain sentences; what is not known is left out."""
    told = (
        _training(index, metadata, rounds_done),
        _locally(index),
        _attacker(metadata, fate),
        _given(metadata, "test images" in blind_guess(index))
        if fate.answered or fate.unanswered
        else "",
    )
    return [sentence for sentence in told if sentence]


def blind_guess(index: Index) -> str:
    """What the blind guess is, and what it reaches; empty where none was recorded."""
    series = index.series("metric", "blind_psnr")
    reached = median(values(series))
    if reached is None:
        return ""
    meaning = next((record.note for record in series.values() if record.note), "")
    here = f": here {meaning}" if meaning else ""
    return (
        f"The blind guess is what the server could guess of an image without any update{here}. It "
        f"reaches {decibel(reached)} dB (median). Judged by PSNR alone, what is no nearer to its "
        f"original than that shows nothing of it."
    )


def psnr_told(index: Index) -> str:
    """What decibels are, for the first place that has some; empty where there are none."""
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
    config = metadata.get("config")
    name, _ = describe(config.get(group) if isinstance(config, Mapping) else None)
    given = metadata.get(group)
    return given if isinstance(given, str) and given else name


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
"""What the names of the configuration mean; the names themselves stand in the appendix."""


def _plain(name: str) -> str:
    return _PLAIN.get(name, name)


def _training(index: Index, metadata: Mapping[str, Any], rounds_done: int) -> str:
    sizes = [record.value for record in index.series("client", "images").values() if record.value]
    clients = {key[1] for key in index.series("client", "images")}
    model, data = _part(metadata, "model"), _part(metadata, "dataset")
    strategy, defense = _part(metadata, "strategy"), _part(metadata, "defense")
    who = count(len(clients), "client") if clients else "Clients"
    span = ""
    if sizes:
        low, high = int(min(sizes)), int(max(sizes))
        span = f" with {low:,} to {high:,} images" if low < high else f" with {count(low, 'image')}"
    parts = [
        f"{who}{span}"
        + (" each" if len(clients) > 1 and sizes and min(sizes) == max(sizes) else "")
    ]
    parts.append(f"trained {_plain(model) or 'a model'}" + f" on {_plain(data)}" * bool(data))
    parts.append(f"for {count(rounds_done, 'round')}" + f" ({_plain(strategy)})" * bool(strategy))
    accuracy = by_round(index.series("utility", "test_accuracy"))
    learnt = ""
    if len(accuracy) > 1:
        first, last = (median(accuracy[r]) or 0.0 for r in (min(accuracy), max(accuracy)))
        ends = f"{100 * first:.0f} %", f"{100 * last:.0f} %"
        word = "rose" if last > first else "fell"
        learnt = f"; test accuracy {word} from {ends[0]} to {ends[1]}"
        if ends[0] == ends[1]:
            learnt = f"; test accuracy stayed at {ends[0]}"
    guard = {"": "", "none": " No defense was used."}.get(defense, f" Defense: {defense}.")
    return f"{' '.join(parts)}{learnt}.{guard}"


def _locally(index: Index) -> str:
    doing = does(index)
    if not doing:
        return ""
    clients_by_deed: dict[str, list[int]] = {}
    for client, deed in doing.items():
        clients_by_deed.setdefault(deed, []).append(client)
    shown = list(clients_by_deed.items())[:MAX_CLIENTS]
    told = [f"{several(clients)}: {deed}" for deed, clients in shown]
    more = len(clients_by_deed) - len(shown)
    rest = f"; and {more} others (see Clients)" if more else ""
    return f"What a client does in a round: {'; '.join(told)}{rest}."


def _attacker(metadata: Mapping[str, Any], fate: Fates) -> str:
    attack = _part(metadata, "attack")
    attacked = {*fate.answered, *fate.unanswered}
    if attack == "none" or (not attacked and fate.spared and _only_unconfigured(fate)):
        return "No attack was configured: nothing here says what an attacker could recover."
    if not attacked:
        return ""
    rounds = sorted({server_round for server_round, _ in attacked})
    clients = sorted({client for _, client in attacked if client >= 0})
    whom = several(clients) if clients else "the aggregate"
    named = f" with the attack “{attack}”" if attack else ""
    if attack == "strongest":
        named = " with every attack that applies, and kept the best result"
    return (
        f"The server kept to the protocol and attacked what it received (“honest but curious”)"
        f"{named}: the updates of {whom} in {several(rounds, 'round')}."
    )


def _only_unconfigured(fate: Fates) -> bool:
    return all("no attack" in reason for reason in fate.spared.values())


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
