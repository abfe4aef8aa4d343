"""Seconds and memory of a report of a long run: 1,000 images, 100 rounds of 100 clients.

The run is generated, not trained: every client has an attacked image in every tenth round, each
with its original, reconstruction, metrics and a what-if, and two scores and two costs in each.

    python simulations/benchmarks/report_size.py [ROUNDS CLIENTS]
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report import write_report
from flwr_leakage.tracking import JsonlTracker, write_metadata

EVERY = 10
"""Rounds from one attack to the next."""


def generate(folder: Path, rounds: int, clients: int) -> int:
    """Write a run folder; return how many images were attacked."""
    tracker = JsonlTracker(folder)
    write_metadata(folder, {"num_rounds": rounds, "what_if": {"pruning": {}}}, 0, {"run": "long"})
    generator = torch.Generator().manual_seed(0)
    attacked = 0
    for server_round in range(1, rounds + 1):
        for client in range(clients):
            where = ("long", server_round, client)
            tracker.log(
                LeakageRecord(
                    *where, -1, "client", "images", 1.0, "image", "", "1 image, 1 step, batch 1"
                )
            )
            for name in ("gradient_norm", "lambda_max"):
                value = float(torch.rand((), generator=generator))
                tracker.log(LeakageRecord(*where, 0, "score", name, value, "1"))
            for name in ("train_cpu_seconds", "score_cpu_seconds"):
                tracker.log(LeakageRecord(*where, -1, "cost", name, 0.1, "s"))
            if server_round % EVERY:
                continue
            attacked += 1
            psnr = 10 + 50 * float(torch.rand((), generator=generator))
            tracker.log(LeakageRecord(*where, -1, "attack", "objective", 0.1, "1"))
            for kind, name, value in (
                ("metric", "psnr", psnr),
                ("metric", "ssim", psnr / 100),
                ("metric", "blind_psnr", 12.0),
                ("metric", "blind_ssim", 0.1),
                ("metric", "identification_rank", 1.0),
                ("what_if", "pruning/psnr", psnr / 2),
                ("what_if", "pruning/blind_psnr", 12.0),
                ("client", "class", float(client % 10)),
            ):
                notes = {"class": str(client % 10), "identification_rank": "of 101 candidates"}
                note = notes.get(name, "")
                tracker.log(LeakageRecord(*where, 0, kind, name, value, "", "", note))
            for role in ("original", "reconstruction", "what_if_pruning"):
                pixels = torch.rand(3, 32, 32, generator=generator)
                tracker.image(server_round, client, 0, role, pixels)
        tracker.log(LeakageRecord("long", server_round, -1, -1, "utility", "test_accuracy", 0.9))
    tracker.close()
    return attacked


def main() -> None:
    """Generate the run and print what its report takes."""
    rounds, clients = (int(text) for text in (sys.argv[1:] or ("100", "100")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        attacked = generate(folder, rounds, clients)
        began, cpu = time.monotonic(), time.process_time()
        path = write_report(folder)
        wall, spent = time.monotonic() - began, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{rounds} rounds of {clients} clients, {attacked} attacked images: "
            f"{wall:.1f} s ({spent:.1f} s of the CPU), peak {peak:.0f} MiB, "
            f"page of {path.stat().st_size / 2**20:.1f} MiB"
        )


if __name__ == "__main__":
    main()
