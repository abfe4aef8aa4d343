"""Clipped updates: what ``strongest`` reaches where a client scales its gradient by a factor.

    python -m simulations.benchmarks.attacks_clipped --root FOLDER --first 100 --seed 100 --draws 8

prints a Markdown table. A client that clips to a norm sends c g in place of its gradient g; the
attacker knows neither c nor the norm. Every row has ``--draws`` weights of their own, from
``--seed`` on, and images of their own, from ``--first`` on. Given are the PSNR of the images in dB,
mean and worst, how many answers say the factor to 1 %, and CPU seconds of an update. The attack is
the preset ``strongest``, with at most ``--seconds`` of the CPU for each. Labels are inferred. One
thread.
"""

from dataclasses import replace
from statistics import mean

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Observation, ThreatModel
from simulations.benchmarks import lab
from simulations.benchmarks.attacks_second_order import psnr
from simulations.benchmarks.portfolio_cases import make_target

CASES = ("lenet/1", "relu/1", "relu-trained/1", "resnet18/1", "mlp/1", "mlp/8", "lenet/4")
FACTORS = (1.0, 0.9, 0.3, 0.03)


def clipped(seen: Observation, factor: float) -> Observation:
    """Return what the server sees of a client that scales its update."""
    delta = {name: factor * value for name, value in seen.update.delta.items()}
    return replace(seen, update=replace(seen.update, delta=delta))


def main() -> None:
    """Attack every case under every factor."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--cases", nargs="*", default=CASES)
    given = lab.start(parser)
    attack = load_preset("strongest")
    print("| network/images | factor | n | PSNR, dB | worst | factor told | CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in given.cases:
        size = int(case.split("/")[1])
        for factor in FACTORS:
            values: list[float] = []
            seconds: list[float] = []
            told = 0
            for draw in range(given.draws):
                first, seed = given.first + draw * size, given.seed + draw
                target = make_target(f"{case}/clean", given.root, given.split, first, seed)
                seen = clipped(target.seen, factor)
                job = AttackJob(
                    GradientMap(target.network), target.spec, [seen], ThreatModel(),
                    max_seconds=given.seconds,
                )  # fmt: skip
                with lab.Stopwatch() as watch:
                    (found,) = attack(job)
                inputs = None if found.batch is None else found.batch.inputs
                values += psnr(inputs, target.pixels.inputs, target.spec)
                seconds.append(watch.seconds)
                told += abs(float(found.stats.get("scale", 1.0)) / factor - 1) < 0.01
            row = f"| {case} | {factor:g} | {len(values)} | {mean(values):.1f} | {min(values):.1f} "
            print(f"{row}| {told} of {given.draws} | {mean(seconds):.1f} |", flush=True)


if __name__ == "__main__":
    main()
