"""Where this project's own claims end: the share that an attack or a test finds, to its edge.

    python -m simulations.benchmarks.edges batches --root FOLDER --output edges
    python -m simulations.benchmarks.edges images --root FOLDER --output edges
    python -m simulations.benchmarks.edges membership --root FOLDER --output edges
    python -m simulations.benchmarks.edges texts --root FOLDER --output edges

Each command measures the curves of one figure and writes ``FIGURE.jsonl``, ``FIGURE.md`` and
``FIGURE.png`` into the folder ``--output``. A curve follows one quantity, such as the samples of an
update or the noise on it, while all else stays. At each point ``--draws`` draws have weights and
samples of their own, from seed ``--seed`` on. An interrupted command goes on where it was, and
``--draws 0`` draws what has been measured. An attack has ``--seconds`` of the CPU.

A share's interval is Clopper and Pearson's at 95 % with n the number of *draws*, as if all samples
of one update shared their fate: it is too wide rather than too narrow. The *edge* of a curve is the
interval of two neighbouring points between which its share falls below one half.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from scipy.stats import beta

from flwr_leakage.defenses import GaussianNoise, GradientPruning
from flwr_leakage.members import examine_observation
from flwr_leakage.report.grades import EXACT_DB, RECOGNISABLE_DB
from simulations.benchmarks import attacks_batches, lab, membership_setup, portfolio_cases, text
from simulations.benchmarks.attacks_anytime import run as run_strongest
from simulations.benchmarks.attacks_portfolio import read_rows
from simulations.benchmarks.attacks_second_order import observe


@dataclass(frozen=True)
class Outcome:
    """The result of one draw: shares found, wrong calls, CPU seconds.

    Attributes:
        found: the share that was found: the solid line.
        best: the share that was found with more than that: the dashed line.
        wrong: samples called proven, certified or members by algebra that are not.
        cpu_seconds: of the attack or the test.
    """

    found: float
    best: float
    wrong: int
    cpu_seconds: float


@dataclass(frozen=True)
class Draw:
    """The setting of one measurement: a point of a curve and a seed.

    Attributes:
        value: of the quantity that the curve follows.
        seed: of everything that is drawn.
        root: folder of the npz files.
        seconds: CPU seconds of an attack.
    """

    value: float
    seed: int
    root: Path
    seconds: float


@dataclass(frozen=True)
class Curve:
    """One quantity that grows while all else stays.

    Attributes:
        panel: name of the quantity; curves of one panel share their axes.
        name: of what stays.
        points: values of the quantity, rising.
        measure: returns what came of a draw.
    """

    panel: str
    name: str
    points: Sequence[float]
    measure: Callable[[Draw], Outcome]


@dataclass(frozen=True)
class Figure:
    """The curves of one command.

    Attributes:
        curves: all of them.
        found: what the solid lines count.
        best: what the dashed lines count.
    """

    curves: Sequence[Curve]
    found: str
    best: str


# Whole batches

SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192)


def measure_batch(case: attacks_batches.Case, draw: Draw) -> Outcome:
    """Return the shares of a batch that are exact, and proven."""
    size = int(draw.value)
    case = replace(case, batch_size=size)
    made = attacks_batches.attack_draw(case, 0, draw.root, draw.seed, draw.seconds)
    return Outcome(made.exact / size, (made.proven - made.wrong) / size, made.wrong, made.seconds)


def batches() -> Figure:
    """Return curves over the samples of a batch through an MLP of two layers."""

    def curve(panel: str, name: str, width: int, data: str, classes: int = 10) -> Curve:
        case = attacks_batches.Case("", attacks_batches.mlp(width), data, 1, classes=classes)
        points = [size for size in SIZES if size <= width]
        return Curve(f"samples of the batch, {panel}", name, points, partial(measure_batch, case))

    return Figure(
        [
            *(curve("CIFAR-10", f"{w} units", w, "cifar10") for w in (100, 200, 500, 1000)),
            *(curve("200 units", name, 200, name) for name in ("fashion_mnist", "mnist")),
            curve("200 units", "cifar10, 100 random labels", 200, "cifar10", 100),
        ],
        "exact",
        "exact and proven",
    )


# Single images

NOISE = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PRUNED = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
STEPS = (1, 2, 4, 8, 16)
EPOCHS = (0, 1, 3, 6, 12)


def _attacked(target: portfolio_cases.Target, seconds: float) -> Outcome:
    made = run_strongest(target, seconds)
    mean_color = torch.zeros(1, *target.spec.shape)
    guess = lab.psnr(mean_color, target.pixels.inputs, target.spec)
    reached = float(made["psnr"])
    return Outcome(
        float(reached >= guess + RECOGNISABLE_DB), float(reached >= EXACT_DB), 0,
        float(made["cpu_seconds"]),
    )  # fmt: skip


def measure_image(network: str, setting: str, draw: Draw) -> Outcome:
    """Return whether ``strongest`` finds one image, under noise, pruning or local steps."""
    case = f"{network}/1/{setting}-{draw.value:g}"
    if not draw.value:
        case = f"{network}/1/clean"
    target = portfolio_cases.make_target(case, draw.root, "test", draw.seed, draw.seed)
    return _attacked(target, draw.seconds)


def measure_trained(network: str, draw: Draw) -> Outcome:
    """Return whether ``strongest`` finds one image after some epochs of training."""
    target = portfolio_cases.make_target(
        f"{network}/1/clean", draw.root, "test", draw.seed, draw.seed
    )
    images = lab.normalize(
        portfolio_cases.load(draw.root, "train", 0, portfolio_cases.TRAINING_IMAGES, 2),
        target.spec,
    )
    model = target.network.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(int(draw.value)):
        lab.train(model, optimizer, lab.shuffled(images, portfolio_cases.BATCH_SIZE))
    private = lab.normalize(target.pixels, target.spec)
    seen, _ = observe(model.eval(), private, "clean", draw.seed, draw.seed)
    return _attacked(replace(target, seen=seen), draw.seconds)


def images() -> Figure:
    """Return curves over noise, pruning, local steps and training, of one image of 16 × 16."""
    settings = {
        "noise": ("noise, of the update's norm", NOISE),
        "pruned": ("share of the update that is pruned", PRUNED),
        "steps": ("local steps at a rate of 0.05", STEPS),
    }
    networks = {"lenet": "LeNet, sigmoid", "relu": "ReLU ConvNet", "mlp": "ReLU MLP"}
    return Figure(
        [
            *(
                Curve(panel, words, points, partial(measure_image, network, setting))
                for setting, (panel, points) in settings.items()
                for network, words in networks.items()
            ),
            *(
                Curve("epochs on 4,000 images", words, EPOCHS, partial(measure_trained, network))
                for network, words in networks.items()
                if network != "lenet"  # which learns by Adam
            ),
        ],
        "recognisable",
        "exact (48.1 dB)",
    )  # fmt: skip


# Membership

CALLED = 0.01
"""p-value up to which a record counts as found: so many strangers are, too."""


def measure_members(case: membership_setup.Case, what: str, draw: Draw) -> Outcome:
    """Return the shares of an update's records at p ≤ 0.01, and found by algebra."""
    if what == "samples":
        case = replace(case, count=int(draw.value))
    elif what == "noise":
        case = replace(case, defense=GaussianNoise(draw.value, "norm"))
    elif what == "pruned":
        case = replace(case, defense=GradientPruning(draw.value) if draw.value else None)
    else:
        case = replace(case, batch_size=16, epochs=int(draw.value), null=400)
    pictures = membership_setup.Sources(draw.root)(case.network)
    network, spec = membership_setup.make(case, pictures, draw.seed)
    members, others, null = membership_setup.split(pictures, case, spec, draw.seed)
    seen = membership_setup.released(case, network, members, draw.seed)
    made = examine_observation(
        membership_setup.mapped(network), spec, seen, membership_setup.joined(members, others),
        null, seed=draw.seed,
    )  # fmt: skip
    called = made.p_values[: case.count] <= CALLED
    return Outcome(
        float(called.double().mean()), float(made.is_exact[: case.count].double().mean()),
        int(made.is_exact[case.count :].sum()), made.cpu_seconds,
    )  # fmt: skip


