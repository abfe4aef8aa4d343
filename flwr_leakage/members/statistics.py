"""What speaks for a record's membership in an update: the published statistics, by their names.

Each gives one number a record, and a small number speaks for membership.
"""

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


def gradient_statistics(
    problem: Problem, records: Batch, chunk: int = 16
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """The gradient cosine, the gradient difference and ‖g‖ of each record.

    With g the record's own gradient at the parameters that were sent, ḡ the pseudo-gradient and n
    the number of samples behind it, the cosine is ``−⟨g, ḡ⟩ / (‖g‖ ‖ḡ‖)`` and the difference
    ``‖n ḡ − g‖² − ‖n ḡ‖² = ‖g‖² − 2n⟨g, ḡ⟩`` (Li, Li and Ribeiro, ICLR 2023), which is
    negative where taking the record's gradient out of the sum leaves less of it.

    Args:
        problem: with BatchNorm by running statistics.
        records: inputs and labels.
        chunk: records whose gradients are held at a time.
    """
    observed = ravel(problem.gradient)
    norm = observed.norm()
    cosines, differences, norms = [], [], []
    for start in range(0, len(records), chunk):
        part = records[start : start + chunk]
        with torch.no_grad():
            own = sample_gradients(problem.gradient_map, problem.params, part, problem.buffers)
        products, sizes = (own @ observed).double(), own.norm(dim=1).double()
        cosines.append(-products / (sizes * norm).clamp_min(1e-30))
        differences.append(sizes.square() - 2 * problem.num_samples * products)
        norms.append(sizes)
    return torch.cat(cosines).cpu(), torch.cat(differences).cpu(), torch.cat(norms).cpu()


def losses(
    problem: Problem, records: Batch, *, after: bool, chunk: int = 64
) -> Float[Tensor, " N"]:
    """The loss of each record at the parameters that came back (Yeom et al. 2018), or were sent.

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


def against_others(
    cosines: Float[Tensor, "K N"], client: int
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """FedMIA-II: a client's gradient cosine of each record against those of the other clients.

    With ``cₖ`` the cosine of a record's gradient with client k's update, the other clients' are
    taken for draws of a Gaussian of a record that is no member: ``z = (cₖ − mean) / std``, and the
    p-value is its upper tail (Zhu et al., FedMIA, CVPR 2025: "all for one").

    Args:
        cosines: ``cₖ`` of K ≥ 3 clients of one round, large for members.
        client: the row whose members are sought.

    Returns:
        −z, so that small speaks for membership, and the p-values. They are calibrated as far as
        the other clients' cosines are Gaussian and none of them holds the record.

    Raises:
        ValueError: there are fewer than two other clients.
    """
    if len(cosines) < 3:
        raise ValueError(f"cosines must be of at least 3 clients, got {len(cosines)}.")
    others = torch.cat([cosines[:client], cosines[client + 1 :]]).double()
    std = others.std(0).clamp_min(1e-12)
    z = (cosines[client].double() - others.mean(0)) / std
    return -z, torch.special.ndtr(-z)
