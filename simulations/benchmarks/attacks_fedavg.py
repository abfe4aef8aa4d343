"""Attack updates of several local steps, sums of clients, and several rounds of one client.

    python -m simulations.benchmarks.attacks_fedavg steps --root FOLDER --network lenet
    python -m simulations.benchmarks.attacks_fedavg labels --root FOLDER --network lenet
    python -m simulations.benchmarks.attacks_fedavg epochs --root FOLDER --network lenet
    python -m simulations.benchmarks.attacks_fedavg views --root FOLDER --network lenet
    python -m simulations.benchmarks.attacks_fedavg rounds --root FOLDER --network lenet

each print a Markdown table, row by row: PSNR, SSIM, LPIPS and label accuracy of reconstructions
that are assigned to the private images by the least squared error, averaged over a client's images
first. ``FOLDER`` holds ``cifar10_test.npz`` and ``cifar10_train.npz``; ``--lpips FILE`` is a
SqueezeNet 1.1 backbone. The recipe is the part of the preset ``fedavg`` that fits the network:
L-BFGS on the squared distance for ``lenet``, Adam on the cosine distance for ``relu``. Clients use
private images one after another; labels and the order of samples are not given. One thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from flwr_leakage.attacks import GradientInversion, Strongest
from flwr_leakage.attacks.inversion.order import OrderSearch
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.audit.targets import History, Target, aggregate
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.params import add
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    ThreatModel,
)
from simulations.benchmarks import lab

SCHEDULES = "1x1x1,2x1x2,5x1x5,10x1x10,2x4x4,4x2x4,10x1x1"
"""Steps x batch size x images."""
HEAD = ("PSNR, dB", "SSIM", "LPIPS", "labels", "objective", "CPU s")
Row = tuple[object, ...]
"""Cells of a table; the first row is its head."""


@dataclass
class Study:
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

    def row(
        self,
        name: Row,
        attack: GradientInversion,
        observations: Sequence[Observation],
        truths: Sequence[Batch],
        threat: ThreatModel | None = None,
    ) -> Row:
        """Attack all targets in one call; means and standard deviations over targets."""
        found, seconds = lab.run_attack(attack, self.gradient_map, self.spec, observations, threat)
        columns: dict[str, list[float]] = {}
        for reconstruction, truth in zip(found, truths, strict=True):
            measured = lab.evaluate(reconstruction, truth, self.spec, self.evaluator)
            for metric, values in measured.items():
                columns.setdefault(metric, []).append(float(np.mean(values or [np.nan])))
        return (
            *name,
            *(
                lab.spread(columns.get(metric, []), digits)
                for metric, digits in (("psnr", 1), ("ssim", 2), ("lpips_squeeze", 2))
            ),
            f"{100 * np.mean(columns['label_accuracy']):.0f} %",
            f"{np.median([r.objective for r in found]):.1e}",
            f"{seconds / len(observations):.1f}",
        )


def steps(study: Study) -> Iterator[Row]:
    """Quality against local steps; labels and order searched."""
    yield ("steps", "batch", "images", *HEAD)
    for num_steps, batch_size, count in study.schedules:
        schedule = LocalSchedule(study.learning_rate, num_steps, batch_size)
        truths = [study.batch(client, count) for client in range(study.clients)]
        seen = [
            lab.observe(study.gradient_map, b, schedule, client_id=i) for i, b in enumerate(truths)
        ]
        attack = replace(study.recipe, order=study.order)
        yield study.row((num_steps, batch_size, count), attack, seen, truths)


def labels(study: Study) -> Iterator[Row]:
    """What knowing, guessing or searching labels and their order is worth."""
    yield ("steps", "labels and order", *HEAD)
    for num_steps in (2, 5):
        schedule = LocalSchedule(study.learning_rate, num_steps, 1)
        truths = [study.batch(client, num_steps) for client in range(study.clients)]
        told = [Disclosure(batch.targets) for batch in truths]
        seen = [
            lab.observe(study.gradient_map, b, schedule, client_id=i, disclosed=told[i])
            for i, b in enumerate(truths)
        ]
        known = ThreatModel(labels="known")
        for name, attack, threat in (
            ("given, of every step", study.recipe, known),
            ("counted, ascending", study.recipe, None),
            ("joint soft labels", replace(study.recipe, labels="joint"), None),
            ("counted, then searched", replace(study.recipe, order=study.order), None),
        ):
            yield study.row((num_steps, name), attack, seen, truths, threat)


def epochs(study: Study) -> Iterator[Row]:
    """Clients that shuffle their 4 images before every epoch of 2 steps."""
    yield ("epochs", "steps", *HEAD)
    for num_epochs in (1, 2, 5):
        truths, seen = [], []
        schedule = LocalSchedule(study.learning_rate, 2 * num_epochs, 2)
        for client in range(study.clients):
            batch = study.batch(client, 4)
            stream = lab.generator(client)
            order = torch.cat([torch.randperm(4, generator=stream) for _ in range(num_epochs)])
            seen.append(
                lab.observe(
                    study.gradient_map, batch[order], schedule, client_id=client, num_examples=4
                )
            )
            truths.append(batch)
        attack = replace(study.recipe, order=study.order)
        yield study.row((num_epochs, 2 * num_epochs), attack, seen, truths)


def views(study: Study) -> Iterator[Row]:
    """Sums of 1, 2 and 4 clients."""
    yield ("view", "images", *HEAD)
    searched = replace(study.recipe, order=study.order)
    for num_steps in (1, 2):
        schedule = LocalSchedule(study.learning_rate, num_steps, 1)
        for size in (1, 2, 4):
            truths, seen = [], []
            for group in range(study.clients // size):
                members = range(group * size, (group + 1) * size)
                batches = [study.batch(client, num_steps) for client in members]
                alone = [
                    lab.observe(study.gradient_map, batch, schedule, client_id=client)
                    for client, batch in zip(members, batches, strict=True)
                ]
                target = aggregate(alone) if size > 1 else Target.of(alone[0])
                seen.append(replace(target.observation, client_id=group))
                truths.append(Batch.concatenate(batches))
            name = f"sum of {size}, {num_steps} step{'s' * (num_steps > 1)}"
            yield study.row((name, size * num_steps), searched, seen, truths)


def rounds(study: Study) -> Iterator[Row]:
    """1, 2 and 4 rounds of one client's four images, attacked jointly."""
    yield ("view", "images", *HEAD)
    schedule = LocalSchedule(study.learning_rate, 1, 4)
    truths = [study.batch(client, 4) for client in range(study.clients)]
    history, joined = History(rounds=4), {}
    for server_round in (1, 2, 3, 4):
        fresh = [
            lab.observe(study.gradient_map, b, schedule, client_id=i) for i, b in enumerate(truths)
        ]
        targets = [Target.of(replace(o, server_round=server_round)) for o in fresh]
        joined[server_round] = [history.fuse(target).observation for target in targets]
        mean = aggregate(fresh).observation.update.delta
        _move(study.gradient_map, mean)
    for number in (1, 2, 4):
        name = f"{number} round{'s jointly' * (number > 1)}"
        yield study.row((name, 4), study.recipe, joined[number], truths)


