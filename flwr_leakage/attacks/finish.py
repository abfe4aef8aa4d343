"""Attacks that continue from a candidate of another attack."""

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

    The attack that finds the neighbourhood of the samples (from grey, with a prior) need not be the
    one that converges there. On smooth networks L-BFGS on the plain distance converges, and so do
    second-order steps if the Jacobian is small enough. With ReLUs, the least absolute residual
    converges.

    Attributes:
        attack: the attack that continues; the candidate replaces its start and its labels.
    """

    attack: GradientInversion | LeastAbsolute | DenseGaussNewton

    def __call__(
        self, job: AttackJob, candidate: Batch, progress: ProgressCallback | None = None
    ) -> Reconstruction:
        """Return the reconstruction of the job's only observation from a candidate.

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
    """Return the candidate's samples in the order of the granted labels, if these are classes.

    Exact attacks sort their samples by label. The next attack pairs them with the granted labels.
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
    """The initialisation by the candidate's inputs."""

    inputs: Tensor

    def __call__(
        self, spec: InputSpec, num_samples: int, restart: int, generator: torch.Generator
    ) -> Tensor:
        return self.inputs.clone()


@dataclass(frozen=True)
class _Labels:
    """The label attack that answers the candidate's labels. It is not used if they are granted."""

    targets: Tensor

    def __call__(self, problem: Problem, generator: torch.Generator) -> Tensor:
        return self.targets
