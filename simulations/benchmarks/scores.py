"""Scores: accuracy against dense float64, and cost beside the papers' procedures.

    python -m simulations.benchmarks.scores --section accuracy --cifar cifar10_test.npz

prints one markdown table; RESULTS.md keeps them. The procedures of the papers are written from
the papers' text and live here, not in the package. A product is one ``matvec`` or ``rmatvec`` of
one sample; a finite-difference product of the papers (a gradient and one pullback) counts as two.
"""

# ruff: noqa: B023 (closures over a loop variable are used within the same pass)

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.models import ConvNet, LeNet, ResNet18, initialize
from flwr_leakage.operators import AngularJacobian, LinearOperator, SampleJacobian
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Update
from flwr_leakage.scores import compute_scores, default_scores
from flwr_leakage.spectral import (
    choose_smallest_eigenvalue,
    largest_eigenvalue,
    random_start,
    smallest_eigenvalue,
    solve_damped,
    spectral_sum,
)
from flwr_leakage.spectral.estimate import normalize_rows


def generator(seed: int = 0) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(seed)


def build_model(name: str, shape: tuple[int, int, int], width: int = 16) -> nn.Module:
    """Models of the field, with random weights: LeNet as Zhu et al. 2019 draw them."""
    if name == "LeNet":
        return initialize(LeNet(shape, 10, num_convolutions=3), "uniform", generator())
    if name == "ConvNet":
        small = ConvNet(shape, 10, 16, (1, 2, 2), (1, 2, 2), (), use_batch_norm=False)
        return initialize(small, "default", generator())
    return initialize(ResNet18(shape, 10, width=width), "default", generator())


def load_batch(shape: tuple[int, int, int], count: int, cifar: str | None) -> Batch:
    """Real images, pixels in [0, 1], enlarged by interpolation where the size is larger."""
    if shape[0] == 1:
        images = embedded_mnist(mean=(0.0,), std=(1.0,))[1].batch(list(range(count)))
        inputs, labels = images.inputs, images.targets
    else:
        if cifar is None:
            raise SystemExit("this section needs --cifar, an .npz with images and labels")
        with np.load(cifar, allow_pickle=False) as stored:
            inputs = torch.tensor(stored["images"][:count]).permute(0, 3, 1, 2) / 255
            labels = torch.tensor(stored["labels"][:count]).long()
    if inputs.shape[-1] != shape[-1]:
        inputs = F.interpolate(inputs, size=shape[1:], mode="bilinear")
    return Batch(inputs.contiguous(), labels)


def operator_of(model: nn.Module, batch: Batch, dtype: torch.dtype) -> SampleJacobian:
    """The Jacobian of every sample."""
    gradient_map = GradientMap(model)
    params = {name: value.to(dtype) for name, value in gradient_map.params.items()}
    return SampleJacobian(gradient_map, params, Batch(batch.inputs.to(dtype), batch.targets))


def dense_gram(operator: LinearOperator) -> Tensor:
    """JJᵀ of each sample in float64, column by column."""
    columns = [operator.gram(operator.unit(i)) for i in range(operator.num_inputs)]
    gram = torch.stack(columns, 2)
    return (gram + gram.transpose(1, 2)) / 2


def print_row(*cells: object) -> None:
    """One row of a markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def print_header(*names: str) -> None:
    """The head of a markdown table."""
    print_row(*names)
    print_row(*("---" for _ in names))


class Stopwatch:
    """CPU seconds of a block, and the products that an operator spent in it."""

    def __init__(self, operator: LinearOperator | None = None) -> None:
        self.operator = operator

    def __enter__(self) -> "Stopwatch":
        self.products = 0 if self.operator is None else -self.operator.products
        self.seconds = -time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time()
        self.products += 0 if self.operator is None else self.operator.products


SETTINGS = {
    "LeNet 28": ("LeNet", (1, 28, 28), 2),
    "LeNet 32": ("LeNet", (3, 32, 32), 2),
    "ReLU ConvNet 32": ("ConvNet", (3, 32, 32), 1),
    "ResNet-18 w16 32": ("ResNet18", (3, 32, 32), 1),
}


def matvecs_to(operator: LinearOperator, start: Tensor, exact: Tensor, error: float) -> int:
    """Products of JJᵀ until every sample's largest Ritz value is within ``error``."""
    for steps in range(2, 200):
        found = largest_eigenvalue(operator, start, 0.0, steps).estimate.value
        if bool(((found - exact) / exact).abs().max() <= error):
            return steps
    return -1


