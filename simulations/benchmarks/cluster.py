"""Attacks as Ray tasks on a cluster of two nodes: equal to local ones, whatever dies meanwhile.

    python -m simulations.benchmarks.cluster
    python -m simulations.benchmarks.cluster --targets 6 --only killed

The nodes are processes of this machine, with one CPU each. A worker is ended by SIGKILL, and a node
with all of its processes, when a quarter of the targets is done.
"""

import argparse
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flwr_leakage.attacks import LBFGS, AttackJob, GradientInversion, Parallel
from flwr_leakage.attacks.base import AttackProgress
from flwr_leakage.attacks.parallel import RETRIED
from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import (
    Batch,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
STORE = 80_000_000
"""Bytes of each node's object store, the least that Ray takes."""


def network() -> nn.Module:
    """A convolution and a linear layer of sigmoid units."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(96, 4)
    )


def job_of(targets: int) -> AttackJob:
    """Updates of one step on one random image each."""
    gradient_map, schedule = GradientMap(network()), LocalSchedule(0.1)
    draws = torch.Generator().manual_seed(1)
    observations = []
    for client in range(targets):
        batch = Batch(
            SPEC.normalize(torch.rand(1, *SPEC.shape, generator=draws)), torch.tensor([client % 4])
        )
        gradient = gradient_map(gradient_map.params, batch)
        delta = {name: -schedule.learning_rate * value for name, value in gradient.items()}
        observations.append(
            Observation(1, client, gradient_map.params, {}, Update(delta, {}, schedule, 1))
        )
    return AttackJob(gradient_map, SPEC, observations, ThreatModel())


class Nodes:
    """A Ray cluster of two nodes, to which this process is connected."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.second = self.cluster.add_node(num_cpus=1, object_store_memory=STORE)
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    def kill_worker(self) -> None:
        """End a process that attacks on the second node, by SIGKILL, once there is one."""
        until = time.monotonic() + 60
        while (process := self._attacking()) is None:
            if time.monotonic() > until:
                raise RuntimeError("no worker of the second node attacks.")
            time.sleep(0.005)
        os.kill(process, signal.SIGKILL)

    def _attacking(self) -> int | None:
        """Return the number of a process that attacks on the second node, if there is one."""
        (raylet,) = self.second.all_processes["raylet"]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                attacks = (folder / "cmdline").read_bytes().startswith(b"ray::_work")
            except OSError:  # it ended
                continue
            if parent == raylet.process.pid and attacks:
                return int(folder.name)
        return None

    def kill_node(self) -> None:
        """End the second node with all of its processes."""
        self.cluster.remove_node(self.second, allow_graceful=False)

    def close(self) -> None:
        """End the cluster."""
        self.ray.shutdown()
        self.cluster.shutdown()


def once_at(share: float, action: Callable[[], None]) -> Callable[[AttackProgress], None]:
    """A progress callback that acts once, when a share of the targets is done."""
    acted: list[bool] = []

    def tell(progress: AttackProgress) -> None:
        if not acted and progress.done >= share * progress.total:
            acted.append(True)
            action()

    return tell


def are_equal(left: Reconstruction, right: Reconstruction) -> bool:
    """Whether two answers are equal to the bit."""
    if left.batch is None or right.batch is None:
        return False
    return (
        left.objective == right.objective
        and torch.equal(left.batch.inputs, right.batch.inputs)
        and torch.equal(left.batch.targets, right.batch.targets)
    )


def main() -> None:
    """Print a line for each way to run the same attacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=20, help="of L-BFGS")
    parser.add_argument("--only", default="", help="rows whose name holds this word")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    attack = GradientInversion(optimizer=LBFGS(iterations=arguments.iterations), batching="loop")
    job = job_of(arguments.targets)
    parallel = partial(Parallel, attack, chunk=1)
    local: list[Reconstruction] = []

    def row(name: str, run: Callable[..., Any], progress: Any = None) -> None:
        start = time.monotonic()
        answers = run(job, progress)
        seconds = time.monotonic() - start
        local[:] = local or answers
        equal = sum(map(are_equal, local, answers))
        again = sum(RETRIED in answer.stats for answer in answers)
        print(f"| {name} | {equal} of {len(job.observations)} | {again} | {seconds:.0f} |")

    print("| attacks | equal to local | tried again | wall s |\n|---|---|---|---|")
    row("one process", parallel(workers=1))
    nodes = Nodes()
    rows = {
        "Ray, two nodes, first call": None,
        "Ray, two nodes": None,
        "Ray, a worker killed": nodes.kill_worker,
        "Ray, a node killed": nodes.kill_node,
        "Ray, the node that is left": None,
    }
    try:
        for name, action in rows.items():
            if arguments.only in name:
                row(name, parallel(workers=RayTasks()), action and once_at(0.25, action))
    finally:
        nodes.close()
    if not arguments.only:
        row("two processes", parallel(workers=2))


if __name__ == "__main__":
    main()
