"""One image off the gradient of torchvision's vision transformer, and where that ends.

    python -m simulations.benchmarks.vision_transformer --root FOLDER --seed 100 --draws 10

prints a Markdown table: for each shape and update the images of 80 dB or more, the least and the
median PSNR, the answers that are proven, proofs of images below 40 dB, and CPU seconds. Weights
are torchvision's initial ones, but the head starts at N(0, 0.02²) in place of zero. Images are
those of CIFAR-10's ``--split`` from ``--first`` on, enlarged where the shape asks for it.
``--rows`` takes the numbers of the table's rows, from 0. The attack is the preset ``patches``, on
one thread. With ``--base`` one image goes through ``vit_b_16`` of 224 × 224 pixels.

With ``--pairs`` two images share the update, which ``patches`` does not take. The table then has a
row for each start: what ``strongest`` finds in ``--seconds`` CPU seconds, and the images themselves
with noise on their pixels (which no attacker has: it tells how near a start must come). Each image
is polished from there on its own, so that what enters the first block's last layer lies in the span
of that layer's gradient, which has the rank of all tokens of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel, Update
from simulations.benchmarks import lab

# isort: split
from torchvision.models import VisionTransformer

CLASSES = 10


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        size: height and width of the image.
        patch: those of a patch.
        width: d.
        depth: number of blocks.
        heads: of attention.
        steps: local steps of SGD.
        noise: standard deviation of noise on the gradient.
        half: whether the gradient travels in bfloat16.
        pruned: share of each tensor's entries that are set to zero.
        dropout: rate of dropout at the client.
    """

    size: int
    patch: int
    width: int
    depth: int
    heads: int
    steps: int = 1
    noise: float = 0.0
    half: bool = False
    pruned: float = 0.0
    dropout: float = 0.0

    def __str__(self) -> str:
        """Return the row's first two cells."""
        count = (self.size // self.patch) ** 2
        how = [
            f"{self.steps} local steps at 0.1" * (self.steps > 1),
            f"noise {self.noise:g}" * bool(self.noise),
            "bfloat16" * self.half,
            f"{100 * self.pruned:g} % pruned" * bool(self.pruned),
            f"dropout {self.dropout:g}" * bool(self.dropout),
        ]
        told = ", ".join(filter(None, how)) or "plain gradient"
        shape = f"{self.size}², {count} patches of {self.patch}², width {self.width}"
        return f"{shape} | {told}"


SHAPES = [
    Case(32, 8, 48, 2, 3), Case(32, 4, 192, 4, 3), Case(32, 2, 384, 2, 6), Case(64, 8, 384, 3, 6),
]  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"steps": 4}, {"dropout": 0.1}, {"half": True}, {"noise": 1e-6}, {"noise": 1e-4},
    {"pruned": 0.5},
]  # fmt: skip
CASES = [*SHAPES, Case(32, 4, 64, 2, 4), *(replace(SHAPES[1], **change) for change in CHANGES)]


def observe(model: nn.Module, case: Case, batch: Batch, seed: int) -> Observation:
    """Return what the server sees of a client that trains on the image."""
    gradient_map = GradientMap(model)
    params, schedule = gradient_map.params, LocalSchedule(0.1, case.steps, 1)
    if case.dropout:
        torch.manual_seed(seed)
        model.train()
        found = torch.autograd.grad(
            F.cross_entropy(model(batch.inputs), batch.targets), list(model.parameters())
        )
        delta = {name: -0.1 * g for name, g in zip(params, found, strict=True)}
        model.eval()
    else:
        delta = local_update(gradient_map, params, batch, schedule)
    sent: Params = {}
    for name, value in delta.items():
        change = -value.detach() / 0.1
        if case.steps > 1:  # parameters travel in float32
            change = (params[name] - ((params[name] + value.detach()) - params[name])) - params[
                name
            ]
            change = change / 0.1
        if case.noise:
            change = change + case.noise * torch.randn_like(change)
        if case.pruned:
            limit = change.abs().flatten().kthvalue(int(case.pruned * change.numel()) or 1).values
            change = change * (change.abs() > limit)
        sent[name] = -0.1 * (change.bfloat16().float() if case.half else change)
    return Observation(1, 0, params, {}, Update(sent, {}, schedule, 1))