def worst(found: Tensor, exact: Tensor) -> str:
    """Largest relative error over the samples."""
    return f"{float(((found - exact) / exact).abs().max()):.1e}"


def section_accuracy(cifar: str | None, only: str | None) -> None:
    """Every estimator against dense float64."""
    print_header("model", "quantity", "exact (sample 0)", "worst error", "products", "converged")
    for label, (name, shape, count) in SETTINGS.items():
        if only and only != label:
            continue
        operator = operator_of(
            build_model(name, shape), load_batch(shape, count, cifar), torch.float64
        )
        g = operator.value
        along = operator.rmatvec(g)
        gram = dense_gram(operator)
        squared = (g**2).sum(1)[:, None, None]
        angular_gram = (gram - along[:, :, None] * along[:, None] / squared) / squared
        exact, vectors = torch.linalg.eigh(gram)
        exact_angular = torch.linalg.eigvalsh(angular_gram)
        angular = AngularJacobian(operator, g)
        draw = normalize_rows(random_start(operator, generator()))[0]
        start = normalize_rows(along)[0] + 0.1 * draw
        condition = float((exact[:, -1] / exact[:, 0].clamp_min(1e-300)).max())
        print_row(label, "λmax/λmin", f"{condition:.1e}", "", "", "")
        for quantity, op, reference in (
            ("λmax", operator, exact[:, -1]),
            ("ang_max", angular, exact_angular[:, -1]),
        ):
            at12 = largest_eigenvalue(op, start, 0.0, 12).estimate.value
            steps = matvecs_to(op, start, reference, 1e-3)
            found = largest_eigenvalue(op, start, 1e-3).estimate
            value = f"{float(reference[0]):.4g}"
            print_row(label, f"{quantity}, 12 JJᵀ products", value, worst(at12, reference), 24, "")
            print_row(label, f"{quantity} to 0.1 %", value, "≤ 1e-3", 2 * steps, "")
            converged = bool(found.converged.all())
            print_row(
                label,
                f"{quantity}, tolerance 1e-3",
                value,
                worst(found.value, reference),
                found.products,
                converged,
            )
        noise = torch.randn(operator.num_outputs, generator=generator(1), dtype=torch.float64)
        kept = g.abs() >= g.abs().quantile(0.9, dim=1, keepdim=True)
        for kind, delta in (
            ("Gaussian δ", noise[None].expand_as(g)),
            ("pruned δ", torch.where(kept, 0.0, -g)),
        ):
            projected = torch.einsum("snk,sn->sk", vectors, operator.rmatvec(delta))
            for damping in (1e-3, 1e-6):
                shifted = exact + damping * exact[:, -1:]
                reference = (projected / shifted).norm(dim=1)
                solved = solve_damped(operator, delta, (damping,), 1e-3, max_steps=1500)
                print_row(
                    label,
                    f"I²F, {kind}, ε = {damping:g} λmax",
                    f"{float(reference[0]):.4g}",
                    worst(solved.norms[:, 0], reference),
                    solved.products,
                    bool(solved.converged.all()),
                )
        for damping in (1e-2, 1e-3):
            reference = (1 / (exact + damping * exact[:, -1:])).sum(1)
            trace = spectral_sum(
                operator, lambda x, top, d=damping: 1 / (x + d * top), generator(2), 10
            ).estimate
            print_row(
                label,
                f"Σ1/(λ+ε), ε = {damping:g} λmax, 10 probes",
                f"{float(reference[0]):.4g}",
                worst(trace.value, reference),
                trace.products,
                f"own error ≤ {float(trace.residual.max()):.1%}",
            )
        lanczos = smallest_eigenvalue(operator, generator(3), 1e-2, 400).estimate
        print_row(
            label,
            "λmin, Lanczos ≤ 400 steps",
            f"{float(exact[0, 0]):.3g}",
            worst(lanczos.value, exact[:, 0]),
            lanczos.products,
            [bool(c) for c in lanczos.converged],
        )
        chosen = choose_smallest_eigenvalue(operator, generator(3), max_steps=400)
        print_row(
            label,
            f"λmin, chooser: {chosen.method}",
            f"{float(exact[0, 0]):.3g}",
            worst(chosen.value, exact[:, 0]),
            chosen.products,
            [bool(c) for c in chosen.converged],
        )


