"""What speaks for a record's membership in an update: the published statistics, by their names.

Each gives one number a record, and a small number speaks for membership.
"""

from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.operators import sample_gradients
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch

Fallback = Literal["gradient_cosine", "gradient_difference", "loss"]
"""The statistics that use a record's label."""

FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)


GRADIENTS = 2**24
"""Numbers of single records' gradients that are held at a time, 64 MiB in single precision."""


def gradient_norms(problem: Problem, records: Batch) -> Float[Tensor, " N"]:
    """Return ‖g‖ of each record's own gradient g at the parameters that were sent.

    Args:
        problem: with BatchNorm by running statistics.
        records: inputs and labels.
    """
    size = sum(value.numel() for value in problem.params.values())
    chunk = max(1, min(32, GRADIENTS // size))
    found = []
    for start in range(0, len(records), chunk):
        part = records[start : start + chunk]
        with torch.no_grad():
            own = sample_gradients(problem.gradient_map, problem.params, part, problem.buffers)
        found.append(own.norm(dim=1).double())
    return torch.cat(found).cpu()


def gradient_products(problem: Problem, records: Batch, chunk: int = 64) -> Float[Tensor, " N"]:
    """Return ⟨g, ḡ⟩ of each record's own gradient g with the pseudo-gradient ḡ.

    By forward mode: with dz the derivative of the logits z along ḡ, it is ⟨∂L/∂z, dz⟩.

    Args:
        problem: with BatchNorm by running statistics.
        records: inputs and labels.
        chunk: records that pass through the network at a time.
    """
    gradient_map, trained = problem.gradient_map, problem.gradient_map.trained
    direction = {k: v if k in trained else torch.zeros_like(v) for k, v in problem.gradient.items()}
    found = []
    for start in range(0, len(records), chunk):
        part = records[start : start + chunk]
        if gradient_map.one_by_one:
            own = sample_gradients(gradient_map, problem.params, part, problem.buffers)
            found.append((own @ ravel(direction)).double())
            continue
        run = partial(gradient_map.logits, inputs=part.inputs, buffers=problem.buffers)
        logits, change = torch.func.jvp(run, (problem.params,), (direction,))[:2]

        def loss(row: Tensor, target: Tensor) -> Tensor:
            value: Tensor = gradient_map.loss(row[None], target[None])
            return value

        slopes = torch.func.vmap(torch.func.grad(loss))(logits, part.targets)
        found.append((slopes * change).double().sum(1))
    return torch.cat(found).detach().cpu()


def gradient_cosine(
    products: Float[Tensor, " N"], norms: Float[Tensor, " N"], norm: float
) -> Float[Tensor, " N"]:
    """Return ``−⟨g, ḡ⟩ / (‖g‖ ‖ḡ‖)``, the gradient cosine (Li, Li and Ribeiro, ICLR 2023).

    Example:
        >>> one = torch.ones(1)
        >>> float(gradient_cosine(3 * one, 2 * one, 1.5))
        -1.0
    """
    return -products / (norms * norm).clamp_min(1e-30)


def gradient_difference(
    products: Float[Tensor, " N"], norms: Float[Tensor, " N"], num_samples: int
) -> Float[Tensor, " N"]:
    """Return ``‖n ḡ − g‖² − ‖n ḡ‖² = ‖g‖² − 2n⟨g, ḡ⟩``, the gradient difference (likewise).

    It is negative where taking the record's gradient out of the sum n ḡ leaves less of it.

    Example:
        >>> one = torch.ones(1)
        >>> float(gradient_difference(3 * one, 2 * one, 2))
        -8.0
    """
    return norms.square() - 2 * num_samples * products


def losses(
    problem: Problem, records: Batch, *, after: bool, chunk: int = 64
) -> Float[Tensor, " N"]:
    """Return each record's loss at the parameters that came back (Yeom et al. 2018), or were sent.

    Args:
        problem: with BatchNorm by running statistics.
        records: inputs and labels.
        after: at the parameters that came back.
        chunk: records that pass through the network at a time.
    """
    rate = problem.schedule.learning_rate if after else 0.0
    after_params = {k: problem.params[k] - rate * value for k, value in problem.gradient.items()}
    found = []
    with torch.no_grad():
        for start in range(0, len(records), chunk):
            part = records[start : start + chunk]
            logits = problem.gradient_map.logits(after_params, part.inputs, problem.buffers)
            loss = problem.gradient_map.loss
            found += [
                float(loss(logits[i : i + 1], part.targets[i : i + 1])) for i in range(len(part))
            ]
    return torch.tensor(found, dtype=torch.float64)
