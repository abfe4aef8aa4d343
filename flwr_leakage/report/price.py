"""What a defense costs: what the run knows of it, and the commands that measure the rest."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from flwr_leakage.report.header import flatten
from flwr_leakage.report.index import Index, by_round, median
from flwr_leakage.report.remedies import Remedy
from flwr_leakage.report.steps import Step, defense_of

SEEDS = "0,1,2"
SUGGESTED = "pruning,gaussian"
"""What to begin with where a run tried no defense; each is an option of the command."""
_OWN = ("hydra", "seed", "defense", "what_if", "run_dir", "objective", "tracker", "client.folder")
"""Settings of a run that the commands give anew, or that write elsewhere."""
_PLAIN = re.compile(
    r"(?!.*(\b_[a-z]+_|\.\./))[+~]*[a-z][a-z0-9]*([_.@][a-z0-9]+)*(=[^$\\\x00-\x1f]*)?",
    re.IGNORECASE,
)
"""A setting: neither ``_target_``, which Hydra calls, nor the path of another config group."""


def what_it_costs(
    index: Index, asked: Sequence[Remedy], metadata: Mapping[str, Any], is_at_risk: bool
) -> list[Step]:
    """The accuracy and the change of an update that are known, and how to measure the price."""
    accuracy = by_round(index.series("utility", "test_accuracy"))
    own = defense_of(metadata)
    known = ""
    if accuracy:
        last = max(accuracy)
        reached = f"{100 * (median(accuracy[last]) or 0.0):.1f} % after round {last}"
        known = f"Test accuracy was {reached} {f'under {own}' if own else 'without a defense'}. "
    words = _words(metadata.get("command"))
    if any(word.startswith("defense=") and "," in word for word in words):
        text = (
            f"{known}This run is one of a sweep over defenses: comparison.html, in the folder of "
            f"the sweep, sets their accuracy and leakage side by side."
        )
        return [Step("At what price", text)]
    if not own and not is_at_risk:
        return []
    text = known
    text += f"What {own} costs takes the same training without it." if own else _unknown(asked)
    commands = _commands(words, metadata, asked, bool(own))
    if not commands:
        text += (
            " Train once with a defense and once without, each with its own run folder; then "
            "flwr-leakage compare RUN RUN sets their accuracy and leakage side by side."
        )
    fold = f"The commands that measure it, as mean and spread over the seeds {SEEDS}"
    return [Step("At what price", text, commands=commands, fold=fold)]


def _unknown(asked: Sequence[Remedy]) -> str:
    names = " and ".join(remedy.name for remedy in asked)
    if not names:
        return "No defense was tried here, so that neither its effect nor its price is known."
    return (
        f"What it reaches under {names} is not known: here {names} only met copies of the updates, "
        f"and had no part in training."
    )


def _commands(
    words: Sequence[str], metadata: Mapping[str, Any], asked: Sequence[Remedy], is_defended: bool
) -> tuple[str, ...]:
    """The same training with and without defenses over seeds; none where its config is unknown."""
    config = metadata.get("config")
    choices = config.get("choices") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(choices, Mapping):
        return ()
    changed = _overrides(words, config, choices)
    options = {"none": "none"}
    if is_defended:
        options["defended"] = _option(choices.get("defense"), config.get("defense"))
    else:
        nodes = config.get("what_if")
        nodes = nodes if isinstance(nodes, Mapping) else {}
        for remedy in asked:
            option = choices.get(f"defense@what_if.{remedy.name}")
            options[remedy.name] = _option(option, nodes.get(remedy.name))
    words = [word for option in options.values() for word in shlex.split(option)]
    # People copy a command: one that a stranger's run may have shaped holds plain settings only.
    if not all(options.values()) or not all(map(_PLAIN.fullmatch, (*words, *options, *changed))):
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
    """An option of the defenses with its settings, as words of a command; empty if not known."""
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


def _words(command: Any) -> list[str]:
    """The words of the command that the run was started by."""
    try:
        return shlex.split(command) if isinstance(command, str) else []
    except ValueError:  # a quote that is not closed: it was cut
        return []


def _overrides(
    words: Sequence[str], config: Mapping[str, Any], choices: Mapping[str, Any]
) -> list[str]:
    """What else the run's command changed; of a sweep's settings those of this run."""
    leaves = dict(flatten(config))
    kept = []
    for word in words:
        key, equals, value = word.partition("=")
        name = key.lstrip("+~")
        if not (equals or key.startswith("~")) or name.startswith(("-", *_OWN)):
            continue
        if "," in value and value[0] not in "[{\"'":
            value = str(choices.get(name, leaves.get(name, value)))
        kept.append(f"{key}{equals}{value}")
    return kept