def difference_product(operator: LinearOperator, oracle: Callable, x: Tensor, v: Tensor) -> Tensor:
    """H v by a central difference of the gradient-matching loss's gradient (LAVP's text).

    ∇D(x') = J(x')(g(x') − g(x)) for D = ½‖g(x') − g(x)‖², as double backward gives it.
    """
    step = 1e-3 / float(v.norm())
    sides = []
    for sign in (1, -1):
        moved = (x + sign * step * v).detach().requires_grad_()
        matching = 0.5 * ((oracle(moved) - operator.value) ** 2).sum()
        sides.append(torch.autograd.grad(matching, moved)[0])
    return (sides[0] - sides[1]) / (2 * step)


def section_papers(cifar: str | None, only: str | None) -> None:
    """The papers' procedures beside this package's, one sample, float32 as published."""
    print_header(
        "model", "quantity", "procedure", "products", "CPU s", "relative error", "fewer products"
    )
    for label, (name, shape, _) in SETTINGS.items():
        if only and only != label:
            continue
        model, batch = build_model(name, shape), load_batch(shape, 1, cifar)
        operator = operator_of(model, batch, torch.float32)
        exactly = operator_of(model, batch, torch.float64)
        gram = dense_gram(exactly)
        exact, vectors = torch.linalg.eigh(gram)
        g = exactly.value
        along = exactly.rmatvec(g)
        squared = (g**2).sum(1)[:, None, None]
        angular_gram = (gram - along[:, :, None] * along[:, None] / squared) / squared
        exact_angular = torch.linalg.eigvalsh(angular_gram)
        gradient_map = GradientMap(model)
        x = batch.inputs.flatten(1)

        def oracle(inputs: Tensor) -> Tensor:
            shaped = Batch(inputs.reshape(batch.inputs.shape), batch.targets)
            return ravel(gradient_map(gradient_map.params, shaped))[None]

        def cosine_product(v: Tensor) -> Tensor:
            step = 1e-3 / float(v.norm())
            sides = []
            for sign in (1, -1):
                moved = (x + sign * step * v).detach().requires_grad_()
                matching = 1 - F.cosine_similarity(oracle(moved), operator.value)
                sides.append(torch.autograd.grad(matching.sum(), moved)[0])
            return (sides[0] - sides[1]) / (2 * step)

        def loss_product(v: Tensor) -> Tensor:
            return difference_product(operator, oracle, x, v)

        def power(product: Callable, iterations: int, shift: float = 0.0) -> tuple[float, float]:
            v = normalize_rows(random_start(operator, generator()))[0]
            clock = Stopwatch()
            with clock:
                for _ in range(iterations):
                    image = product(v) if not shift else shift * v - product(v)
                    value = float((v * image).sum())
                    v = normalize_rows(image)[0]
            return (shift - value if shift else value), clock.seconds

        start = normalize_rows(operator.rmatvec(operator.value))[0]
        start = start + 0.1 * normalize_rows(random_start(operator, generator()))[0]
        rows = (
            ("λmax", loss_product, operator, float(exact[0, -1])),
            (
                "ang_max",
                cosine_product,
                AngularJacobian(operator, operator.value),
                float(exact_angular[0, -1]),
            ),
        )
        for quantity, product, op, reference in rows:
            with Stopwatch() as clock:
                found = largest_eigenvalue(op, start, 1e-2).estimate
            error = abs(float(found.value) / reference - 1)
            print_row(
                label,
                quantity,
                "Lanczos",
                found.products,
                f"{clock.seconds:.3f}",
                f"{error:.1e}",
                "",
            )
            value, seconds = power(product, 100)
            ratio = f"{400 / found.products:.0f}×"
            print_row(
                label,
                quantity,
                "finite differences, power iteration × 100",
                400,
                f"{seconds:.2f}",
                f"{value / reference - 1:+.1e}",
                ratio,
            )
        with Stopwatch() as clock:
            least = choose_smallest_eigenvalue(exactly, generator(), max_steps=400)
        error = abs(float(least.value) / float(exact[0, 0]) - 1)
        state = "" if bool(least.converged.all()) else ", unresolved: bound"
        print_row(
            label,
            "λmin",
            least.method + state,
            least.products,
            f"{clock.seconds:.2f}",
            f"{error:.1e}",
            "",
        )
        value, seconds = power(loss_product, 1000, shift=float(exact[0, -1]))
        print_row(
            label,
            "λmin",
            "power iteration on λmax I − H × 1000",
            4000,
            f"{seconds:.2f}",
            f"{value / float(exact[0, 0]):.3g} × the value",
            "",
        )
        delta = torch.randn(operator.value.shape, generator=generator(1))
        projected = torch.einsum("snk,sn->sk", vectors, exactly.rmatvec(delta.double()))
        top = float(exact[0, -1])
        for damping in (1e-1, 1e-2, 1e-3):
            reference = float((projected / (exact + damping * top)).norm())
            with Stopwatch() as clock:
                solved = solve_damped(operator, delta, (damping,), 1e-2, 1000)
            error = abs(float(solved.norms) / reference - 1)
            print_row(
                label,
                f"I²F, ε = {damping:g} λmax",
                "LSQR",
                solved.products,
                f"{clock.seconds:.3f}",
                f"{error:.1e}",
                "",
            )
            target = operator.rmatvec(delta)
            solution, used = torch.zeros_like(target), 1
            with Stopwatch() as clock:
                for _ in range(4000 if name != "ResNet18" else 500):
                    slope = operator.gram(solution) + damping * top * solution - target
                    solution = solution - slope / (top * (1 + damping))
                    used += 2
                    if abs(float(solution.norm()) / reference - 1) <= max(error, 1e-3):
                        break
            gap = abs(float(solution.norm()) / reference - 1)
            print_row(
                label,
                f"I²F, ε = {damping:g} λmax",
                "gradient descent on the least squares, to the same error",
                used,
                f"{clock.seconds:.2f}",
                f"{gap:.1e}",
                f"{used / solved.products:.0f}×",
            )