def membership() -> Figure:
    """Return curves over samples, noise, pruning and epochs, of three networks."""
    settings = {
        "samples": ("samples of the step", (16, 32, 64, 96, 128, 192, 256, 512)),
        "noise": ("noise on 32 samples, of the update's norm", (0.0001, *NOISE[3:], 3.0)),
        "pruned": ("share pruned, 32 samples", PRUNED),
        "epochs": ("epochs of 2 steps, 32 samples", (1, 2, 4, 8, 16)),
    }
    networks = {"quickstart": "quickstart", "mlp": "MLP", "convnet, K = 10": "ConvNet, one head"}
    return Figure(
        [
            Curve(
                panel, words, points,
                partial(measure_members, membership_setup.Case(name, clients=1), what),
            )
            for what, (panel, points) in settings.items()
            for name, words in networks.items()
        ],
        "p ≤ 0.01",
        "by algebra",
    )  # fmt: skip


# Texts

VOCABULARY = 2000


def measure_texts(case: text.Case, what: str, draw: Draw) -> Outcome:
    """Return the share of tokens named, and of texts exact, of an update."""
    changes: dict[str, Any] = {
        "tokens": {"texts": int(draw.value)},
        "noise": {"noise": draw.value},
        "pruned": {"pruned": draw.value},
        "steps": {"steps": int(draw.value)},
    }
    case = replace(case, **changes[what])
    words = text.word_ids(VOCABULARY)
    made = text.attack_draw(
        case, VOCABULARY, lambda case, g: text.draw_words(case, words, g), draw.seed, draw.seconds
    )
    exact = sum(made.exact) / len(made.exact)
    wrong = int(made.certified and exact < 1)
    return Outcome(sum(made.named) / len(made.named), exact, wrong, made.seconds)