def run(case: Case, pixels: Tensor, label: int, seed: int) -> tuple[float, bool, float]:
    """Return the PSNR of a draw, whether it is called proven, and the CPU seconds."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        case.size, case.patch, case.depth, case.heads, case.width, 2 * case.width,
        dropout=case.dropout, num_classes=CLASSES,
    ).eval()  # fmt: skip
    nn.init.normal_(model.heads.head.weight, std=0.02)
    spec = InputSpec((3, case.size, case.size), CLASSES, lab.CIFAR10_MEAN, lab.CIFAR10_STD)
    if case.size != pixels.shape[-1]:
        pixels = F.interpolate(pixels, size=case.size, mode="bilinear").clamp(0, 1)
    batch = Batch(spec.normalize(pixels), torch.tensor([label]))
    return attacked(model, spec, batch, pixels, lambda: observe(model, case, batch, seed))


def attacked(
    model: nn.Module, spec: InputSpec, batch: Batch, pixels: Tensor, see: Callable[[], Observation]
) -> tuple[float, bool, float]:
    """Return PSNR, whether the answer is called proven, and CPU seconds of an observation."""
    job = AttackJob(GradientMap(model), spec, [see()], ThreatModel())
    with lab.Stopwatch() as watch:
        (found,) = load_preset("patches")(job)
    if found.batch is None:
        return 0.0, False, watch.seconds
    decibels = lab.psnr(found.batch.inputs, pixels, spec)
    return decibels, "proven" in found.stats.get("verdicts", ()), watch.seconds


PAIR = Case(32, 4, 192, 4, 3)
SITE = "encoder.layers.encoder_layer_0.mlp.3.weight"
"""The last layer of the first block, whose inputs are many more than the tokens."""


def polished(
    model: VisionTransformer, gradient: Tensor, tokens: int, start: Tensor, iterations: int = 300
) -> tuple[Tensor, float]:
    """Return an image (1, 3, H, W), moved until its inputs of a layer lie in the gradient's span.

    Minimises ``Σ_t ‖z_t(x) − P z_t(x)‖² / Σ_t ‖z_t(x)‖²`` over x by L-BFGS, with the inputs z_t of
    the layer ``SITE`` and the projection P on the largest right singular vectors of its gradient.

    Args:
        model: the transformer.
        gradient: (d, n) of the layer's weight.
        tokens: of the batch, the rank of the gradient.
        start: (1, 3, H, W) in model space.
        iterations: of L-BFGS.

    Returns:
        The image, and the least value of the objective.
    """
    basis = torch.linalg.svd(gradient.double(), full_matrices=False)[2][:tokens].float()
    first = model.encoder.layers[0]

    def outside(image: Tensor) -> Tensor:
        states = model._process_input(image)
        states = torch.cat([model.class_token.expand(len(image), -1, -1), states], 1)
        states = states + model.encoder.pos_embedding
        normal = first.ln_1(states)
        states = states + first.self_attention(normal, normal, normal, need_weights=False)[0]
        inputs = first.mlp[1](first.mlp[0](first.ln_2(states)))
        return (inputs - inputs @ basis.T @ basis).square().sum() / inputs.square().sum()

    image = start.contiguous().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([image], max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = outside(image)
        value.backward()
        return value

    optimizer.step(closure)
    with torch.no_grad():
        return image.detach(), float(outside(image))


def pairs(root: lab.Path, seed: int, draws: int, seconds: float) -> None:
    """Print PSNR with and without the polish, for each start."""
    starts: dict[str, list[tuple[float, ...]]] = {}
    spent = []
    for draw in range(seed, seed + draws):
        images = lab.read_images(root / "cifar10_test.npz", seed + 2 * (draw - seed), 2)
        torch.manual_seed(draw)
        model = VisionTransformer(
            PAIR.size, PAIR.patch, PAIR.depth, PAIR.heads, PAIR.width, 4 * PAIR.width,
            num_classes=CLASSES,
        ).eval()  # fmt: skip
        nn.init.normal_(model.heads.head.weight, std=0.02)
        spec = InputSpec((3, 32, 32), CLASSES, lab.CIFAR10_MEAN, lab.CIFAR10_STD)
        batch = Batch(spec.normalize(images.inputs), images.targets)
        gradient_map, schedule = GradientMap(model), LocalSchedule(0.1, 1, 2)
        delta = local_update(gradient_map, gradient_map.params, batch, schedule)
        seen = Observation(1, 0, gradient_map.params, {}, Update(delta, {}, schedule, 2))
        job = AttackJob(gradient_map, spec, [seen], ThreatModel(), max_seconds=seconds)
        with lab.Stopwatch() as watch:
            (found,) = load_preset("strongest")(job)
        spent.append(watch.seconds)
        given = {}
        if found.batch is not None:
            given["`strongest`"] = found.batch.inputs.float()
        for noise in (0.02, 0.07, 0.2):
            off = (images.inputs + noise * torch.randn_like(images.inputs)).clamp(0, 1)
            given[f"the images, noise {noise:g}"] = spec.normalize(off)
        gradient = -delta[SITE].detach() / 0.1
        tokens = 2 * (1 + (PAIR.size // PAIR.patch) ** 2)
        for name, several in given.items():
            for image in several.split(1):
                better, value = polished(model, gradient, tokens, image)
                reached = [
                    max(lab.psnr(each, truth, spec) for truth in images.inputs.split(1))
                    for each in (image, better)
                ]
                starts.setdefault(name, []).append((*reached, value))
    print("| start | images | median dB | polished: least, median dB | largest left outside |")
    print("|" + " --- |" * 5)
    for name, rows in starts.items():
        first, last, left = zip(*rows, strict=True)
        print(
            f"| {name} | {len(rows)} | {median(first):.1f} | {min(last):.1f}, {median(last):.1f} "
            f"| {max(left):.1g} |"
        )
    print(f"\n`strongest` took {mean(spent):.0f} CPU s a pair.")


def main() -> None:
    """Attack every case."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    parser.add_argument("--first", type=int, default=0, help="of the images")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(CASES)))
    parser.add_argument("--base", action="store_true", help="vit_b_16 at 224 pixels, once")
    parser.add_argument("--pairs", action="store_true", help="two images, with and without polish")
    parser.add_argument("--seconds", type=float, default=20.0, help="of strongest on a pair")
    given = lab.start(parser)
    if given.pairs:
        pairs(given.root, given.seed, given.draws, given.seconds)
        return
    images = lab.load(given.root, given.split, given.first, given.draws)
    if given.base:
        from torchvision.models import vit_b_16

        torch.manual_seed(given.seed)
        model = vit_b_16(num_classes=1000).eval()
        nn.init.normal_(model.heads.head.weight, std=0.02)
        spec = InputSpec((3, 224, 224), 1000, lab.CIFAR10_MEAN, lab.CIFAR10_STD)
        pixels = F.interpolate(images.inputs[:1], size=224, mode="bilinear").clamp(0, 1)
        batch = Batch(spec.normalize(pixels), images.targets[:1])
        found = torch.autograd.grad(
            F.cross_entropy(model(batch.inputs), batch.targets), list(model.parameters())
        )
        names = [name for name, _ in model.named_parameters()]
        delta = {name: -value for name, value in zip(names, found, strict=True)}
        params = {name: value.detach() for name, value in model.named_parameters()}
        seen = Observation(1, 0, params, {}, Update(delta, {}, LocalSchedule(1.0, 1, 1), 1))
        decibels, proven, seconds = attacked(model, spec, batch, pixels, lambda: seen)
        print(f"vit_b_16, 224²: {decibels:.1f} dB, proven {proven}, {seconds:.1f} CPU s")
        return
    print("| model | update | ≥ 80 dB | least dB | median dB | proven | wrong | CPU s |")
    print("|" + " --- |" * 8)
    for case in (CASES[row] for row in given.rows):
        rows = [
            run(case, images.inputs[[i]], int(images.targets[i]), given.seed + i)
            for i in range(given.draws)
        ]
        decibels = [row[0] for row in rows]
        wrong = sum(proven and value < 40 for value, proven, _ in rows)
        print(
            f"| {case} | {sum(value >= 80 for value in decibels)} of {len(rows)} "
            f"| {min(decibels):.1f} | {median(decibels):.1f} "
            f"| {sum(row[1] for row in rows)} of {len(rows)} | {wrong} "
            f"| {mean(row[2] for row in rows):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