def exposure_of(model: nn.Module, batch: Batch, noise_std: float) -> tuple[GradientMap, Exposure]:
    """One step over the batch, defended by noise."""
    gradient_map = GradientMap(model)
    schedule = LocalSchedule(0.1, 1, len(batch))
    delta = local_update(gradient_map, gradient_map.params, batch, schedule, gradient_map.buffers)
    draw = generator(7)
    moved = {
        k: v + 0.1 * noise_std * torch.randn(v.shape, generator=draw) for k, v in delta.items()
    }
    raw, released = (Update(d, {}, schedule, len(batch)) for d in (delta, moved))
    params, buffers = gradient_map.params, gradient_map.buffers
    return gradient_map, Exposure(params, buffers, batch, batch, raw, released)


def epochs_seconds(shape: tuple[int, int, int], batch_size: int) -> float:
    """CPU seconds of five epochs of plain torch SGD over 320 samples, the least of three."""
    model = build_model("LeNet", shape).requires_grad_(True)
    data = load_batch(shape, 320, None)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    best = float("inf")
    for _ in range(3):
        with Stopwatch() as clock:
            for _ in range(5):
                for first in range(0, 320, batch_size):
                    window = slice(first, first + batch_size)
                    optimizer.zero_grad()
                    F.cross_entropy(model(data.inputs[window]), data.targets[window]).backward()
                    optimizer.step()
        best = min(best, clock.seconds)
    return best


