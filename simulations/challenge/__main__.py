"""The command of the challenge; see :mod:`simulations.challenge`."""

import argparse
from itertools import chain
from pathlib import Path

import simulations.challenge
from simulations.benchmarks import lab
from simulations.challenge.entries import enter
from simulations.challenge.folder import Challenge, write
from simulations.challenge.score import score, table, write_scores
from simulations.challenge.tracks import TRACKS, starts, updates


def freeze(given: argparse.Namespace) -> None:
    """Write the updates of all tracks, each with images and weights of its own."""
    made = (
        updates(track, given.root, first, given.seed + first, given.defense)
        for track, first in starts(given.first).items()
        if track in given.tracks
    )
    write(given.bench, given.defense, chain.from_iterable(made))
    print(f"{len(Challenge(given.bench).index)} updates in {given.bench / 'updates'}.")


def answer(given: argparse.Namespace) -> None:
    """Answer all updates by a preset."""
    enter(Challenge(given.bench), given.entry, given.preset, given.seconds)


def measure(given: argparse.Namespace) -> None:
    """Measure all entries, and print the table and every answer that does not count."""
    challenge, scores = Challenge(given.bench), {}
    for entry in sorted(path for path in given.entries.iterdir() if path.is_dir()):
        scores[entry.name] = score(challenge, entry, given.runs / entry.name)
    write_scores(given.runs / "scores.json", scores)
    print(f"Defense of the clients: {challenge.defense}.\n\n{table(scores)}")
    for entry, tracks in scores.items():
        for reason in chain.from_iterable(one.refusals for one in tracks.values()):
            print(f"- {entry}: {reason}")


def main() -> None:
    """Read the command line."""
    parser = lab.command(simulations.challenge.__doc__)
    commands = parser.add_subparsers(required=True)
    freezing = commands.add_parser("freeze", help="write the updates")
    freezing.add_argument("bench", type=Path)
    freezing.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    freezing.add_argument("--first", type=int, default=4000, help="the first training image")
    freezing.add_argument("--seed", type=int, default=1000, help="of weights and defenses")
    freezing.add_argument("--defense", default="none", help="a file of conf/defense")
    freezing.add_argument("--tracks", type=lambda text: text.split(","), default=list(TRACKS))
    freezing.set_defaults(run=freeze)
    entering = commands.add_parser("enter", help="answer by a preset")
    entering.add_argument("bench", type=Path)
    entering.add_argument("entry", type=Path)
    entering.add_argument("--preset", default="strongest", help="or breaching:NAME")
    entering.add_argument("--seconds", type=float, default=20.0, help="of the CPU, for each update")
    entering.set_defaults(run=answer)
    scoring = commands.add_parser("score", help="measure all entries")
    scoring.add_argument("bench", type=Path)
    scoring.add_argument("entries", type=Path, help="a folder of entries")
    scoring.add_argument("runs", type=Path, help="a new folder for runs and reports")
    scoring.set_defaults(run=measure)
    given = lab.start(parser)
    given.run(given)


if __name__ == "__main__":
    main()
