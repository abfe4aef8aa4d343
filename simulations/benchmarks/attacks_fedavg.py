"""Attack updates of several local steps, sums of clients, and several rounds of one client.

    python simulations/benchmarks/attacks_fedavg.py steps --root FOLDER --network lenet
    python simulations/benchmarks/attacks_fedavg.py labels --root FOLDER --network lenet
    python simulations/benchmarks/attacks_fedavg.py epochs --root FOLDER --network lenet
    python simulations/benchmarks/attacks_fedavg.py views --root FOLDER --network lenet
    python simulations/benchmarks/attacks_fedavg.py rounds --root FOLDER --network lenet

each print a Markdown table, row by row: PSNR, SSIM, LPIPS and label accuracy of reconstructions
that are assigned to the private images by the least squared error, averaged over a client's images
first. ``FOLDER`` holds ``cifar10_test.npz`` and ``cifar10_train.npz``; ``--lpips FILE`` is a
SqueezeNet 1.1 backbone. The recipe is the part of the preset ``fedavg`` that fits the network:
L-BFGS on the squared distance for ``lenet``, Adam on the cosine distance for ``relu``. Clients use
private images one after another; labels and the order of samples are not given. One thread.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_leakage.attacks import AttackJob, GradientInversion, OrderSearch, Strongest
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit.targets import History, Target, aggregate
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.params import add
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)
from simulations.benchmarks.attacks import CLASSES, NORMALISATION, SHAPE, load, make_network

SCHEDULES = "1x1x1,2x1x2,5x1x5,10x1x10,2x4x4,4x2x4,10x1x1"
"""Steps x batch size x images."""
HEAD = "PSNR, dB | SSIM | LPIPS | labels | objective | CPU s |\n|"


@dataclass
class Lab:
    """What all tables share."""

    gradient_map: GradientMap
    spec: InputSpec
    images: Batch
    recipe: GradientInversion
    order: OrderSearch
    evaluator: Evaluator
    clients: int
    learning_rate: float
    schedules: list[list[int]]

    def batch(self, client: int, count: int) -> Batch:
        """The private images of a client."""
        return self.images[client * count : (client + 1) * count]

    def observe(
        self,
        batch: Batch,
        schedule: LocalSchedule,
        client: int = 0,
        targets: Tensor | None = None,
        claims: int | None = None,
    ) -> Observation:
        """What the server sees, through the rounding of parameters to float32."""
        # Copies: the model may move on, what was seen may not.
        params = {name: value.clone() for name, value in self.gradient_map.params.items()}
        buffers = self.gradient_map.buffers
        delta = local_update(self.gradient_map, params, batch, schedule, buffers)
        delta = {k: (params[k] + v.detach()) - params[k] for k, v in delta.items()}
        update = Update(delta, {}, schedule, claims or len(batch))
        return Observation(1, client, params, buffers, update, Disclosure(targets=targets))

    def row(
        self,
        name: str,
        attack: GradientInversion,
        observations: Sequence[Observation],
        truths: Sequence[Batch],
        threat: ThreatModel | None = None,
    ) -> str:
        """Attack all targets in one call; means and standard deviations over targets."""
        began = time.process_time()
        threat = threat or ThreatModel()
        found = attack(AttackJob(self.gradient_map, self.spec, observations, threat))
        seconds = (time.process_time() - began) / len(observations)
        columns: dict[str, list[float]] = {}
        for reconstruction, truth in zip(found, truths, strict=True):
            for m in self.evaluator.evaluate(reconstruction, truth, self.spec).measurements:
                values = [v for v in m.values if v is not None]
                columns.setdefault(m.name, []).append(float(np.mean(values or [np.nan])))
        cells = []
        for metric, digits in (("psnr", 1), ("ssim", 2), ("lpips_squeeze", 2)):
            values = columns.get(metric, [np.nan])
            cells.append(f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}")
        cells.append(f"{100 * np.mean(columns['label_accuracy']):.0f} %")
        cells.append(f"{np.median([r.objective for r in found]):.1e}")
        return f"| {name} | {' | '.join(cells)} | {seconds:.1f} |"


def steps(lab: Lab) -> Iterator[str]:
    """Quality against local steps; labels and order searched."""
    yield f"| steps | batch | images | {HEAD}---|---|---|---|---|---|---|---|---|"
    for num_steps, batch_size, count in lab.schedules:
        schedule = LocalSchedule(lab.learning_rate, num_steps, batch_size)
        truths = [lab.batch(client, count) for client in range(lab.clients)]
        seen = [lab.observe(batch, schedule, i) for i, batch in enumerate(truths)]
        attack = replace(lab.recipe, order=lab.order)
        yield lab.row(f"{num_steps} | {batch_size} | {count}", attack, seen, truths)


def labels(lab: Lab) -> Iterator[str]:
    """What knowing, guessing or searching labels and their order is worth."""
    yield f"| steps | labels and order | {HEAD}---|---|---|---|---|---|---|---|"
    for num_steps in (2, 5):
        schedule = LocalSchedule(lab.learning_rate, num_steps, 1)
        truths = [lab.batch(client, num_steps) for client in range(lab.clients)]
        seen = [lab.observe(b, schedule, i, b.targets) for i, b in enumerate(truths)]
        known = ThreatModel(labels="known")
        for name, attack, threat in (
            ("given, of every step", lab.recipe, known),
            ("counted, ascending", lab.recipe, None),
            ("joint soft labels", replace(lab.recipe, labels="joint"), None),
            ("counted, then searched", replace(lab.recipe, order=lab.order), None),
        ):
            yield lab.row(f"{num_steps} | {name}", attack, seen, truths, threat)


def epochs(lab: Lab) -> Iterator[str]:
    """Clients that shuffle their 4 images before every epoch of 2 steps."""
    yield f"| epochs | attacker assumes | {HEAD}---|---|---|---|---|---|---|---|"
    for num_epochs in (1, 2, 5):
        truths, seen = [], []
        schedule = LocalSchedule(lab.learning_rate, 2 * num_epochs, 2)
        for client in range(lab.clients):
            batch = lab.batch(client, 4)
            stream = torch.Generator().manual_seed(client)
            order = torch.cat([torch.randperm(4, generator=stream) for _ in range(num_epochs)])
            seen.append(lab.observe(batch[order], schedule, client, claims=4))
            truths.append(batch)
        for assumed in ("repeated", "reshuffled"):
            search = replace(lab.order, epochs=assumed)
            attack = replace(lab.recipe, order=search)
            yield lab.row(f"{num_epochs} | {assumed} order", attack, seen, truths)


def views(lab: Lab) -> Iterator[str]:
    """Sums of 1, 2 and 4 clients."""
    yield f"| view | images | {HEAD}---|---|---|---|---|---|---|---|"
    searched = replace(lab.recipe, order=lab.order)
    for num_steps in (1, 2):
        schedule = LocalSchedule(lab.learning_rate, num_steps, 1)
        for size in (1, 2, 4):
            truths, seen = [], []
            for group in range(lab.clients // size):
                members = range(group * size, (group + 1) * size)
                batches = [lab.batch(client, num_steps) for client in members]
                alone = [
                    lab.observe(batch, schedule, client)
                    for client, batch in zip(members, batches, strict=True)
                ]
                target = aggregate(alone) if size > 1 else Target.of(alone[0])
                seen.append(replace(target.observation, client_id=group))
                truths.append(Batch.concatenate(batches))
            name = f"sum of {size}, {num_steps} step{'s' * (num_steps > 1)}"
            yield lab.row(f"{name} | {size * num_steps}", searched, seen, truths)


def rounds(lab: Lab) -> Iterator[str]:
    """1, 2 and 4 rounds of one client's four images, attacked jointly."""
    yield f"| view | images | {HEAD}---|---|---|---|---|---|---|---|"
    schedule = LocalSchedule(lab.learning_rate, 1, 4)
    truths = [lab.batch(client, 4) for client in range(lab.clients)]
    history, joined = History(rounds=4), {}
    for server_round in (1, 2, 3, 4):
        fresh = [lab.observe(batch, schedule, i) for i, batch in enumerate(truths)]
        targets = [Target.of(replace(o, server_round=server_round)) for o in fresh]
        joined[server_round] = [history.fuse(target).observation for target in targets]
        mean = aggregate(fresh).observation.update.delta
        _move(lab.gradient_map, mean)
    for number in (1, 2, 4):
        name = f"{number} round{'s jointly' * (number > 1)}"
        yield lab.row(f"{name} | 4", lab.recipe, joined[number], truths)