def texts() -> Figure:
    """Return curves over texts, noise, pruning and steps of an own transformer of width 128."""
    settings: dict[str, tuple[str, Sequence[float]]] = {
        "tokens": ("texts of 16 tokens in the batch, width 128", (1, 2, 4, 6, 7, 8, 12, 16)),
        "noise": ("noise on each entry of the gradient, 4 × 16", (1e-7, *NOISE[:-1])),
        "pruned": ("share of each tensor pruned, 4 × 16", PRUNED),
        "steps": ("local steps at a rate of 0.1, 4 × 16", STEPS),
    }
    return Figure(
        [
            Curve(
                panel, name, points,
                partial(measure_texts, text.Case(4, 16, 128, causal=causal), what),
            )
            for what, (panel, points) in settings.items()
            for name, causal in (("encoder", False), ("decoder", True))
        ],
        "tokens named",
        "texts exact",
    )  # fmt: skip


FIGURES: dict[str, Callable[[], Figure]] = {
    "batches": batches,
    "images": images,
    "membership": membership,
    "texts": texts,
}


# Rows, tables, pictures


def interval(share: float, draws: int) -> tuple[float, float]:
    """Return Clopper and Pearson's interval of a share at 95 %, by beta quantiles.

    A share need not be a multiple of 1 / ``draws``, as a draw may be found in part.
    """
    low = beta.ppf(0.025, share * draws, (1 - share) * draws + 1) if share > 0 else 0.0
    high = beta.ppf(0.975, share * draws + 1, (1 - share) * draws) if share < 1 else 1.0
    return float(low), float(high)


def points_of(
    curve: Curve, rows: Sequence[dict[str, Any]]
) -> Iterator[tuple[float, list[Outcome]]]:
    """Return each point of a curve that was measured, with its draws."""
    mine = [row for row in rows if (row["panel"], row["curve"]) == (curve.panel, curve.name)]
    for value in curve.points:
        here = [
            Outcome(**{name: row[name] for name in Outcome.__dataclass_fields__})
            for row in mine
            if row["value"] == value
        ]
        if here:
            yield value, here


def share(outcomes: Sequence[Outcome], name: str) -> float:
    """Return the mean of a share over draws."""
    return sum(getattr(each, name) for each in outcomes) / len(outcomes)


def edge(points: Sequence[tuple[float, list[Outcome]]], name: str) -> str:
    """Return in words where a share falls below one half."""
    if not points:
        return "–"
    if share(points[0][1], name) < 0.5:
        return f"below {points[0][0]:g}"
    for (before, above), (after, below) in pairwise(points):
        if share(above, name) >= 0.5 > share(below, name):
            return f"{before:g} to {after:g}"
    return f"above {points[-1][0]:g}"


