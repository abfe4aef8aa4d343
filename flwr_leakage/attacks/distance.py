"""What attacks judge their candidates by, whatever objective they minimised."""

import torch

from flwr_leakage.attacks.objectives.euclidean import Euclidean
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.records import Batch


def gradient_distance(problem: Problem, batch: Batch) -> float:
    """``‖g − g*‖² / ‖g*‖²`` of a candidate, the mean over the problem's rounds.

    Args:
        problem: what was observed.
        batch: the candidate, in the problem's precision.
    """
    distances = []
    with torch.no_grad():
        for posed in problem.rounds:
            gradient = simulate_gradient(
                posed.gradient_map,
                posed.params,
                posed.buffers,
                posed.schedule,
                batch,
                posed.members,
            )
            distances.append(float(Euclidean()(gradient, posed.gradient)))
    return sum(distances) / len(distances)