def _move(gradient_map: GradientMap, delta: dict[str, Tensor]) -> None:
    gradient_map.model.load_state_dict(add(gradient_map.params, delta), strict=False)


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    tables = {
        "steps": steps,
        "labels": labels,
        "epochs": epochs,
        "views": views,
        "rounds": rounds,
    }
    parser.add_argument("table", choices=list(tables))
    parser.add_argument("--network", choices=["lenet", "relu"], default="lenet")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--iterations", type=int, default=0, help="0: the preset's")
    parser.add_argument("--starts", type=int, default=0, help="of the order; 0: the preset's")
    parser.add_argument("--schedules", default=SCHEDULES, help="steps x batch size x images, …")
    parser.add_argument("--lpips", help="file of a SqueezeNet 1.1 backbone")
    given = lab.start(parser)
    spec = lab.CIFAR10
    network = lab.make_network(given.network, spec, given.root, given.seed)
    images = lab.normalize(lab.load(given.root, given.split, 0, 10 * given.clients), spec)
    preset = load_preset("fedavg")
    assert isinstance(preset, Strongest)
    recipe = preset.attacks["euclidean" if given.network == "lenet" else "cosine"]
    assert isinstance(recipe, GradientInversion)
    assert recipe.order is not None
    if given.iterations:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, iterations=given.iterations))
    order = replace(recipe.order, starts=given.starts or recipe.order.starts)
    study = Study(
        GradientMap(network),
        spec,
        images,
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
    rows = tables[given.table](study)
    lab.print_header(*map(str, next(rows)))
    for row in rows:
        lab.print_row(*row)


if __name__ == "__main__":
    main()