def section_default(cifar: str | None, only: str | None) -> None:
    """The default set on eight samples of several LeNet clients, beside local training."""
    shape = (1, 28, 28)
    model = build_model("LeNet", shape)
    whole = load_batch(shape, 64, cifar)
    print_header("what", "CPU ms", "note")
    for noise_std, name in ((0.0, "undefended"), (1e-2, "noise 0.01")):
        times = []
        products = 0
        for client in range(8):
            batch = whole[slice(8 * client, 8 * client + 8)]
            gradient_map, exposure = exposure_of(model, batch, noise_std)
            best = float("inf")
            for _ in range(3):
                with Stopwatch() as clock:
                    found = compute_scores(default_scores(), gradient_map, exposure, generator())
                best = min(best, clock.seconds)
            times.append(1e3 * best)
            products = sum(m.products for m in found)
        spread = f"{min(times):.0f} … {max(times):.0f} over 8 clients, {products} products"
        print_row(f"default set, 8 samples, {name}", f"{np.mean(times):.0f}", spread)
    for batch_size in (8, 10, 16, 32):
        seconds = epochs_seconds(shape, batch_size)
        print_row(
            "five epochs over 320 samples", f"{1e3 * seconds:.0f}", f"batch size {batch_size}"
        )


def section_batch(cifar: str | None, only: str | None) -> None:
    """One JJᵀ product of a sample, alone and in a batch."""
    shape = (1, 28, 28)
    model = build_model("LeNet", shape)
    gradient_map = GradientMap(model)
    print_header("how", "batch", "CPU ms a sample", "times cheaper")
    single = load_batch(shape, 1, cifar)

    def plain(x: Tensor) -> Tensor:
        return ravel(gradient_map(gradient_map.params, Batch(x, single.targets)))

    def naive() -> None:
        v = torch.ones_like(single.inputs)
        image = torch.func.jvp(plain, (single.inputs,), (v,))[1]
        torch.func.vjp(plain, single.inputs)[1](image)

    base = _milliseconds(naive)
    print_row("fresh jvp and vjp, one by one", 1, f"{base:.2f}", "1.0")
    for size in (1, 8, 32, 64):
        operator = operator_of(model, load_batch(shape, size, cifar), torch.float32)
        v = torch.ones(size, operator.num_inputs)
        cost = _milliseconds(lambda o=operator, v=v: o.gram(v)) / size
        print_row("this package", size, f"{cost:.3f}", f"{base / cost:.1f}")
    for size in (1, 32):
        gradient_map, exposure = exposure_of(model, load_batch(shape, size, cifar), 1e-2)
        cost = _milliseconds(
            lambda m=gradient_map, e=exposure: compute_scores(default_scores(), m, e, generator()),
            repeats=3,
        )
        print_row("whole default set", size, f"{cost / size:.1f}", "")


def _milliseconds(function: Callable, repeats: int = 20) -> float:
    function()
    with Stopwatch() as clock:
        for _ in range(repeats):
            function()
    return 1e3 * clock.seconds / repeats