def _move(gradient_map: GradientMap, delta: dict[str, Tensor]) -> None:
    gradient_map.model.load_state_dict(add(gradient_map.params, delta), strict=False)


def main() -> None:
    """Read the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    tables = {
        "steps": steps,
        "labels": labels,
        "epochs": epochs,
        "views": views,
        "rounds": rounds,
    }
    parser.add_argument("table", choices=list(tables))
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--network", choices=["lenet", "relu"], default="lenet")
    parser.add_argument("--split", choices=["train", "test"], default="test")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--iterations", type=int, default=0, help="0: the preset's")
    parser.add_argument("--starts", type=int, default=0, help="of the order; 0: the preset's")
    parser.add_argument("--schedules", default=SCHEDULES, help="steps x batch size x images, …")
    parser.add_argument("--lpips", help="file of a SqueezeNet 1.1 backbone")
    parser.add_argument("--seed", type=int, default=0, help="of the network's weights")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = InputSpec(SHAPE, CLASSES, *NORMALISATION)
    network = make_network(given.network, spec, given.root, given.seed)
    pixels, targets = load(given.root, given.split, 0, 10 * given.clients)
    preset = load_preset("fedavg")
    assert isinstance(preset, Strongest)
    recipe = preset.attacks["euclidean" if given.network == "lenet" else "cosine"]
    assert isinstance(recipe, GradientInversion)
    assert recipe.order is not None
    if given.iterations:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, iterations=given.iterations))
    order = replace(recipe.order, starts=given.starts or recipe.order.starts)
    lab = Lab(
        GradientMap(network),
        spec,
        Batch(spec.normalize(pixels), targets),
        replace(recipe, order=None, batching="vmap"),
        order,
        Evaluator(lpips=Lpips("squeeze", given.lpips) if given.lpips else None),
        given.clients,
        given.learning_rate,
        [[int(number) for number in text.split("x")] for text in given.schedules.split(",")],
    )
    print(
        f"\n{given.network}, weights of seed {given.seed}, {given.clients} clients, CIFAR-10 "
        f"{given.split} images, learning rate {given.learning_rate}, "
        f"{recipe.optimizer.iterations} iterations, {order.starts} starts of the order.\n"
    )
    for line in tables[given.table](lab):
        print(line, flush=True)


if __name__ == "__main__":
    main()
