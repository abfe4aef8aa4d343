"""One image off the gradient of torchvision's vision transformer, and where that ends.

    python -m simulations.benchmarks.vision_transformer --root FOLDER --seed 100 --draws 10

prints a Markdown table: for each shape and update the images of 80 dB or more, the least and the
median PSNR, the answers that are proven, proofs of images below 40 dB, and CPU seconds. Weights
are torchvision's initial ones, but the head starts at N(0, 0.02²) in place of zero. Images are
those of the CIFAR-10 test set from ``--seed`` on, enlarged where the shape asks for it. The attack
is the preset ``patches``, on one thread. With ``--base`` one image goes through ``vit_b_16`` of
224 × 224 pixels.
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


def main() -> None:
    """Attack every case."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", required=True, help="folder of the npz files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--base", action="store_true", help="vit_b_16 at 224 pixels, once")
    given = lab.start(parser)
    images = lab.read_images(lab.Path(given.root) / "cifar10_test.npz", given.seed, given.draws)
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
    for case in CASES:
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
