"""Report how the defenses tried on copies of a run's updates change what leaks, and their price."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_leakage.report.attempts import (
    SEEN,
    Attempt,
    all_exact,
    attempts,
    ended,
    grades_told,
    grouped_by_client,
    identified,
    most_at_risk_first,
    time_limit,
    what_if_time_limit,
)
from flwr_leakage.report.commands import are_plain, is_simulation, overrides, words_of
from flwr_leakage.report.index import (
    Index,
    Step,
    Table,
    by_round,
    count,
    decibel,
    median,
    percent,
    section,
    share,
    values,
)
from flwr_leakage.report.story import defense_of, describe, flatten
from flwr_leakage.report.tried import more_time

BLAND = (
    "A defense can raise the PSNR of samples that are not recovered at all: about the blind guess "
    "(what the server could guess without the update) and below it, PSNR tells how bland a failed "
    "guess is, not how much of the original it shows."
)
"""The note below a table of defenses on why a defense may raise a reconstruction's PSNR."""


@dataclass(frozen=True)
class Remedy:
    """One defense under which copies of a run's updates were attacked, besides the updates as sent.

    Attributes:
        name: the name of the defense in the run's settings ``what_if``.
        setting: the settings of the defense in brackets; empty where they are not known.
        does: a clause on the defense's effect, told by its class; empty where it is not known.
        under: the outcomes of the attack on each sample, from the copies under the defense.
        before: the outcomes from the updates as sent, for the same samples in the same rounds.
        change: the median ‖change of an update‖ / ‖update‖ by the defense; ``None`` if unknown.
        ended: by (round, client), whether the time limit ended the attack; empty if not recorded.
    """

    name: str
    setting: str
    does: str
    under: tuple[Attempt, ...]
    before: tuple[Attempt, ...]
    change: float | None
    ended: Mapping[tuple[int, int], bool]

    @property
    def role(self) -> str:
        """Return the name by which the gallery marks reconstructions under this defense."""
        return f"under {self.name.replace('_', ' ')}"


def remedies(index: Index, metadata: Mapping[str, Any]) -> list[Remedy]:
    """Return the defenses under which copies of a run's updates were attacked."""
    nodes, words = section(metadata, "config", "what_if"), section(metadata, "defenses_in_words")
    raw = {attempt.key: attempt for attempt in attempts(index)}
    names = dict.fromkeys(name.rpartition("/")[0] for name in index.names("what_if"))
    return [_remedy(index, name, nodes.get(name), words.get(name), raw) for name in names]


def _remedy(index: Index, name: str, node: Any, words: Any, raw: Mapping[Any, Attempt]) -> Remedy:
    _, settings = describe(node)
    under = attempts(index, name)
    before = [raw[attempt.key] for attempt in under if attempt.key in raw]
    change = median(values(index.series("what_if", f"{name}/relative_change")))
    stopped = index.series("what_if", f"{name}/stopped_by_budget")
    exact = all_exact(under)
    ended = {key[:2]: bool(r.value) and key[:2] not in exact for key, r in stopped.items()}
    does = words if isinstance(words, str) else ""
    setting = f" ({settings})" if settings else ""
    return Remedy(name, setting, does, tuple(under), tuple(before), change, ended)


def told_of_time(ended: Mapping[tuple[int, int], bool]) -> str:
    """Return a sentence on how many attacks on updates under a defense the time limit ended.

    ``ended`` tells, by (round, client), whether the time limit ended the attack.
    """
    stopped = sum(ended.values())
    if not ended:
        return " Whether a time limit ended attacks under it was not recorded."
    if not stopped:
        return " No time limit ended an attack under it."
    return (
        f" The time limit ended the attack on {stopped} of {count(len(ended), 'defended update')}: "
        f"with more time more may show."
    )


def attack_told(metadata: Mapping[str, Any]) -> str:
    """Return sentences on whether attacks under a defense had less time than those without."""
    limit, less = time_limit(metadata), what_if_time_limit(metadata)
    if less is not None and (limit is None or less < limit):
        own = "no limit" if limit is None else f"{limit:g}"
        return (
            f"The attack had {less:g} CPU seconds for an update under a defense, and {own} without "
            f"one. With more time, or made for the defense, it may reach more."
        )
    return "The attack was the same as without the defense; one made for it may reach more."


def remedies_table(asked: Sequence[Remedy]) -> Table:
    """Return a table of the grades of each client's reconstructions, the client most at risk first.

    A client's rows are on its updates as sent, and on copies under each defense of ``asked``.
    """
    by_client = grouped_by_client(a for remedy in asked for a in remedy.before)
    rows = []
    for client in most_at_risk_first(by_client):
        name = str(client) if client >= 0 else "aggregate"
        for number, remedy in enumerate(asked):
            before = [a for a in remedy.before if a.key[1] == client]
            under = [a for a in remedy.under if a.key[1] == client]
            if number == 0:
                rows.append((name, "as it was sent", *_cells(before)))
            if under:
                rows.append((name, f"under {remedy.name}", *_cells(under)))
    columns = ("client", "its updates", "attempts", "grades of attempts", "median PSNR, dB",
               "highest PSNR, dB", "attempts that identify")  # fmt: skip
    words = ("its updates", "grades of attempts")
    texts = any(a.tokens is not None for remedy in asked for a in remedy.before)
    return Table(columns, tuple(rows), () if texts else (BLAND,), words).without_decibels()


