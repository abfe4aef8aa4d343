"""Huang et al. 2021, Table 3: the cost of recovering one image, end to end."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure

from flwr_leakage import models
from flwr_leakage.attacks import Adam, Cosine, GradientInversion, Normal, TotalVariation
from flwr_leakage.attacks.inversion.objectives import BatchNormStatistics
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.defenses import NoDefense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import initialize
from flwr_leakage.randomness import make_generator
from simulations.papers.findings import Claim, Findings, Judgement, Row
from simulations.papers.intervals import difference_interval, mean_interval
from simulations.papers.judge import by_sign
from simulations.papers.lab import Lab
from simulations.papers.victims import STRONGEST, observe

PAPER_HOURS = 0.25
"""t: GPU hours that the paper measured for a batch, 10,000 iterations on an RTX 2080 Ti."""

PAPER_BATCH = 128
PRINTED: Mapping[int, float] = {5_000: 934.48, 50_000: 46_579.01, 500_000: 4_215_524.32}
"""GPU hours against InstaHide by the client's number of images."""


@dataclass(frozen=True)
class InstaHideCost:
    """GPU hours to recover one image behind InstaHide (Huang et al. 2021, section 6).

    ``(N·T/b)·t + (n/b)·t + 10 + (1/6)·(N·T/5,000)²``: the inversion of all encodings of T epochs,
    of n more on which the similarity network is trained, that training, and the clustering and
    decoding of all encodings, which is quadratic in their number.

    Attributes:
        hours: t, for a batch.
        batch_size: b.
        epochs: T.
        similarity_encodings: n.
        similarity_hours: of training the similarity network.
        clustering_hours: for 5,000 encodings.
    """

    hours: float = PAPER_HOURS
    batch_size: int = PAPER_BATCH
    epochs: int = 50
    similarity_encodings: int = 10_000
    similarity_hours: float = 10.0
    clustering_hours: float = 1 / 6

    def inversion(self, num_images: int) -> float:
        """Hours of inverting gradients, for N images."""
        encodings = num_images * self.epochs + self.similarity_encodings
        return encodings / self.batch_size * self.hours

    def decoding(self, num_images: int) -> float:
        """Hours of everything after the inversion."""
        encodings = num_images * self.epochs
        return self.similarity_hours + self.clustering_hours * (encodings / 5000) ** 2

    def total(self, num_images: int) -> float:
        """Hours end to end.

        Example:
            >>> round(InstaHideCost().total(5000), 2)
            934.48
        """
        return self.inversion(num_images) + self.decoding(num_images)


