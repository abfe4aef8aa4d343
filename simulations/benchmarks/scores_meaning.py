"""What the scores mean: errors of Gauss–Newton, rankings of samples."""

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import SampleJacobian
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral import solve_damped
from simulations.benchmarks.scores_setup import (
    SETTINGS,
    Spectra,
    build_model,
    dense_spectra,
    generator,
    load_batch,
    operator_of,
    prepare,
    print_header,
    print_row,
)


def section_meaning(cifar: str | None, only: str | None) -> None:
    """Gauss–Newton from the truth lands at the I²F, and how far below I_lb lies."""
    shape = (1, 28, 28)
    batch = load_batch(shape, 3, cifar)
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
            for _ in range(3):
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
    """Which cheap quantity orders digits as the undamped I²F of Gaussian noise does."""
    count, draws = 32, 4
    header = ("network", "quantity", "products", f"mean Spearman with the I²F over {draws} draws")
    print_header(*header, "least … largest", "median ratio to the I²F")
    for label in ("LeNet 28", "LeNet 28 trained"):
        if only and only != label:
            continue
        model, batch = prepare(SETTINGS[label], count, cifar)
        operator = operator_of(model, batch, torch.float64)
        spectra = dense_spectra(model, batch)
        ranks: dict[str, list[float]] = {}
        ratios: dict[str, list[float]] = {}
        costs: dict[str, int] = {}
        for seed in range(draws):
            shape = (count, operator.num_outputs)
            deltas = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
            exact = spectra.influence(operator.rmatvec(deltas))
            for name, (products, values) in _candidates(operator, spectra, deltas).items():
                costs.setdefault(name, products)
                ranks.setdefault(name, []).append(float(spearmanr(values, exact).statistic))
                ratios.setdefault(name, []).append(float((values / exact).median()))
        for name, found in ranks.items():
            spread = f"{min(found):+.2f} … {max(found):+.2f}"
            same_unit = name.startswith(("I", "Krylov"))
            ratio = f"{np.mean(ratios[name]):.3g}" if same_unit else ""
            print_row(label, name, costs[name], f"{np.mean(found):+.2f}", spread, ratio)


def _candidates(
    operator: SampleJacobian, spectra: Spectra, deltas: Tensor
) -> dict[str, tuple[int, Tensor]]:
    """Products for each sample, and a value for each."""
    eigenvalues, projected = spectra.eigenvalues, operator.rmatvec(deltas)
    found = {
        "gradient norm": (0, operator.value.norm(dim=1)),
        "λmax": (10, eigenvalues[:, -1]),
        "λmin (exact)": (operator.num_inputs, eigenvalues[:, 0]),
        "I_lb": (11, projected.norm(dim=1) / eigenvalues[:, -1]),
    }
    for steps in (4, 8, 16, 32):
        solved = solve_damped(operator, deltas, (1e-12,), 0.0, steps)
        found[f"Krylov bound, {steps} steps"] = (solved.products, solved.norms[:, 0])
    for damping in (1e-2, 1e-3, 1e-4, 1e-6):
        solved = solve_damped(operator, deltas, (damping,), 1e-2, operator.num_inputs)
        found[f"I²F, ε = {damping:g} λmax"] = (solved.products, solved.norms[:, 0])
    return found