def _cells(found: Sequence[Attempt]) -> tuple[str, ...]:
    known = [attempt.psnr for attempt in found if attempt.psnr is not None]
    return (str(len(found)), grades_told(found) or "–", decibel(median(known)),
            decibel(max(known, default=None)), share(*identified(found)))  # fmt: skip


SEEDS = "0,1,2"
SUGGESTED = "pruning,gaussian"
"""The defenses that the report suggests if a run tried none, as options of a command: one that
removes entries of an update, and one that adds noise.
"""
STRONGER = "gaussian"
"""The defense that the report suggests if samples are seen under the defenses that were tried:
Gaussian noise.
"""


def what_it_costs(
    index: Index, asked: Sequence[Remedy], metadata: Mapping[str, Any], is_at_risk: bool
) -> list[Step]:
    """Return advice on the accuracy that defenses cost: what is known, and how to measure it.

    The list is empty if there is nothing to advise. ``asked`` are the defenses that were tried on
    copies of the updates, and ``is_at_risk`` tells whether a client's samples are seen.
    """
    accuracy = by_round(index.series("utility", "test_accuracy"))
    own = defense_of(metadata)
    known = ""
    if accuracy:
        last = max(accuracy)
        when = f"after round {last}" if last else "before training"
        reached = f"{percent(median(accuracy[last]), 1)} {when}"
        bare = " without a defense" if is_simulation(metadata) else ""
        known = f"Test accuracy was {reached}{f' under {own}' if own else bare}. "
    words = words_of(metadata)
    if any(word.startswith("defense=") and "," in word for word in words):
        text = (
            f"{known}This run is one of a sweep over defenses: comparison.html, in the folder of "
            f"the sweep, sets their accuracy and leakage side by side."
        )
        return [Step("At what price", text)]
    if not own and not is_at_risk:
        return []
    text = known
    text += (
        f"To learn what {own} costs, repeat the training without it." if own else _unknown(asked)
    )
    found = attempts(index)
    is_raw = bool(ended(index, found))
    is_cut_off = is_raw or any(any(remedy.ended.values()) for remedy in asked)
    _, time = more_time(index, metadata, is_what_if=not is_raw) if is_cut_off else ("", ())
    # The commands train under each defense, so that no copies of updates are attacked. The attack
    # keeps its own limit of time, as accuracy can be measured without an attack of hours.
    changes = [each for each in time if not each.startswith(("server.what_if", "attack."))]
    commands = _commands(metadata, asked, bool(own), changes)
    if not commands:
        text += (
            " Train once with a defense and once without, each with its own run folder; then "
            "flwr-leakage compare RUN RUN sets their accuracy and leakage side by side."
        )
    fold = f"The commands that measure the price in accuracy, as mean and spread over seeds {SEEDS}"
    return [Step("At what price", text, commands=commands, fold=fold)]


def _unknown(asked: Sequence[Remedy]) -> str:
    names = " and ".join(remedy.name for remedy in asked)
    if not names:
        return "No defense was tried on copies of the updates: its effect and price are not known."
    return (
        f"What it reaches under {names} is not known: here {names} only met copies of the updates, "
        f"and had no part in training."
    )


def _commands(
    metadata: Mapping[str, Any],
    asked: Sequence[Remedy],
    is_defended: bool,
    changes: Sequence[str],
) -> tuple[str, ...]:
    """Return the commands that repeat the training over several seeds, with and without defenses.

    The defenses are those of ``asked``. The tuple is empty if the run's config is unknown or not
    safe to show. ``is_defended`` tells whether the run itself used a defense, and all commands set
    ``changes``.
    """
    config, choices = section(metadata, "config"), section(metadata, "config", "choices")
    if not is_simulation(metadata):
        return ()
    names = [change.partition("=")[0] for change in changes]
    without = ("seed", "defense", "what_if", "server.what_if", *names)
    changed = [*overrides(metadata, without), *changes]
    options = {"none": "none"}
    if is_defended:
        options["defended"] = _option(choices.get("defense"), config.get("defense"))
    else:
        nodes = section(config, "what_if")
        for remedy in asked:
            option = choices.get(f"defense@what_if.{remedy.name}")
            options[remedy.name] = _option(option, nodes.get(remedy.name))
        if any(attempt.grade in SEEN for remedy in asked for attempt in remedy.under):
            options.setdefault(STRONGER, STRONGER)
    words = [word for option in options.values() for word in shlex.split(option)]
    if not all(options.values()) or not are_plain((*words, *options, *changed)):
        return ()
    same = "".join(f" {shlex.quote(word)}" for word in changed)
    if len(options) == 1:
        return (_sweep(f"none,{SUGGESTED}", same),)
    runs = [_sweep(option, same, f"price/{name}") for name, option in options.items()]
    return (*runs, "flwr-leakage compare price -o price.html")


def _sweep(option: str, same: str, folder: str = "") -> str:
    where = f" hydra.sweep.dir={folder}" * bool(folder)
    return f"flwr-leakage run -m defense={option} seed={SEEDS} what_if=null{same}{where}"


def _option(option: Any, node: Any) -> str:
    """Return the words of a command that select a defense; empty if the defense is unknown.

    The words are ``option``, the name of the defense's config file, and the settings in its config,
    ``node``.
    """
    if not isinstance(option, str) or not isinstance(node, Mapping):
        return ""
    settings = [
        shlex.quote(f"defense.{key}={value}")
        for key, value in flatten(node)
        if key
        and not key.rpartition(".")[2].startswith("_")
        and not any(p.isdecimal() for p in key.split("."))
    ]
    return " ".join((shlex.quote(option), *settings))
