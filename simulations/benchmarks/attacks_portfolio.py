"""``strongest`` beside every other preset and breaching: is it ever worse than the best of them?

    python -m simulations.benchmarks.attacks_portfolio --root FOLDER --output rows.jsonl

runs every preset on every case of :mod:`simulations.benchmarks.portfolio_cases`, with at most
``--seconds`` of the CPU for each target, ``strongest`` no more than the others. A preset that is a
part of ``strongest`` is not run again where that ran it to its end: its row is the part's own
answer. No preset is run where ``strongest`` comes to 120 dB, beyond which nothing is measured,
and differences are of PSNRs up to 80 dB, where images of 8 bits are long exact.
``breaching:NAME`` takes single steps, with as many iterations as fit into the CPU seconds that
``strongest`` took, and infers labels by its own default.

The command appends a row to ``--output`` as soon as it is known, and prints the table of all rows
in that file; rows that are there are not run again, so that an interrupted call goes on. Each case
has weights of a seed of its own, from ``--seed`` on, and images of its own, from ``--first`` on;
each of ``--draws`` has others. Labels are inferred. One thread a process.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flwr_leakage.attacks import Attack, AttackJob, Strongest
from flwr_leakage.attacks.base import ProgressCallback
from flwr_leakage.attacks.finish import Continuation
from flwr_leakage.attacks.presets import load_preset, preset_names
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Reconstruction, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_deep import affordable, attacking
from simulations.benchmarks.attacks_second_order import psnr
from simulations.benchmarks.portfolio_cases import CASES, MORE, Target, make_target

OWN = "strongest"

PEERS = ("breaching:modern", "breaching:invertinggradients", "breaching:deepleakage")

CAP = 119.9
"""PSNR in dB that no preset can pass by more than rounding."""

EVERY = (*CASES, *MORE)

APART = 100
"""Difference of seeds from draw to draw."""

EXACT = 80.0
"""… from which images count as equal: an error of a fortieth of a level of 8 bits."""


def own_presets() -> list[str]:
    """All presets but ``strongest``."""
    return [name for name in preset_names() if name not in (OWN, "text")]


@dataclass(frozen=True)
class Noted:
    """An attack that notes what it answered, and in how many CPU seconds."""

    attack: Attack
    answers: list[tuple[Reconstruction, float]]

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """The attack's own answers."""
        with lab.Stopwatch() as watch:
            results = self.attack(job, progress)
        self.answers.append((results[0], watch.seconds))
        return results


@dataclass(frozen=True)
class Answer:
    """What an attack found, its CPU seconds, whether its budget ended it, and what it said."""

    found: Tensor | None
    seconds: float
    stopped: bool
    said: str


def run_preset(name: str, job: AttackJob) -> dict[str, Answer]:
    """The answer of a preset and, by name, of its parts."""
    attack = load_preset(name)
    parts: dict[str, Noted] = {}
    if isinstance(attack, Strongest):
        own = {k: part for k, part in attack.attacks.items() if not isinstance(part, Continuation)}
        parts = {key: Noted(part, []) for key, part in own.items()}
        attack = replace(attack, attacks={**attack.attacks, **parts})
    whole = Noted(attack, [])
    whole(job)
    answers = {}
    for key, noted in {name: whole, **parts}.items():
        for result, seconds in noted.answers:
            found = None if result.batch is None else result.batch.inputs
            said = result.summary or result.error or str(result.stats.get("stage", ""))
            answers[key] = Answer(found, seconds, "stopped" in result.stats, said)
    return answers


def run_peer(name: str, target: Target, setting: str, seconds: float) -> Answer:
    """A configuration of breaching with as many iterations as take about ``seconds``."""
    if setting.startswith("steps"):
        return Answer(None, 0.0, False, "takes single steps")
    attack = attacking(name, target.network, target.spec)
    try:
        outcome = attack([target.seen], affordable(attack, [target.seen], seconds))
    except Exception as error:  # as many labels as it infers are not always one a sample
        return Answer(None, 0.0, False, f"failed: {error}")
    return Answer(outcome.found[0], outcome.seconds[0], False, "")