SIZES = (
    ("LeNet", 28, 16, 1),
    ("LeNet", 28, 16, 64),
    ("LeNet", 32, 16, 8),
    ("LeNet", 224, 16, 4),
    ("ConvNet", 32, 16, 8),
    ("ConvNet", 224, 16, 1),
    ("ResNet18", 32, 16, 1),
    ("ResNet18", 32, 16, 8),
    ("ResNet18", 64, 16, 1),
    ("ResNet18", 32, 64, 1),
    ("ResNet18", 32, 64, 4),
)


def section_sizes(cifar: str | None, only: str | None) -> None:
    """Cost and peak memory of λmax and of I²F at ε = 0.01 λmax, each in its own process."""
    print_header(
        "model",
        "input",
        "batch",
        "CPU s λmax a sample",
        "products",
        "CPU s I²F a sample",
        "products",
        "CPU s of one gradient",
        "peak MiB (with torch)",
    )
    for entry in SIZES:
        command = [sys.executable, "-m", "simulations.benchmarks.scores", "--section", "one"]
        command += ["--only", ",".join(map(str, entry))]
        if cifar:
            command += ["--cifar", cifar]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print_row(*entry[:2], entry[3], f"failed: {done.stderr.strip().splitlines()[-1:]}")
        else:
            print(done.stdout.strip(), flush=True)


def section_one(cifar: str | None, only: str | None) -> None:
    """One row of ``sizes``."""
    name, size, width, count = (only or "").split(",")
    shape = (1 if (name, size) == ("LeNet", "28") else 3, int(size), int(size))
    model = build_model(name, shape, int(width))
    batch = load_batch(shape, int(count), cifar)
    gradient_map = GradientMap(model)

    def one_gradient() -> None:
        gradient_map(gradient_map.params, batch[:1])

    gradient = _milliseconds(one_gradient, 3) / 1e3
    operator = operator_of(model, batch, torch.float32)
    start = normalize_rows(operator.rmatvec(operator.value))[0]
    start = start + 0.1 * normalize_rows(random_start(operator, generator()))[0]
    with Stopwatch(operator) as top:
        pairs = largest_eigenvalue(operator, start, 1e-2)
    delta = torch.randn(operator.value.shape[1], generator=generator(1)).expand_as(operator.value)
    with Stopwatch(operator) as solve:
        solve_damped(operator, delta, (1e-2,), 1e-2, largest=pairs.estimate.value)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    number = int(count)
    print_row(
        f"{name} w{width}" if name == "ResNet18" else name,
        size,
        count,
        f"{top.seconds / number:.3f}",
        top.products,
        f"{solve.seconds / number:.3f}",
        solve.products,
        f"{gradient:.4f}",
        f"{peak:.0f}",
    )


def section_meaning(cifar: str | None, only: str | None) -> None:
    """Gauss–Newton from the truth lands at the I²F, and how far below I_lb lies."""
    shape = (1, 28, 28)
    batch = load_batch(shape, 4, cifar)
    model = build_model("LeNet", shape)
    gradient_map = GradientMap(model)
    params = {name: value.double() for name, value in gradient_map.params.items()}
    print_header(
        "sample", "noise variance", "Gauss–Newton error", "I²F, ε = 1e-9 λmax", "ratio", "I_lb"
    )
    for index in range(len(batch)):
        sample = Batch(batch.inputs[index : index + 1].double(), batch.targets[index : index + 1])
        truth = sample.inputs
        operator = SampleJacobian(gradient_map, params, sample)
        dense = operator.to_dense()[0]
        top = torch.linalg.matrix_norm(dense, 2) ** 2
        for variance in (1e-6, 1e-5, 1e-4, 1e-3):
            draw = torch.randn(operator.num_outputs, generator=generator(index)).double()
            delta = variance**0.5 * draw
            released = operator.value[0] + delta
            influence = solve_damped(operator, delta[None], (1e-9,), 1e-4, 784).norms
            x, jacobian = truth.clone(), dense
            for _ in range(4):
                gradient = ravel(gradient_map(params, Batch(x, sample.targets)))
                step = torch.linalg.lstsq(jacobian, released - gradient, driver="gels").solution
                x = x + step.reshape(x.shape)
                if float(step.norm()) < 1e-3 * float((x - truth).norm()):
                    break
                jacobian = SampleJacobian(
                    gradient_map, params, Batch(x, sample.targets)
                ).to_dense()[0]
            error = float((x - truth).norm())
            bound = float((dense.T @ delta).norm() / top)
            print_row(
                index,
                f"{variance:g}",
                f"{error:.4g}",
                f"{float(influence):.4g}",
                f"{error / float(influence):.3f}",
                f"{bound:.3g}",
            )


