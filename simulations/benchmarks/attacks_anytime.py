"""``strongest`` under several budgets: what does a second more of the CPU bring?

    python -m simulations.benchmarks.attacks_anytime --root FOLDER --output rows.jsonl

attacks each case of :mod:`simulations.benchmarks.portfolio_cases` once for each budget of
``--budgets``, and prints, for each kind of network and each budget, the share of cases that come
within 0.5 dB of the answer under the largest budget, the mean PSNR, and the CPU seconds taken at
most, as a share of the budget. PSNRs count up to 80 dB, where images of 8 bits are exact. A run
that its budget did not end is not repeated under larger budgets, as its answer would be the same.

The command appends a row to ``--output`` as soon as it is known, and does not run again what is
there, so that an interrupted call goes on. The case at position p has weights of seed ``--seed``
+ p and images of its own, from ``--first`` on. Labels are inferred. One thread a process.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_portfolio import EXACT, OWN, read_rows
from simulations.benchmarks.attacks_second_order import psnr
from simulations.benchmarks.portfolio_cases import CASES, MORE, Target, make_target

CLOSE = 0.5
"""Difference in dB up to which two answers count as equally good."""


def run(target: Target, seconds: float) -> dict[str, Any]:
    """Return what ``strongest`` reaches within a budget of CPU seconds."""
    job = AttackJob(
        GradientMap(target.network), target.spec, [target.seen], ThreatModel(), max_seconds=seconds
    )
    with lab.Stopwatch() as watch:
        (result,) = load_preset(OWN)(job)
    found = None if result.batch is None else result.batch.inputs
    values = psnr(found, target.pixels.inputs, target.spec)
    return {
        "psnr": sum(values) / len(values),
        "cpu_seconds": watch.seconds,
        "stopped": "stopped" in result.stats,
        "said": result.summary or result.error,
    }


def run_case(position: int, case: str, given: argparse.Namespace) -> None:
    """Attack one case under each budget that is missing, and append a row for each."""
    first, seed = given.first + given.apart * position, given.seed + position
    about = {"case": case, "seed": seed, "image": first}
    done = [row for row in read_rows(given.output) if about.items() <= row.items()]
    rows = {row["budget"]: row for row in done}
    target: Target | None = None
    ended: dict[str, Any] | None = None
    for budget in given.budgets:
        if budget in rows:
            ended = ended or (None if rows[budget]["stopped"] else rows[budget])
            continue
        if ended is None:
            target = target or make_target(case, given.root, given.split, first, seed)
            row = run(target, budget)
            ended = None if row["stopped"] else row
        else:
            row = ended
        with given.output.open("a") as file:
            file.write(json.dumps({**row, **about, "budget": budget}) + "\n")


def print_table(rows: Sequence[dict[str, Any]], budgets: Sequence[float]) -> None:
    """Print a row for each kind of network and one for all: shares, PSNRs and CPU seconds."""
    kinds = sorted({kind_of(row["case"]) for row in rows})
    lab.print_header(
        "network", "cases", *(f"{budget:g} s" for budget in budgets), "CPU over budget, at most"
    )
    for kind in (*kinds, "all"):
        chosen = [row for row in rows if kind in ("all", kind_of(row["case"]))]
        cases = {(row["case"], row["seed"]) for row in chosen}
        by = {((row["case"], row["seed"]), row["budget"]): row for row in chosen}
        cases = {case for case in cases if all((case, budget) in by for budget in budgets)}
        if not cases:
            continue
        cells = []
        for budget in budgets:
            values = {case: min(by[case, budget]["psnr"], EXACT) for case in cases}
            last = {case: min(by[case, budgets[-1]]["psnr"], EXACT) for case in cases}
            close = sum(values[case] >= last[case] - CLOSE for case in cases)
            cells.append(f"{close}/{len(cases)}, {sum(values.values()) / len(cases):.1f} dB")
        over = max(row["cpu_seconds"] / row["budget"] for row in chosen)
        lab.print_row(kind, str(len(cases)), *cells, f"{over:.2f}")


def kind_of(case: str) -> str:
    """Return the name of a case's network, such as ``relu``, without its training."""
    return case.partition("/")[0].partition("-")[0]


def main() -> None:
    """Read the command line, run what is missing, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.set_defaults(seed=100)
    parser.add_argument("--first", type=int, default=100, help="below 100 for development")
    parser.add_argument("--apart", type=int, default=32, help="images from case to case")
    parser.add_argument("--cases", default=",".join((*CASES, *MORE)))
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[2, 5, 10, 30, 120], help="CPU seconds, rising"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended")
    lab.add_processes(parser)
    given = lab.start(parser)
    lab.run_all(
        run_case, [(p, case, given) for p, case in enumerate(given.cases.split(","))], given
    )
    print_table(read_rows(given.output), given.budgets)


if __name__ == "__main__":
    main()
