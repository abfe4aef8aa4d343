"""Attack updates of several local steps on several images.

    python -m simulations.benchmarks.attacks_fedavg --root FOLDER --network lenet

prints a Markdown table, row by row: PSNR, SSIM, LPIPS and label accuracy of reconstructions that
are assigned to the private images by the least squared error, averaged over a client's images
first. ``FOLDER`` holds ``cifar10_test.npz`` and ``cifar10_train.npz``; ``--lpips FILE`` is a
SqueezeNet 1.1 backbone. The recipe is the part of the preset ``fedavg`` that fits the network:
L-BFGS on the squared distance for ``lenet``, Adam on the cosine distance for ``relu``. Clients use
private images one after another; labels and the order of samples are not given. One thread.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flwr_leakage.attacks import GradientInversion, Strongest
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation
from simulations.benchmarks import lab

SCHEDULES = "1x1x1,2x1x2,5x1x5,10x1x10,2x4x4,4x2x4,10x1x1"
"""Steps x batch size x images."""
HEAD = ("PSNR, dB", "SSIM", "LPIPS", "labels", "objective", "CPU s")
Row = tuple[object, ...]
"""Cells of a table; the first row is its head."""


@dataclass
class Study:
    """The network, the images and the attack that all rows of the table share."""

    gradient_map: GradientMap
    spec: InputSpec
    images: Batch
    recipe: GradientInversion
    evaluator: Evaluator
    clients: int
    learning_rate: float
    schedules: list[list[int]]

    def batch(self, client: int, count: int) -> Batch:
        """The private images of a client."""
        return self.images[client * count : (client + 1) * count]

    def row(self, name: Row, observations: Sequence[Observation], truths: Sequence[Batch]) -> Row:
        """Attack all targets in one call; means and standard deviations over targets."""
        found, seconds = lab.run_attack(self.recipe, self.gradient_map, self.spec, observations)
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
        yield study.row((num_steps, batch_size, count), seen, truths)


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
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
        replace(recipe, order=order, batching="vmap"),
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
    rows = steps(study)
    lab.print_header(*map(str, next(rows)))
    for row in rows:
        lab.print_row(*row)


if __name__ == "__main__":
    main()
