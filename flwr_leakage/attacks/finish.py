"""Go on from a candidate that another attack found."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.base import ProgressCallback
from flwr_leakage.attacks.inversion.dense_gauss_newton import DenseGaussNewton
from flwr_leakage.attacks.inversion.gradient_inversion import GradientInversion
from flwr_leakage.attacks.inversion.least_absolute import LeastAbsolute
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.records import Batch, InputSpec, Reconstruction


@dataclass(frozen=True)
class Finish:
    """An attack that starts from a candidate, with the candidate's labels.

    Attacks that find the neighbourhood of the samples (from grey, with a prior) need not be those
    that converge there: on smooth networks L-BFGS on the plain distance does, and second-order
    steps where the Jacobian is small enough, with ReLUs the least absolute residual.

    Attributes:
        attack: how it goes on; its start and its labels are replaced by the candidate's.
    """

    attack: GradientInversion | LeastAbsolute | DenseGaussNewton

    def __call__(
        self, job: AttackJob, candidate: Batch, progress: ProgressCallback | None = None
    ) -> Reconstruction:
        """Attack the job's only observation from a candidate.

        Raises:
            ValueError: the job has another number of observations.
        """
        if len(job.observations) != 1:
            raise ValueError(f"job must have one observation, got {len(job.observations)}.")
        problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
        candidate = in_granted_order(candidate, problem.known_targets)
        start, labels = _Start(candidate.inputs), _Labels(candidate.targets)
        attack = self.attack
        if isinstance(attack, DenseGaussNewton):
            attack = replace(attack, ahead=None)
        (result,) = replace(attack, initialisation=start, labels=labels)(job, progress)
        return result


def in_granted_order(candidate: Batch, granted: Tensor | None) -> Batch:
    """The candidate's samples in the order of the granted labels, where these are classes.

    Exact attacks sort their samples by label; the next attack pairs the granted labels with them.
    """
    classes = candidate.targets
    if granted is None or granted.shape != classes.shape:
        return candidate
    if granted.ndim != 1 or granted.is_floating_point() or classes.is_floating_point():
        return candidate
    mine, theirs = classes.argsort(stable=True), granted.argsort(stable=True)
    if not torch.equal(classes[mine], granted[theirs].to(classes)):
        return candidate
    order = torch.empty_like(mine)
    order[theirs] = mine
    return candidate[order]


@dataclass(frozen=True)
class _Start:
    """An initialisation: the candidate's inputs."""

    inputs: Tensor

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Tensor:
        return self.inputs.clone()


@dataclass(frozen=True)
class _Labels:
    """A label attack: the candidate's labels. Where labels are granted, it is not asked."""

    targets: Tensor

    def __call__(self, problem: Problem, generator: torch.Generator) -> Tensor:
        return self.targets
