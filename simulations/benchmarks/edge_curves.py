"""The curves of :mod:`simulations.benchmarks.edges`: which quantity grows, and what is measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.capture import TOLERANCE, Limits, capture, check_replay
from flwr_leakage.defenses import GaussianNoise, GradientPruning
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.members import examine_observation
from flwr_leakage.models import MLP, ConvNet, LeNet, initialize
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, Update
from flwr_leakage.report.grades import EXACT_DB, RECOGNISABLE_DB
from simulations.benchmarks import (
    attacks_batches,
    attacks_normalisation,
    lab,
    membership_setup,
    portfolio_cases,
    text,
)
from simulations.benchmarks.attacks_anytime import run as run_strongest
from simulations.benchmarks.attacks_second_order import observe


@dataclass(frozen=True)
class Outcome:
    """The result of one draw: shares found, wrong calls, CPU seconds.

    Attributes:
        found: the share that was found: the solid line.
        best: the share that was found with more than that: the dashed line.
        wrong: what was called wrongly: samples called proven, certified or members by algebra that
            are not, and verdicts of a replay that break its own rule.
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
        points: values of the quantity, from where the claim holds to where it ends.
        measure: returns what came of a draw.
        device: on which it is measured, ``cpu`` or ``cuda``.
    """

    panel: str
    name: str
    points: Sequence[float]
    measure: Callable[[Draw], Outcome]
    device: str = "cpu"


@dataclass(frozen=True)
class Published:
    """A share that another paper prints.

    Attributes:
        panel: of the curves beside which it is drawn.
        name: of the attack, its authors and its setting.
        points: pairs of a value and a share.
    """

    panel: str
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    """The curves of one command.

    Attributes:
        curves: all of them.
        found: what the solid lines count.
        best: what the dashed lines count.
        published: shares of other attacks, drawn as crosses.
    """

    curves: Sequence[Curve]
    found: str
    best: str
    published: Sequence[Published] = ()


# Whole batches

SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 512)
UNITS = (8.0, 6.0, 4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
STEPS = (1, 2, 4, 8, 16)
RATE = 0.05
CELLS = "units for each sample, CIFAR-10"
OF_200 = "samples of the batch, 200 units"
OF_WIDTHS = "samples of the batch, CIFAR-10"
TAKEN = "local steps on 8 images, 200 units"
CASCADING = ((64, 0.994), (128, 0.666), (256, 0.215))
"""Shariati and Alambardar 2026 print these shares for CIFAR-10 through two layers in float64, whose
weights are N(0, 0.5²)."""

SPEAR = ((20, 0.99),)
"""Dimitrov et al. 2024 give this share of batches, through an MLP of six layers."""

CRAFTED = 16
"""Samples of a batch whose client chose them to mislead."""


def _mlp(width: int, data: str = "cifar10", classes: int = 10) -> attacks_batches.Case:
    return attacks_batches.Case("", attacks_batches.mlp(width), data, 1, classes=classes)


def _outcome(made: attacks_batches.Drawn, size: int) -> Outcome:
    return Outcome(made.exact / size, (made.proven - made.wrong) / size, made.wrong, made.seconds)


def _attacked_batch(network: nn.Module, spec: InputSpec, batch: Batch, draw: Draw) -> Outcome:
    """Attack the gradient of a batch."""
    gradient_map = GradientMap(network)
    seen = attacks_batches.observe(gradient_map, batch, attacks_batches.CASES[0])
    made = attacks_batches.attack(seen, batch, gradient_map, spec, draw.seconds)
    return _outcome(made, len(batch))


def measure_batch(case: attacks_batches.Case, draw: Draw, size: int = 0) -> Outcome:
    """Return the shares of a batch of a size that are exact, and proven."""
    case = replace(case, batch_size=size or int(draw.value))
    network, spec, batch = attacks_batches.draw(case, 0, draw.root, draw.seed)
    return _attacked_batch(network, spec, batch, draw)


def measure_cells(width: int, draw: Draw) -> Outcome:
    """Return the same for as many samples as leave each that many units of a layer."""
    return measure_batch(_mlp(width), draw, round(width / draw.value))


def measure_equal_labels(draw: Draw) -> Outcome:
    """Return the same for a batch of which every sample has the label 0."""
    case = replace(_mlp(200), batch_size=int(draw.value))
    network, spec, batch = attacks_batches.draw(case, 0, draw.root, draw.seed)
    return _attacked_batch(network, spec, replace(batch, targets=batch.targets * 0), draw)


def measure_rows(draw: Draw) -> Outcome:
    """Return the same for rows of a standardised table of 64 columns."""
    rows = attacks_normalisation.table()
    spec = InputSpec.table(rows.inputs.shape[-1], lab.CLASSES)
    torch.manual_seed(draw.seed)
    network = attacks_batches.mlp(200)(spec)
    chosen = torch.randperm(len(rows), generator=lab.generator(draw.seed))[: int(draw.value)]
    return _attacked_batch(network.eval(), spec, rows[chosen], draw)


def measure_near(draw: Draw) -> Outcome:
    """Return the same for pairs that differ by a share of their norm, with labels of their own."""
    network, spec, batch = attacks_batches.draw(
        replace(_mlp(200), batch_size=CRAFTED), 0, draw.root, draw.seed
    )
    half = batch.inputs[: CRAFTED // 2]
    change = torch.randn(half.shape, generator=lab.generator(draw.seed))
    norms = half.flatten(1).norm(dim=1) / change.flatten(1).norm(dim=1)
    near = half + draw.value * norms.reshape(-1, 1, 1, 1) * change
    return _attacked_batch(network, spec, replace(batch, inputs=torch.cat([half, near])), draw)


def measure_mixtures(draw: Draw) -> Outcome:
    """Return the same where a share of the samples are means of two others."""
    network, spec, batch = attacks_batches.draw(
        replace(_mlp(200), batch_size=CRAFTED), 0, draw.root, draw.seed
    )
    kept = CRAFTED - round(draw.value * CRAFTED)
    pairs = torch.randint(kept, (2, CRAFTED - kept), generator=lab.generator(draw.seed))
    means = batch.inputs[pairs].mean(0)
    mixed = replace(batch, inputs=torch.cat([batch.inputs[:kept], means]))
    return _attacked_batch(network, spec, mixed, draw)


def measure_dead(draw: Draw) -> Outcome:
    """Return the same where a share of the units is off for every input."""
    network, spec, batch = attacks_batches.draw(
        replace(_mlp(200), batch_size=CRAFTED), 0, draw.root, draw.seed
    )
    first = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))
    with torch.no_grad():
        first.bias[: round(draw.value * 200)] = -1e3
    return _attacked_batch(network, spec, batch, draw)


def measure_steps(
    draw: Draw, momentum: float = 0.0, weight_decay: float = 0.0, augmented: bool = False,
    adam: bool = False,
) -> Outcome:  # fmt: skip
    """Return the same after local steps of a client; the attacker is told SGD's settings.

    The truth of an augmenting client are the images of its first step, which it flips and shifts
    anew before each.
    """
    network, spec, batch = attacks_batches.draw(
        replace(_mlp(200), batch_size=8), 0, draw.root, draw.seed
    )
    gradient_map = GradientMap(network)
    params = {name: value.detach().clone() for name, value in gradient_map.params.items()}
    schedule = LocalSchedule(RATE, int(draw.value), len(batch), momentum, weight_decay)
    if adam or augmented:
        stream = lab.generator(draw.seed)
        views = [_augment(batch, stream) if augmented else batch for _ in range(schedule.num_steps)]
        settings = network.parameters()
        lab.train(network, torch.optim.Adam(settings) if adam else torch.optim.SGD(settings, RATE),
                  views)  # fmt: skip
        change = {name: v.detach() - params[name] for name, v in network.named_parameters()}
        batch = views[0]
        network.load_state_dict(params)
    else:
        change = local_update(gradient_map, params, batch, schedule)
    update = Update({k: v.detach() for k, v in change.items()}, {}, schedule, len(batch))
    seen = Observation(1, 0, params, {}, update)
    made = attacks_batches.attack(seen, batch, gradient_map, spec, draw.seconds)
    return _outcome(made, len(batch))


def _augment(batch: Batch, stream: torch.Generator) -> Batch:
    """Return each image flipped with probability ½ and shifted by up to four pixels."""
    images = []
    for image in F.pad(batch.inputs, (4, 4, 4, 4), mode="reflect"):
        flip, down, right = (int(torch.randint(n, (), generator=stream)) for n in (2, 9, 9))
        height, width = batch.inputs.shape[-2:]
        cut = image[:, down : down + height, right : right + width]
        images.append(cut.flip(-1) if flip else cut)
    return replace(batch, inputs=torch.stack(images))


def batches() -> Figure:
    """Return curves over batches through an MLP of two layers: sizes, steps, crafted samples."""
    data: dict[str, Callable[[Draw], Outcome]] = {
        **{name: partial(measure_batch, _mlp(200, name)) for name in ("fashion_mnist", "mnist")},
        "cifar10, 100 random labels": partial(measure_batch, _mlp(200, classes=100)),
        "cifar10, one label": measure_equal_labels,
        "table of 64 columns": measure_rows,
    }
    steps: dict[str, Callable[[Draw], Outcome]] = {
        "SGD": measure_steps,
        "momentum 0.9": partial(measure_steps, momentum=0.9),
        "weight decay 1e-3": partial(measure_steps, weight_decay=1e-3),
        "augmented anew": partial(measure_steps, augmented=True),
        "Adam, taken for SGD": partial(measure_steps, adam=True),
    }
    crafted = f"of {CRAFTED} samples, 200 units"
    return Figure(
        [
            *(
                Curve(
                    OF_WIDTHS, f"{width} units", [size for size in SIZES if size <= width],
                    partial(measure_batch, _mlp(width)),
                )
                for width in (100, 200, 500, 1000, 2000)
            ),
            *(
                Curve(CELLS, f"{width} units", UNITS, partial(measure_cells, width))
                for width in (100, 200, 500)
            ),
            *(
                Curve(OF_200, name, [size for size in SIZES if size <= 200], measure)
                for name, measure in data.items()
            ),
            *(Curve(TAKEN, name, STEPS, measure) for name, measure in steps.items()),
            Curve(
                f"distance of pairs {crafted}, of the norm", "near duplicates",
                (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5), measure_near,
            ),
            Curve(f"share {crafted}", "means of two others", (0.0, 0.25, 0.5, 0.75),
                  measure_mixtures),
            Curve(f"share {crafted}", "units that are off", (0.0, 0.25, 0.5, 0.75, 0.9),
                  measure_dead),
        ],
        "exact",
        "exact and proven",
        [
            Published(OF_WIDTHS, "Cascading, 1000 units", CASCADING),
            Published(OF_WIDTHS, "SPEAR, 200 units", SPEAR),
        ],
    )  # fmt: skip


# Single images

NOISE = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
PRUNED = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999)
EPOCHS = (0, 1, 3, 6, 12, 48)


def _attacked(target: portfolio_cases.Target, seconds: float) -> Outcome:
    made = run_strongest(target, seconds)
    mean_color = torch.zeros(1, *target.spec.shape)
    guess = lab.psnr(mean_color, target.pixels.inputs, target.spec)
    reached = float(made["psnr"])
    return Outcome(
        float(reached >= guess + RECOGNISABLE_DB), float(reached >= EXACT_DB), 0,
        float(made["cpu_seconds"]),
    )  # fmt: skip


def _clean(network: str, draw: Draw, setting: str = "clean") -> portfolio_cases.Target:
    """Return a target whose image is one of 600 that no setting was chosen on."""
    image = lab.REPORTED_FROM + draw.seed % 600
    case = f"{network}/1/{setting}"
    return portfolio_cases.make_target(case, draw.root, "test", image, draw.seed)


def measure_image(network: str, setting: str, draw: Draw) -> Outcome:
    """Return whether ``strongest`` finds one image, under noise, pruning or local steps."""
    case = f"{setting}-{draw.value:g}" if draw.value else "clean"
    return _attacked(_clean(network, draw, case), draw.seconds)


FORMATS = {52: torch.float64, 23: torch.float32, 10: torch.float16, 7: torch.bfloat16}
"""Formats of numbers by the bits of their mantissa."""


def measure_format(network: str, draw: Draw) -> Outcome:
    """Return whether ``strongest`` finds one image in a gradient of another number format."""
    target = _clean(network, draw)
    kind = FORMATS[int(draw.value)]
    if kind == torch.float64:
        private = lab.normalize(target.pixels, target.spec)
        private = replace(private, inputs=private.inputs.double())
        seen, _ = observe(target.network.double(), private, "clean", draw.seed, draw.seed)
        return _attacked(replace(target, seen=seen), draw.seconds)
    sent = {name: v.to(kind).float() for name, v in target.seen.update.delta.items()}
    update = replace(target.seen.update, delta=sent)
    return _attacked(replace(target, seen=replace(target.seen, update=update)), draw.seconds)


def measure_built(make: Callable[[lab.Shape, int], nn.Module], draw: Draw) -> Outcome:
    """Return whether ``strongest`` finds one image through a network of a width or a depth."""
    target = _clean("mlp", draw)
    channels, height, width = target.spec.shape
    torch.manual_seed(draw.seed)  # layers draw their weights from the global stream
    network = make((channels, height, width), int(draw.value)).eval()
    private = lab.normalize(target.pixels, target.spec)
    seen, _ = observe(network, private, "clean", draw.seed, draw.seed)
    return _attacked(replace(target, network=network, seen=seen), draw.seconds)


def _lenet(shape: lab.Shape, channels: int) -> nn.Module:
    network = LeNet(shape, lab.CLASSES, channels, num_convolutions=3)
    return initialize(network, "uniform", lab.generator(torch.initial_seed()))


def _deep_convnet(shape: lab.Shape, depth: int) -> nn.Module:
    more = (2,) * (depth - 1)
    return ConvNet(
        shape, lab.CLASSES, 16, (1, *more), (1, *(2, 2, *(1,) * depth)[: depth - 1]), (),
        use_batch_norm=False,
    )  # fmt: skip


WIDTHS = (64, 32, 16, 8, 4, 2, 1)
DEPTHS = (1, 2, 4, 8, 16, 32)


def measure_trained(network: str, draw: Draw) -> Outcome:
    """Return whether ``strongest`` finds one image after some epochs of training."""
    target = _clean(network, draw)
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
    """Return curves of one image of 16 × 16: what is done to its update, and its network."""
    settings = {
        "noise": ("noise, of the update's norm", (1e-7, *NOISE, 10.0)),
        "pruned": ("share of the update that is pruned", PRUNED),
        "steps": (f"local steps at a rate of {RATE:g}", (*STEPS, 64, 256)),
    }
    networks = {"lenet": "LeNet, sigmoid", "relu": "ReLU ConvNet", "mlp": "ReLU MLP"}
    built: dict[str, dict[str, tuple[Sequence[int], Callable[[lab.Shape, int], nn.Module]]]] = {
        "units or channels of a layer": {
            networks["lenet"]: (WIDTHS, _lenet),
            networks["relu"]: (WIDTHS, lab.small_convnet),
            networks["mlp"]: (WIDTHS, lambda s, width: MLP(s, lab.CLASSES, (width, width))),
        },
        "layers before the last": {
            networks["relu"]: (DEPTHS, _deep_convnet),
            networks["mlp"]: (DEPTHS, lambda s, depth: MLP(s, lab.CLASSES, (256,) * depth)),
        },
    }
    return Figure(
        [
            *(
                Curve(panel, words, points, partial(measure_image, network, setting))
                for setting, (panel, points) in settings.items()
                for network, words in networks.items()
            ),
            *(
                Curve("bits of the mantissa", words, tuple(FORMATS), partial(measure_format, name))
                for name, words in networks.items()
            ),
            *(
                Curve("epochs on 4,000 images", words, EPOCHS, partial(measure_trained, network))
                for network, words in networks.items()
                if network != "lenet"  # which learns by Adam
            ),
            *(
                Curve(panel, words, points, partial(measure_built, make))
                for panel, rows in built.items()
                for words, (points, make) in rows.items()
            ),
        ],
        "recognisable",
        "exact (48.1 dB)",
    )  # fmt: skip


# Replays

Make = Callable[[Any], torch.optim.Optimizer]
PLAIN = partial(torch.optim.SGD, lr=RATE)
OPTIMIZERS: dict[str, Make] = {
    "SGD": PLAIN,
    "SGD, Nesterov, weight decay": partial(PLAIN, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
}
IMAGES = 16
"""Images of a step."""


@dataclass(frozen=True)
class Training:
    """How a client trains a small ConvNet with dropout.

    Attributes:
        make: its optimizer.
        mixed: the format of forward passes (autocast), if another than that of the weights.
        threads: of the training; a replay has one.
        device: of the training and of its replay.
    """

    make: Make = PLAIN
    mixed: torch.dtype | None = None
    threads: int = 1
    device: str = "cpu"


def _train(network: nn.Module, images: Batch, training: Training, steps: int, size: int) -> None:
    optimizer = training.make(network.parameters())
    scaler = torch.amp.GradScaler(training.device, enabled=training.mixed == torch.float16)
    for step in range(steps):
        start = step * size % len(images)
        batch = images[start : start + size]
        optimizer.zero_grad()
        enabled = training.mixed is not None
        with torch.autocast(training.device, training.mixed or torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(network(batch.inputs), batch.targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _dropping() -> nn.Module:
    return nn.Sequential(lab.small_convnet(width=8), nn.Dropout(0.1))


def measure_replay(training: Training, what: str, draw: Draw) -> Outcome:
    """Return whether a replay judges a captured training and what is sent rightly.

    A client that is honest (``steps``) is to be explained. One that adds noise of a relative size
    after its training (``noise``), or that sends the update of other images (``another``: the first
    of one step's images), is to be refused.
    """
    steps = int(draw.value) if what == "steps" else 1 if what == "another" else 4
    size = int(draw.value) if what == "another" else IMAGES
    images = lab.normalize(lab.load(draw.root, "train", draw.seed % 4000, 1025), lab.CIFAR10)
    images = Batch(images.inputs.to(training.device), images.targets.to(training.device))
    spare, images = images[1024:], images[:1024]
    torch.manual_seed(draw.seed)
    network = _dropping().to(training.device)
    received = {name: value.clone() for name, value in network.state_dict().items()}
    torch.set_num_threads(training.threads)
    torch.manual_seed(draw.seed + 1)
    with lab.Stopwatch() as watch:
        with capture(Limits(max_samples=10**6, max_bytes=2**32)) as recorder:
            _train(network, images, training, steps, size)
        torch.set_num_threads(1)
        sent = dict(network.state_dict())
        if what == "another":
            other = _dropping().to(training.device)
            other.load_state_dict(received)
            torch.manual_seed(draw.seed + 1)  # of the dropout masks, as above
            inputs = torch.cat([spare.inputs, images.inputs[1:]])
            targets = torch.cat([spare.targets, images.targets[1:]])
            _train(other, Batch(inputs, targets), training, steps, size)
            sent = dict(other.state_dict())
        elif what == "noise":
            sent = _noised(sent, received, draw)
        made = check_replay(recorder.training(), received, sent)
    residual = 1.0 if made.residual is None else made.residual
    if what == "steps":
        return Outcome(
            float(made.explains), float(residual <= 1e-6), int(not made.explains), watch.seconds
        )
    changed = what == "another" or draw.value > 2 * TOLERANCE
    return Outcome(
        float(not made.explains), float(residual > 0.1), int(made.explains and changed),
        watch.seconds,
    )  # fmt: skip


def _noised(sent: dict[str, Tensor], received: dict[str, Tensor], draw: Draw) -> dict[str, Tensor]:
    """Return what is sent plus Gaussian noise of ``draw.value`` times the update's norm."""
    noise = {name: torch.randn_like(value) for name, value in sent.items()}
    moved = torch.cat([(value - received[name]).flatten() for name, value in sent.items()]).norm()
    size = torch.cat([value.flatten() for value in noise.values()]).norm()
    factor = draw.value * moved / size
    return {name: value + factor * noise[name] for name, value in sent.items()}


def replays() -> Figure:
    """Return curves of the audit's replay: honest trainings explained, changed ones refused."""
    trainings = {name: Training(make) for name, make in OPTIMIZERS.items()}
    trainings |= {
        "SGD in bfloat16": Training(mixed=torch.bfloat16),
        "Adam, 2 threads": Training(OPTIMIZERS["Adam"], threads=2),
        "Adam, GPU": Training(OPTIMIZERS["Adam"], device="cuda"),
        "SGD in float16, GPU": Training(mixed=torch.float16, device="cuda"),
    }
    few = {name: trainings[name] for name in ("SGD", "Adam", "SGD in bfloat16")}
    panels: dict[str, tuple[str, Sequence[float], dict[str, Training]]] = {
        "steps": ("local steps of an honest client: explained", (1, 4, 16, 64, 256), trainings),
        "noise": (
            "noise after training, of the update's norm: refused",
            (1.0, 0.1, 0.01, 2e-3, 1e-3, 5e-4, 1e-4), few,
        ),
        "another": (
            "images of a step of which one is another: refused",
            (1, 4, 16, 64, 256, 1024), few,
        ),
    }  # fmt: skip
    return Figure(
        [
            Curve(panel, name, points, partial(measure_replay, training, what), training.device)
            for what, (panel, points, each) in panels.items()
            for name, training in each.items()
        ],
        "judged rightly",
        "clearly",
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
    "replays": replays,
    "membership": membership,
    "texts": texts,
}
