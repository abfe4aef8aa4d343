"""Federated runs of texts: what each round's attack recovers while the model learns.

    python -m simulations.benchmarks.text_runs --seed 100 --draws 10

runs ``flwr-leakage run dataset=python_docs seed=SEED`` with every round attacked, and prints two
Markdown tables. The first has a row a round: the model's test accuracy (and above the table that of
the most frequent class), and what the attack made of the client of one text and of that of four.
The second has a row a defense, of the same updates (``what_if``). *Named* is the share of a text's
distinct tokens that are known to occur. The attack has ``--seconds`` of the CPU for an update, on
one thread.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import torch

from flwr_leakage.records import LeakageRecord
from flwr_leakage.tracking import RunData
from simulations.benchmarks import lab

DEFENSES = {
    "noise5": ("gaussian", "noise_std=1e-5", "noise 1e-5 of the gradient"),
    "noise3": ("gaussian", "noise_std=1e-3", "noise 1e-3 of the gradient"),
    "half": ("pruning", "prune_ratio=0.5", "50 % pruned"),
    "most": ("pruning", "prune_ratio=0.9", "90 % pruned"),
    "pruning": ("pruning", "prune_ratio=0.99", "99 % pruned"),
    "private": ("dp_sgd", "noise_multiplier=1.0", "DP-SGD, noise multiplier 1"),
}
"""By name, the group's option, its setting, and words."""


def run(seed: int, seconds: float, rounds: int) -> tuple[RunData, float]:
    """Return a run's record, and the test accuracy of the most frequent class."""
    import logging

    from rich.console import Console

    from flwr_leakage.flower.launch import run_inline
    from flwr_leakage.simulation.apps import make_client_app, make_server_app
    from flwr_leakage.simulation.build import build
    from flwr_leakage.simulation.config import compose
    from flwr_leakage.tracking import read_run

    logging.getLogger("flwr").setLevel(logging.ERROR)
    asked = [f"+defense@what_if.{name}={group}" for name, (group, _, _) in DEFENSES.items()
             if name != "pruning"]  # fmt: skip
    asked += [f"what_if.{name}.{setting}" for name, (_, setting, _) in DEFENSES.items()]
    with tempfile.TemporaryDirectory() as folder:
        config = compose(
            ["dataset=python_docs", f"seed={seed}", f"num_rounds={rounds}", "selection.every=1",
             f"server.attack_max_seconds={seconds}", "score=none", *asked],
            folder,
        )  # fmt: skip
        data = build(config).data
        server = make_server_app(lambda _: config, Console(quiet=True))
        run_inline(server, make_client_app(lambda _: build(config)), config["num_clients"])
        guess = torch.bincount(data.train.labels).argmax()
        return read_run(Path(folder)), float((data.test.labels == guess).float().mean())


def told(records: Sequence[LeakageRecord], kind: str, before: str = "") -> list[str]:
    """Return the cells of some records: exact texts, tokens in place, tokens named."""

    def values(name: str) -> list[float]:
        return [r.value or 0.0 for r in records if (r.kind, r.name) == (kind, f"{before}{name}")]

    exact, placed, named = map(values, ("exact_text", "token_accuracy", "named_tokens"))
    texts = len(exact)
    share = mean(named) if len(named) == texts else sum(named) / max(texts, 1)
    return [f"{sum(exact):.0f} of {texts}", f"{100 * mean(placed):.1f} %", f"{100 * share:.1f} %"]


def main() -> None:
    """Run every seed, then print both tables."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = lab.start(parser)
    records: list[LeakageRecord] = []
    guesses = []
    with lab.Stopwatch() as watch:
        for seed in range(given.seed, given.seed + given.draws):
            data, guess = run(seed, given.seconds, given.rounds)
            records += data.records
            guesses.append(guess)
            print(f"seed {seed} is done", flush=True)
    print(f"\nBlind guess of the class: {100 * mean(guesses):.1f} %. {watch.seconds:.0f} CPU s.\n")
    cells = ["exact", "in place", "named"]
    print("| round | accuracy |", " | ".join(f"{size}: {c}" for size in (1, 4) for c in cells), "|")
    print("|" + " --- |" * 8)
    for number in range(1, given.rounds + 1):
        here = [record for record in records if record.server_round == number]
        accuracy = mean(r.value or 0.0 for r in here if r.name == "test_accuracy")
        row = [told([r for r in here if r.client_id == client], "metric") for client in (0, 1)]
        print(f"| {number} | {100 * accuracy:.1f} % |", " | ".join([*row[0], *row[1]]), "|")
    print("\n| defense |", " | ".join(f"{size}: {c}" for size in (1, 4) for c in cells), "|")
    print("|" + " --- |" * 7)
    for name, (_, _, words) in DEFENSES.items():
        row = [
            told([r for r in records if r.client_id == client], "what_if", f"{name}/")
            for client in (0, 1)
        ]
        print(f"| {words} |", " | ".join([*row[0], *row[1]]), "|")


if __name__ == "__main__":
    main()