def run(figure: Figure, output: Path, seeds: range, root: Path, seconds: float) -> None:
    """Measure what is missing, seed by seed, and append a row for each draw."""
    done = {(r["panel"], r["curve"], r["value"], r["seed"]) for r in read_rows(output)}
    for seed in seeds:
        for curve in figure.curves:
            for value in curve.points:
                key = (curve.panel, curve.name, value, seed)
                if key in done:
                    continue
                made = curve.measure(Draw(value, seed, root, seconds))
                about = dict(zip(("panel", "curve", "value", "seed"), key, strict=True))
                with output.open("a") as file:
                    file.write(json.dumps({**about, **asdict(made)}) + "\n")


def table(figure: Figure, rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each curve."""
    lines = []
    for curve in figure.curves:
        points = list(points_of(curve, rows))
        if not points:
            continue
        made = [each for _, outcomes in points for each in outcomes]
        counts = sorted({len(outcomes) for _, outcomes in points})
        lines.append([
            curve.panel, curve.name, "–".join(map(str, dict.fromkeys((counts[0], counts[-1])))),
            edge(points, "found"), edge(points, "best"),
            ", ".join(f"{value:g}: {share(o, 'found'):.2f}" for value, o in points),
            sum(each.wrong for each in made), f"{max(each.cpu_seconds for each in made):.1f}",
        ])  # fmt: skip
    columns = [
        "quantity", "of", "draws a point", f"half are {figure.found} up to",
        f"half are {figure.best} up to", f"share {figure.found}", "wrong", "CPU s, most",
    ]  # fmt: skip
    return lab.markdown(columns, lines)


def draw_panel(axes: Axes, figure: Figure, panel: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the curves of one quantity with shaded intervals; its values stand at equal steps."""
    curves = [curve for curve in figure.curves if curve.panel == panel]
    values = sorted({value for curve in curves for value in curve.points})
    for number, curve in enumerate(curves):
        points = list(points_of(curve, rows))
        places = [values.index(value) for value, _ in points]
        found = [share(outcomes, "found") for _, outcomes in points]
        ends = [interval(s, len(o)) for s, (_, o) in zip(found, points, strict=True)]
        color = f"C{number}"
        axes.plot(places, found, "o-", color=color, markersize=3, label=curve.name)
        axes.fill_between(places, *zip(*ends, strict=True), color=color, alpha=0.12, linewidth=0)
        best = [share(outcomes, "best") for _, outcomes in points]
        axes.plot(places, best, "--", color=color, linewidth=1)
    axes.axhline(0.5, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set_xlabel(panel)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel(f"share {figure.found} (dashed: {figure.best})", fontsize=8)
    axes.legend(fontsize=7, loc="lower left")


def picture(figure: Figure, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write all panels as one picture."""
    panels = list(dict.fromkeys(curve.panel for curve in figure.curves))
    lines = -(-len(panels) // 2)
    drawn, axes = plt.subplots(lines, 2, figsize=(11, 3.6 * lines), squeeze=False)
    for place, panel in zip(axes.flat, panels, strict=False):
        if any(row["panel"] == panel for row in rows):
            draw_panel(place, figure, panel, rows)
    for place in axes.flat[len(panels) :]:
        place.set_visible(False)
    drawn.tight_layout()
    drawn.savefig(path, dpi=100)


def main() -> None:
    """Measure one figure, then write its table and its picture."""
    parser = lab.command(__doc__)
    parser.add_argument("figure", choices=list(FIGURES))
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--output", type=Path, required=True, help="folder of rows and pictures")
    parser.add_argument("--seed", type=int, default=0, help="below 100 for development")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the CPU, an attack")
    given = lab.start(parser)
    given.output.mkdir(parents=True, exist_ok=True)
    figure, rows = FIGURES[given.figure](), given.output / f"{given.figure}.jsonl"
    run(figure, rows, range(given.seed, given.seed + given.draws), given.root, given.seconds)
    measured = read_rows(rows)
    told = table(figure, measured)
    (given.output / f"{given.figure}.md").write_text(told)
    picture(figure, measured, given.output / f"{given.figure}.png")
    print(told)


if __name__ == "__main__":
    main()
