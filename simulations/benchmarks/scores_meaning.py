"""What the I²F means: where Gauss–Newton from the truth ends on a perturbed gradient."""

import torch

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import SampleJacobian
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral import solve_damped
from simulations.benchmarks import lab
from simulations.benchmarks.scores_setup import build_model, load_batch


def section_meaning(cifar: str | None, only: str | None) -> None:
    """Gauss–Newton from the truth lands at the I²F, and how far below I_lb lies."""
    shape = (1, 28, 28)
    batch = load_batch(shape, 3, cifar)
    model = build_model("LeNet", shape)
    gradient_map = GradientMap(model)
    params = {name: value.double() for name, value in gradient_map.params.items()}
    lab.print_header(
        "sample", "noise variance", "Gauss–Newton error", "I²F, ε = 1e-9 λmax", "ratio", "I_lb"
    )
    for index in range(len(batch)):
        sample = Batch(batch.inputs[index : index + 1].double(), batch.targets[index : index + 1])
        truth = sample.inputs
        operator = SampleJacobian(gradient_map, params, sample)
        dense = operator.to_dense()[0]
        top = torch.linalg.matrix_norm(dense, 2) ** 2
        for variance in (1e-6, 1e-5, 1e-4, 1e-3):
            draw = torch.randn(operator.num_outputs, generator=lab.generator(index)).double()
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
            lab.print_row(
                index,
                f"{variance:g}",
                f"{error:.4g}",
                f"{float(influence):.4g}",
                f"{error / float(influence):.3f}",
                f"{bound:.3g}",
            )
