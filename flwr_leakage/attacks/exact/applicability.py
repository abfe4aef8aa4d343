"""What an exact attack says of a problem before it solves it."""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class Applicability:
    """An attack takes a problem. That it applies does not mean that it succeeds.

    Attributes:
        gives_images: whether it ends in images; else in features of them.
        reason: what it works on, in words.
    """

    gives_images: bool
    reason: str


class ExactAttack(OneByOne):
    """An attack that solves equations, and tells before whether a problem has them."""

    @abstractmethod
    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Whether the attack takes a problem, without solving it.

        Args:
            problem: in float64.
            generator: of random probes.

        Raises:
            ValueError: it does not; the reason in words, the same as of an attack.
        """


def require_single_gradient(problem: Problem, who: str) -> None:
    """Raise ``ValueError`` unless the update is of one sample in one plain step."""
    if problem.num_samples != 1 or not problem.is_single_gradient:
        decay = " with weight decay" if problem.schedule.weight_decay else ""
        raise ValueError(
            f"{who} takes 1 sample in 1 plain step, got {problem.num_samples} samples in "
            f"{problem.schedule.num_steps} steps{decay}."
        )