def run_case(case: str, draw: int, names: Sequence[str], given: argparse.Namespace) -> None:
    """Attack one draw of a case by some presets, ``strongest`` first, and append a row for each."""
    position = EVERY.index(case)
    sizes = [int(each.split("/")[1]) for each in EVERY]
    first = given.first + draw * sum(sizes) + sum(sizes[:position])
    seed = given.seed + draw * APART + position
    target = make_target(case, given.root, given.split, first, seed)
    job = AttackJob(
        GradientMap(target.network),
        target.spec,
        [target.seen],
        ThreatModel(),
        max_seconds=given.seconds,
    )
    rows = read_rows(given.output)
    done = {row["preset"]: row for row in rows if (row["case"], row["seed"]) == (case, seed)}
    answers: dict[str, Answer] = {}
    for name in names:
        if OWN in done and done[OWN]["psnr"] >= CAP:
            break
        if name in done:
            continue
        if name.startswith("breaching:"):
            seconds = done[OWN]["cpu_seconds"]
            answers[name] = run_peer(name, target, case.split("/")[2], seconds)
        elif name not in answers or answers[name].stopped:
            answers |= run_preset(name, job)
        answer = answers[name]
        values = psnr(answer.found, target.pixels.inputs, target.spec)
        done[name] = {
            "case": case,
            "image": first,
            "seed": seed,
            "preset": name,
            "psnr": sum(values) / len(values),
            "cpu_seconds": answer.seconds,
            "stopped": answer.stopped,
            "said": answer.said,
        }
        with given.output.open("a") as file:
            file.write(json.dumps(done[name]) + "\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """All rows so far."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def print_table(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """A row a draw with all presets run, and how far ``strongest`` is from the best of them."""
    lab.print_header(
        "case", "seed", "strongest, dB", "CPU s", "chosen", "best own preset", "dB", "difference",
        "breaching's best", "dB", "difference",
    )  # fmt: skip
    below = {"own presets": 0, "breaching": 0}
    compared = dict.fromkeys(below, 0)
    for case, seed in sorted(
        {(row["case"], row["seed"]) for row in rows}, key=lambda at: (EVERY.index(at[0]), at[1])
    ):
        each = {row["preset"]: row for row in rows if (row["case"], row["seed"]) == (case, seed)}
        if OWN not in each:
            continue
        own = each[OWN]
        solved = own["psnr"] >= CAP
        if not solved and not all(name in each for name in names):
            continue
        chosen = own["said"].partition(" chosen")[0] + (", budget spent" if own["stopped"] else "")
        cells = [case, str(seed), f"{own['psnr']:.1f}", f"{own['cpu_seconds']:.1f}", chosen]
        peers = [each[name] for name in names if name.startswith("breaching:") and name in each]
        others = [each[n] for n in names if not n.startswith("breaching:") and n in each]
        for whose, group in zip(below, (others, peers), strict=True):
            ran = [row for row in group if row["psnr"]]
            compared[whose] += bool(solved or ran)
            if solved or not ran:
                cells += ["not run", "", ""]
                continue
            best = max(ran, key=lambda row: float(row["psnr"]))
            difference = min(own["psnr"], EXACT) - min(best["psnr"], EXACT)
            below[whose] += difference < -0.5
            cells += [best["preset"].removeprefix("breaching:"), f"{best['psnr']:.1f}"]
            cells.append(f"{difference:+.1f}")
        lab.print_row(*cells)
    for whose, number in below.items():
        print(f"\n{number} of {compared[whose]} draws more than 0.5 dB below the best of {whose}.")


def main() -> None:
    """Read the command line, run what is missing, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.set_defaults(seed=100)
    parser.add_argument("--first", type=int, default=100, help="below 100 for development")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--presets", default=",".join((*PEERS, *own_presets())))
    parser.add_argument("--seconds", type=float, default=20.0, help="of the CPU, for each target")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended")
    lab.add_processes(parser)
    given = lab.start(parser)
    presets = given.presets.split(",")
    lab.run_all(
        run_case,
        [
            (case, draw, (OWN, *presets), given)
            for draw in range(given.draws)
            for case in given.cases.split(",")
        ],
        given,
    )
    print_table(read_rows(given.output), presets)


if __name__ == "__main__":
    main()
