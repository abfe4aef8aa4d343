"""Compute published statistics of membership of a record in an update, by their names.

Each statistic is one number for a record. A small number is evidence for membership.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.operators import sample_gradients
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch

Labelled = Literal["outer_product", "gradient_cosine", "gradient_difference", "loss"]

LABELLED: tuple[Labelled, ...] = get_args(Labelled)
"""The statistics that use a record's label; ``outer_product`` is
:func:`~flwr_leakage.members.layers.agreements`."""


GRADIENTS = 2**24
"""Numbers of single records' gradients that are held at a time, 64 MiB in single precision."""


def gradient_products(
    problem: Problem, directions: Sequence[Params], records: Batch
) -> tuple[Float[Tensor, "V N"], Float[Tensor, " N"]]:
    """Return the products ⟨g, ḡ⟩ (V, N) of N records' own gradients g with the V pseudo-gradients ḡ
    in ``directions``, and the norms ‖g‖ (N,). ``problem`` is the update with its model at the
    parameters that the server sent, and BatchNorm by running statistics.
    """
    names = [name for name in problem.params if name in directions[0]]
    along = torch.stack([ravel({k: each[k] for k in names}) for each in directions], 1)
    chunk = max(1, min(32, GRADIENTS // len(along)))
    products, norms = [], []
    for start in range(0, len(records), chunk):
        part = records[start : start + chunk]
        with torch.no_grad():
            own = sample_gradients(
                problem.gradient_map, problem.params, part, problem.buffers, names
            )
        products.append((own @ along).T.double())
        norms.append(own.norm(dim=1).double())
    return torch.cat(products, 1).cpu(), torch.cat(norms).cpu()


def gradient_cosine(
    products: Float[Tensor, " N"], norms: Float[Tensor, " N"], norm: float
) -> Float[Tensor, " N"]:
    """Return ``−⟨g, ḡ⟩ / (‖g‖ ‖ḡ‖)``, the gradient cosine (Li, Li and Ribeiro, ICLR 2023), given
    ⟨g, ḡ⟩ and ‖g‖ for each record's gradient g, and ‖ḡ‖ for the update's pseudo-gradient ḡ.

    Example:
        >>> one = torch.ones(1)
        >>> float(gradient_cosine(3 * one, 2 * one, 1.5))
        -1.0
    """
    return -products / (norms * norm).clamp_min(1e-30)


def gradient_difference(
    products: Float[Tensor, " N"], norms: Float[Tensor, " N"], num_samples: int
) -> Float[Tensor, " N"]:
    """Return ``‖n ḡ − g‖² − ‖n ḡ‖² = ‖g‖² − 2n⟨g, ḡ⟩``, the gradient difference (Li et al. 2023),
    given ⟨g, ḡ⟩ and ‖g‖ for each record's gradient g, and n. It is negative if the sum n ḡ of the n
    samples' gradients is shorter without g.

    Example:
        >>> one = torch.ones(1)
        >>> float(gradient_difference(3 * one, 2 * one, 2))
        -8.0
    """
    return norms.square() - 2 * num_samples * products


def losses(problem: Problem, records: Batch, *, after: bool) -> Float[Tensor, " N"]:
    """Return each record's loss at the parameters before training or, if ``after``, at those that
    the client sent back (Yeom et al. 2018). ``problem`` is the update with its model, and BatchNorm
    by running statistics.
    """
    rate = problem.schedule.learning_rate if after else 0.0
    after_params = {k: problem.params[k] - rate * value for k, value in problem.gradient.items()}
    found = []
    with torch.no_grad():
        for start in range(0, len(records), 64):
            part = records[start : start + 64]
            logits = problem.gradient_map.logits(after_params, part.inputs, problem.buffers)
            loss = problem.gradient_map.loss
            found += [
                float(loss(logits[i : i + 1], part.targets[i : i + 1])) for i in range(len(part))
            ]
    return torch.tensor(found, dtype=torch.float64)
