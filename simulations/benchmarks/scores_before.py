"""The default scores of this checkout beside those of another commit, call by call in turns.

    git worktree add CHECKOUT 11d539b
    python -m simulations.benchmarks.scores_before --before CHECKOUT --cifar cifar10_test.npz

Eight samples of one LeNet client. Each code runs in a process of its own. A machine's load changes
within seconds, so that only ratios of neighbouring calls mean something.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path

from simulations.benchmarks import lab

CHILD = """
import sys, time, torch
torch.set_num_threads(1)
from simulations.benchmarks import scores_cost as bench

shape = (1, 28, 28)
model = bench.build_model("LeNet", shape)
client = bench.exposure_of(model, bench.load_batch(shape, 64, sys.argv[1] or None)[:8], 0.0)
if hasattr(bench, "compute_scores"):  # commits before the benchmarks had a lab
    call = lambda: bench.compute_scores(bench.default_scores(), *client, bench.generator())
else:
    call = lambda: bench.lab.run_scores(*client)
for _ in range(3):
    call()
print("ready", flush=True)
for _ in sys.stdin:
    began = time.process_time()
    call()
    print(time.process_time() - began, flush=True)
"""


class Child:
    """A checkout that computes the default scores when asked."""

    def __init__(self, checkout: Path, cifar: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, cifar],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while (line := self._line()) != "ready":
            print(line, file=sys.stderr)

    def seconds(self) -> float:
        """CPU seconds of one call."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the other code ended with status {self.process.wait()}")
        return line.strip()


def main() -> None:
    """Print the medians of both codes, and of the ratios of paired calls."""
    parser = lab.command(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of another commit")
    parser.add_argument("--cifar", default="", help=".npz with images (N, 32, 32, 3) uint8")
    parser.add_argument("--calls", type=int, default=60, help="of each code")
    arguments = lab.start(parser)
    here = Path(__file__).resolve().parents[2]
    children = [Child(place.resolve(), arguments.cifar) for place in (arguments.before, here)]
    pairs = []
    for turn in range(arguments.calls):
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {which: children[which].seconds() for which in order}
        pairs.append((taken[0], taken[1]))
    lab.print_header("n", "before, ms", "now, ms", "median of paired ratios", "quartiles")
    before, now = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    spread = f"{low:.3f} … {high:.3f}"
    lab.print_row(str(len(pairs)), f"{before:.0f}", f"{now:.0f}", f"{middle:.3f}", spread)


if __name__ == "__main__":
    main()
