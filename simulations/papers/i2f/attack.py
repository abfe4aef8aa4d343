"""The two attacks of the I²F paper, on many perturbed gradients of one network at once."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flwr_leakage import load_preset
from flwr_leakage.attacks import (
    LBFGS,
    Adam,
    AttackJob,
    Cosine,
    Euclidean,
    GradientInversion,
    Normal,
)
from flwr_leakage.attacks.base import Attack
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import unravel
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)

ATTACKER = (
    "the perturbed gradient of one image, the network and the label; no prior, and no BatchNorm "
    "statistics of the batch. It does not know the perturbation"
)


def attack_of(name: str, iterations: int) -> Attack:
    """DGL or GS (Zhang et al. 2023, section 4), DGL's objective minimised better, or a preset.

    DGL: ``‖∇L(x) − g‖²``, Adam with a rate of 0.1. GS: ``1 − cos(∇L(x), g)``, Adam with a rate of
    0.1, x within the pixels [0, 1]. Both start from normal noise. That GS uses the gradient's sign
    and a tenth of the rate after 3/8, 5/8 and 7/8 of the iterations is in the authors' code only,
    which takes 24,000 iterations. ``L-BFGS`` is none of the paper's: DGL with L-BFGS in place of
    Adam, nearer to the perfect attacker of assumption 3.1 in as many iterations. Another name is
    that of one of this project's presets, whose iterations are its own.

    Raises:
        ValueError: no such attack, and no such preset.
    """
    if name == "DGL":
        return GradientInversion(
            Euclidean(), initialisation=Normal(), optimizer=Adam(iterations, 0.1), box=False
        )
    if name == "GS":
        optimizer = Adam(iterations, 0.1, sign="hard", decay="step")
        return GradientInversion(Cosine(), initialisation=Normal(), optimizer=optimizer, box=True)
    if name == "L-BFGS":
        return GradientInversion(
            Euclidean(), initialisation=Normal(), optimizer=LBFGS(iterations), box=False
        )
    return load_preset(name)


def attack_gradients(
    attack: Attack,
    network: nn.Module,
    spec: InputSpec,
    gradients: Sequence[Float[Tensor, "S P"]],
    targets: Tensor,
    seed: int,
) -> list[list[Reconstruction]]:
    """Attack V versions of S samples' gradients together.

    Args:
        attack: of ``attack_of``.
        network: all versions are of its parameters.
        spec: of the inputs.
        gradients: V times (S, P), in float32.
        targets: (S,) the labels, which the attacker is given.
        seed: of the starts; those of a sample differ between its versions.

    Returns:
        V lists of S reconstructions.
    """
    gradient_map = GradientMap(network, device=next(network.parameters()).device)
    params, buffers = gradient_map.params, gradient_map.buffers
    observations = [
        Observation(
            version,
            sample,
            params,
            buffers,
            Update(unravel(-gradient, params), buffers, LocalSchedule(1.0), 1),
            Disclosure(targets=targets[sample : sample + 1]),
        )
        for version, many in enumerate(gradients)
        for sample, gradient in enumerate(many)
    ]
    job = AttackJob(gradient_map, spec, observations, ThreatModel(labels="known"), seed)
    found = attack(job)
    count = len(targets)
    return [found[begin : begin + count] for begin in range(0, len(found), count)]


def inputs_of(found: Sequence[Reconstruction], truth: Batch) -> Float[Tensor, "S C H W"]:
    """The reconstructed inputs; NaN where an attack found none."""
    missing = torch.full_like(truth.inputs[:1], torch.nan)
    return torch.cat([missing if f.batch is None else f.batch.inputs.to(missing) for f in found])