@dataclass(frozen=True)
class EndToEndCost:
    """Huang et al. 2021, Table 3: hours to recover one image, end to end.

    The paper's formula with its constants, then with the time t of a batch that this machine takes.
    The constants after the inversion (10 h, 1/6 h) are the paper's in both. Without a defense and
    with pruning, one image costs t.

    Attributes:
        data: a name of ``Lab.data``, for the shape of the images.
        network: a class of ``flwr_leakage.models``, not trained: time does not depend on weights.
        options: its further arguments.
        batch_sizes: t is measured for each; the largest is the formula's b.
        iterations: timed; t is scaled to ``paper_iterations``.
        repetitions: of each measurement.
        paper_iterations: of a whole attack.
        seed: of the weights and images.
    """

    data: str
    network: str
    batch_sizes: Sequence[int]
    iterations: int
    repetitions: int
    options: Mapping[str, Any] = field(default_factory=dict)
    paper_iterations: int = 10_000
    seed: int = 100

    def run(self, lab: Lab) -> Findings:
        """Measure t, then apply the formula."""
        measured: dict[int, list[float]] = {}
        for size in self.batch_sizes:
            rows = lab.rows(
                f"batch {size}",
                {**asdict(self), "batch_sizes": size},
                partial(self._time, lab, size),
            )
            measured[size] = [float(row["hours"] or 0) for row in rows]
        largest = self.batch_sizes[-1]
        hours, low, high = mean_interval(measured[largest])
        low = max(low, 0.0)  # of a time
        paper, ours = InstaHideCost(), InstaHideCost(hours, largest)
        table: list[Row] = []
        for count, printed in PRINTED.items():
            table.append(
                {
                    "client's images": count,
                    "paper: none and pruning, h": PAPER_HOURS,
                    "ours: none and pruning, h": sum(measured[1]) / len(measured[1]),
                    "paper: InstaHide, h": printed,
                    "formula, paper's constants, h": paper.total(count),
                    "of it decoding, %": 100 * paper.decoding(count) / paper.total(count),
                    f"formula, our t at b = {largest}, h": ours.total(count),
                    "of ours decoding, %": 100 * ours.decoding(count) / ours.total(count),
                }
            )
        for size, values in measured.items():
            mean, below, above = mean_interval(values)
            table.append(
                {
                    "client's images": f"t, batch {size}",
                    "ours: none and pruning, h": mean,
                    "low": below,
                    "high": above,
                }
            )
        device = "GPU" if lab.device.type == "cuda" else "CPU"
        return Findings(
            table,
            self._judge(measured, hours, low, high),
            {"huang_table3": _figure(paper, ours)},
            "everything that the attack on encodings needs, mapping included, costs nothing extra.",
            (
                f"Hours of ours are {device} hours of one thread: iterations timed: "
                f"{self.iterations}, {self.repetitions} times, scaled up.",
                "The text says 493.4 and 5.5 GPU years; 4,215,524 h are 481 and 46,579 h are 5.3.",
            ),
        )

    def _time(self, lab: Lab, size: int) -> list[Row]:
        dataset = lab.data(self.data)[1]
        spec = dataset.spec
        kind = getattr(models, self.network)
        network = kind(input_shape=spec.shape, num_classes=spec.num_classes, **self.options)
        initialize(network, "default", make_generator(self.seed, purpose="initialization"))
        gradient_map = GradientMap(network.to(lab.device), batch_norm="batch", device=lab.device)
        batch = dataset.batch(torch.arange(size)).to(lab.device)
        seen = observe(gradient_map, batch, NoDefense(), self.seed, 0)
        attack = GradientInversion(
            objective=Cosine(),
            priors={
                "total_variation": TotalVariation(0.05),
                "statistics": BatchNormStatistics(1e-3),
            },
            initialisation=Normal(),
            optimizer=Adam(self.iterations, 0.1, sign="hard", decay="step"),
            batching="loop",
        )
        rows: list[Row] = []
        for _ in range(self.repetitions):
            job = AttackJob(gradient_map, spec, [seen], STRONGEST, self.seed)
            began = time.perf_counter() if lab.device.type == "cuda" else time.process_time()
            attack(job)
            now = time.perf_counter() if lab.device.type == "cuda" else time.process_time()
            seconds = (now - began) / (self.iterations + 1)  # the last iterate is evaluated too
            rows.append({"batch": size, "hours": seconds * self.paper_iterations / 3600})
        return rows

    def _judge(
        self, measured: Mapping[int, list[float]], hours: float, low: float, high: float
    ) -> tuple[Claim, ...]:
        paper, largest = InstaHideCost(), self.batch_sizes[-1]
        gap = max(abs(paper.total(n) - printed) for n, printed in PRINTED.items())
        exact = gap < 0.005
        claims = [
            Claim(
                "The formula with the paper's constants gives its three cells (Table 3): largest "
                "gap in hours, by arithmetic.",
                "0",
                gap,
                gap,
                gap,
                len(PRINTED),
                Judgement.HOLDS if exact else Judgement.DOES_NOT_HOLD,
            )
        ]
        ratios = [
            InstaHideCost(t, largest).total(5000) / (sum(measured[1]) / len(measured[1]))
            for t in (hours, low, high)
        ]
        below, above = sorted(ratios[1:])
        margin = (ratios[0] - 3000, below - 3000, above - 3000)
        claims.append(
            by_sign(
                "With InstaHide one of 5,000 images costs more than 3,000 times as much as without "
                "(section 6): ratio less 3,000, with our t.",
                "+738",
                margin,
                self.repetitions,
                1.0,
            )
        )
        shares = [
            InstaHideCost(t, largest).decoding(50_000) / InstaHideCost(t, largest).total(50_000)
            for t in (hours, high, low)
        ]
        claims.append(
            by_sign(
                "Decoding, not the inversion, is most of the cost at 50,000 images: its share less "
                "a half, with our t (Table 3).",
                f"{paper.decoding(50_000) / paper.total(50_000) - 0.5:+.2f}",
                (shares[0] - 0.5, shares[1] - 0.5, shares[2] - 0.5),
                self.repetitions,
                1.0,
            )
        )
        if len(self.batch_sizes) > 1:
            # "Hardly" is read as: the largest batch takes less than twice as long as one image.
            found = difference_interval([2 * t for t in measured[1]], measured[largest])
            claims.append(
                by_sign(
                    f"t hardly depends on the batch size (section 6): 2·t(1) less t({largest}).",
                    "+0.25",
                    found,
                    self.repetitions,
                    1.0,
                )
            )
        return tuple(claims)


def _figure(paper: InstaHideCost, ours: InstaHideCost) -> Figure:
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    sizes = [10**k for k in (3, 4, 5, 6)]
    for cost, label, colour in ((paper, "paper's t", "C1"), (ours, "our t", "C0")):
        axes.loglog(sizes, [cost.total(n) for n in sizes], color=colour, label=f"all, {label}")
        axes.loglog(
            sizes, [cost.inversion(n) for n in sizes], "--", color=colour, label="inversion"
        )
    axes.loglog(list(PRINTED), list(PRINTED.values()), "x", color="black", label="printed")
    axes.set_xlabel("the client's images N")
    axes.set_ylabel("hours to recover one")
    axes.legend(fontsize=7)
    return figure
