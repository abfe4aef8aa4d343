"""Compute published statistics of a record's membership in an update.

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

Statistic = Literal[
    "row_space",
    "outer_product",
    "gradient_likelihood",
    "gradient_cosine",
    "gradient_difference",
    "loss",
]
STATISTICS: tuple[Statistic, ...] = get_args(Statistic)

LABELLED = STATISTICS[1:]
"""The names of the statistics that need a record's label. ``outer_product`` is computed by
:func:`~flwr_leakage.members.layers.agreements`, and ``gradient_likelihood`` by
:mod:`~flwr_leakage.members.likelihood`."""


GRADIENTS = 2**24
"""The number of entries of per-sample gradients that are in memory at a time: 64 MiB in single
precision. At least one gradient and at most 32 are in memory."""


WIDTH = 2**15
"""The number of entries of a gradient's sketch, see :class:`Sketch`. Inner products of sketches
differ from those of the gradients by 1/√WIDTH = 0.6 % of the product of the gradients' lengths
(root mean square), whatever the size of the network."""


class Sketch:
    """A random linear map from P numbers to D = min(P, 32768) that keeps inner products up to a
    small error.

    Each of the P numbers is added, with a sign, to one of D sums. The sign and the sum of each
    place are drawn once, with a fixed seed (Charikar, Chen and Farach-Colton, Finding frequent
    items in data streams, 2002). If P is at most 32768 (``WIDTH``), the numbers stay as they are.

    Example:
        >>> Sketch(3)(torch.ones(1, 3)).tolist(), Sketch(2**16)(torch.ones(2, 2**16)).shape
        ([[1.0, 1.0, 1.0]], torch.Size([2, 32768]))
    """

    def __init__(self, size: int) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(0)
        drawn = size if size > WIDTH else 0
        self._sums = torch.randint(WIDTH, (drawn,), generator=generator)
        self._signs = torch.randint(2, (drawn,), generator=generator).float() * 2 - 1

    def __call__(self, vectors: Float[Tensor, "N P"]) -> Float[Tensor, "N D"]:
        """Return the sketches of N vectors, in double precision and on the CPU."""
        if self.size <= WIDTH:
            return vectors.double().cpu()
        self._sums, self._signs = self._sums.to(vectors.device), self._signs.to(vectors)
        empty = vectors.new_zeros(len(vectors), WIDTH)
        return empty.index_add_(1, self._sums, vectors * self._signs).double().cpu()


def gradient_products(
    problem: Problem, directions: Sequence[Params], records: Batch, sketched: bool = False
) -> tuple[Float[Tensor, "V N"], Float[Tensor, " N"], Float[Tensor, "N D"]]:
    """Return the inner products ⟨g, ḡ⟩ (V, N) of N records' own gradients g with the V
    pseudo-gradients ḡ in ``directions``, the norms ‖g‖ (N,), and the sketches of the gradients
    (N, D), see :class:`Sketch`; (N, 0) unless they are ``sketched``. ``problem`` is the update with
    its model at the parameters that the server sent; BatchNorm uses running statistics.
    """
    names = [name for name in problem.params if name in directions[0]]
    along = torch.stack([ravel({k: each[k] for k in names}) for each in directions], 1)
    chunk = max(1, min(32, GRADIENTS // len(along)))
    shorten = Sketch(len(along)) if sketched else None
    products, norms, sketches = [], [], []
    for start in range(0, len(records), chunk):
        part = records[start : start + chunk]
        with torch.no_grad():
            own = sample_gradients(
                problem.gradient_map, problem.params, part, problem.buffers, names
            )
        products.append((own @ along).T.double())
        norms.append(own.norm(dim=1).double())
        sketches.append(shorten(own) if shorten else torch.zeros(len(part), 0).double())
    return torch.cat(products, 1).cpu(), torch.cat(norms).cpu(), torch.cat(sketches)


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
    given ⟨g, ḡ⟩ and ‖g‖ for each record's gradient g, and n. The result is negative if the sum n ḡ
    of the n samples' gradients becomes shorter when g is subtracted.

    Example:
        >>> one = torch.ones(1)
        >>> float(gradient_difference(3 * one, 2 * one, 2))
        -8.0
    """
    return norms.square() - 2 * num_samples * products


def losses(problem: Problem, records: Batch, *, after: bool) -> Float[Tensor, " N"]:
    """Return each record's loss (N,) at the parameters before training; or, if ``after``, at those
    that the client sent back (Yeom et al. 2018). ``problem`` is the update with its model, whose
    BatchNorm uses running statistics.
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
