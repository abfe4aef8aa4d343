"""The check of whether an exact attack takes a problem, without solving it."""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class Applicability:
    """The statement that an attack takes a problem. The attack may still fail to solve it.

    Attributes:
        gives_images: whether the attack returns images; otherwise it returns their features.
        reason: the layer or the equations that the attack uses, in words for the user.
    """

    gives_images: bool
    reason: str


class ExactAttack(OneByOne):
    """An attack that solves equations, and that can check beforehand whether a problem has them."""

    @abstractmethod
    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Return how the attack applies to a problem, without solving it.

        Args:
            problem: the network and the observed update, in float64.
            generator: draws the random probes.

        Raises:
            ValueError: the attack does not apply. The message gives the same reason as the attack.
        """


def require_single_gradient(problem: Problem, who: str) -> None:
    """Raise ``ValueError`` unless the update is the plain gradient step of one sample.

    Args:
        problem: the observed update.
        who: the name of the attack, which begins the message.
    """
    if problem.num_samples != 1 or not problem.is_single_gradient:
        decay = " with weight decay" if problem.schedule.weight_decay else ""
        raise ValueError(
            f"{who} takes 1 sample in 1 plain step, got {problem.num_samples} samples in "
            f"{problem.schedule.num_steps} steps{decay}."
        )
