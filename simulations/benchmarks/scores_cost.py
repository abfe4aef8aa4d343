"""Measure the CPU time of a client's default scores, for one client and for many."""

import numpy as np
import torch
from torch import nn

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Update
from simulations.benchmarks import lab
from simulations.benchmarks.scores_papers import (
    POWER_ITERATIONS,
    descend,
    matching_curvature,
    power_iteration,
)
from simulations.benchmarks.scores_setup import build_model, load_batch, operator_of


def exposure_of(model: nn.Module, batch: Batch, noise_std: float) -> tuple[GradientMap, Exposure]:
    """One step over the batch, defended by noise."""
    gradient_map = GradientMap(model)
    schedule = LocalSchedule(0.1, 1, len(batch))
    delta = local_update(gradient_map, gradient_map.params, batch, schedule, gradient_map.buffers)
    draw = lab.generator(7)
    moved = {
        k: v + 0.1 * noise_std * torch.randn(v.shape, generator=draw) for k, v in delta.items()
    }
    raw, released = (Update(d, {}, schedule, len(batch)) for d in (delta, moved))
    params, buffers = gradient_map.params, gradient_map.buffers
    return gradient_map, Exposure(params, buffers, batch, batch, raw, released)


def epochs_seconds(shape: lab.Shape, batch_size: int) -> float:
    """CPU seconds of five epochs of plain torch SGD over 320 samples, the least of three."""
    model = build_model("LeNet", shape).requires_grad_(True)
    data = load_batch(shape, 320, None)
    windows = [data[first : first + batch_size] for first in range(0, 320, batch_size)]
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    best = float("inf")
    for _ in range(3):
        with lab.Stopwatch() as clock:
            for _ in range(5):
                lab.train(model, optimizer, windows)
        best = min(best, clock.seconds)
    return best


def section_default(cifar: str | None, only: str | None) -> None:
    """The default set on eight samples of several LeNet clients, beside local training."""
    shape = (1, 28, 28)
    model = build_model("LeNet", shape)
    whole = load_batch(shape, 64, cifar)
    lab.print_header("what", "CPU ms", "note")
    for noise_std, name in ((0.0, "undefended"), (1e-2, "noise 0.01")):
        times = []
        products = 0
        for client in range(8):
            batch = whole[slice(8 * client, 8 * client + 8)]
            gradient_map, exposure = exposure_of(model, batch, noise_std)
            best = float("inf")
            for _ in range(3):
                with lab.Stopwatch() as clock:
                    found = lab.run_scores(gradient_map, exposure)
                best = min(best, clock.seconds)
            times.append(1e3 * best)
            products = sum(measured.products for measured in found)
        spread = f"{min(times):.0f} … {max(times):.0f} over 8 clients, {products} products"
        lab.print_row(f"default set, 8 samples, {name}", f"{np.mean(times):.0f}", spread)
    for batch_size in (8, 10, 16, 32):
        seconds = epochs_seconds(shape, batch_size)
        lab.print_row(
            "five epochs over 320 samples", f"{1e3 * seconds:.0f}", f"batch size {batch_size}"
        )


def published_seconds(model: nn.Module, batch: Batch) -> float:
    """CPU seconds of λmax and of the I²F at ε = 0.01 λmax by the papers' procedures."""
    gradient_map = GradientMap(model)
    spent = 0.0
    for index in range(len(batch)):
        sample = batch[index : index + 1]
        operator = operator_of(model, sample, torch.float32)
        product = matching_curvature(gradient_map, sample, operator.value)("L2")
        top, seconds = power_iteration(product, operator.num_inputs, POWER_ITERATIONS)
        delta = torch.randn(operator.value.shape, generator=lab.generator(1))
        spent += seconds + descend(operator, delta, top, 1e-2)[1]
    return spent


def section_clients(cifar: str | None, only: str | None) -> None:
    """The default set on 8 samples of each of several LeNet clients, in rounds of Flower.

    Clients share nothing, so Flower's simulation runtime scores as many at a time as it has
    processors (``engine=ray``); here they run one after the other and their CPU seconds add up.
    The papers' procedures are run on the first client of the same run.
    """
    lab.print_header(
        *("clients", "default set, CPU s a round", "CPU ms a client", "least … largest client"),
        *("the papers', CPU s of the first client", "times the default set"),
    )
    for count in (1, 4, 16, 64):
        if only and only != str(count):
            continue
        overrides = ["num_rounds=2", "attack=none", "server.test_samples=1"]
        overrides += ["client.num_examples=8", "client.batch_size=8"]
        run = lab.run_rounds(overrides, count)
        # The first round warms up.
        spent = [
            1e3 * (record.value or 0.0)
            for record in run.records
            if record.name == "score_cpu_seconds" and record.server_round == 2
        ]
        assert len(spent) == count
        theirs = published_seconds(run.experiment.network, run.experiment.client_batch(0, 2))
        lab.print_row(
            count,
            f"{sum(spent) / 1e3:.2f}",
            f"{np.mean(spent):.0f}",
            f"{min(spent):.0f} … {max(spent):.0f}",
            f"{theirs:.1f}",
            f"{1e3 * theirs / np.mean(spent):.0f}×",
        )