def section_ranking(cifar: str | None, only: str | None) -> None:
    """Which cheap quantity orders samples as the undamped I²F of Gaussian noise does."""
    count = 24
    batch = load_batch((1, 28, 28), count, cifar)
    operator = operator_of(build_model("LeNet", (1, 28, 28)), batch, torch.float64)
    dense = operator.to_dense()
    eigenvalues, vectors = torch.linalg.eigh(dense.transpose(1, 2) @ dense)
    ranks: dict[str, list[float]] = {}
    ratios: dict[str, float] = {}
    costs: dict[str, int] = {}
    for seed in range(4):
        delta = torch.randn(operator.num_outputs, generator=generator(seed), dtype=torch.float64)
        deltas = delta.expand(count, -1)
        projected = operator.rmatvec(deltas)
        along = torch.einsum("snk,sn->sk", vectors, projected)
        exact = (along / eigenvalues).norm(dim=1)
        found = {
            "gradient norm": (0, operator.value.norm(dim=1)),
            "λmax": (9, eigenvalues[:, -1]),
            "λmin (exact)": (operator.num_inputs, eigenvalues[:, 0]),
            "I_lb": (10, projected.norm(dim=1) / eigenvalues[:, -1]),
        }
        for steps in (4, 8, 16, 32, 64):
            solved = solve_damped(operator, deltas, (1e-12,), 0.0, steps)
            found[f"Krylov bound, {steps} steps"] = (solved.products, solved.norms[:, 0])
        for damping in (1e-1, 1e-2, 1e-3, 1e-4, 1e-6):
            name = f"I²F, ε = {damping:g} λmax"
            if seed == 0:
                costs[name] = solve_damped(operator, deltas, (damping,), 1e-2, 784).products
            shifted = eigenvalues + damping * eigenvalues[:, -1:]
            found[name] = (costs[name], (along / shifted).norm(dim=1))
        for name, (products, values) in found.items():
            costs[name] = products
            ranks.setdefault(name, []).append(float(spearmanr(values, exact).statistic))
            ratios[name] = float((values / exact).mean())
    print_header(
        "quantity",
        "products",
        "mean Spearman with the I²F",
        "over 4 noise draws",
        "ratio to the I²F",
    )
    for name, values in ranks.items():
        spread = f"{min(values):+.2f} … {max(values):+.2f}"
        same_unit = name.startswith(("I", "Krylov"))
        ratio = f"{ratios[name]:.3g}" if same_unit else ""
        print_row(name, costs[name], f"{np.mean(values):+.2f}", spread, ratio)


def main() -> None:
    """Print one section's table."""
    sections = {
        "accuracy": section_accuracy,
        "papers": section_papers,
        "default": section_default,
        "batch": section_batch,
        "sizes": section_sizes,
        "one": section_one,
        "meaning": section_meaning,
        "ranking": section_ranking,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--section", choices=sections, required=True)
    parser.add_argument("--cifar", help=".npz with images (N, 32, 32, 3) uint8 and labels")
    parser.add_argument("--only", help="one model of a section")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sections[arguments.section](arguments.cifar, arguments.only)


if __name__ == "__main__":
    main()
