"""Choose the labels that an attack assumes for its samples, by one rule for all attacks.

The threat model may grant the labels. Otherwise they are inferred from the update, by default by
:class:`AutomaticLabels`.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.labels.counts import ClassCounts
from flwr_leakage.attacks.network.linear import find_last_bias, find_last_layer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior


def idlg_label(bias_gradient: Tensor) -> Tensor:
    """Return the label (1,) of a single sample, as the class k with the smallest bias gradient.

    For one sample of logits z and label y, the gradient (K,) of the cross-entropy by the last bias
    is ``softmax(z)_k − 1[k = y]``. Only the entry of the true class is negative (Zhao, Mopuri,
    Bilen 2020, eq. 3). The smallest entry is taken, which is robust to noise.

    Example:
        >>> idlg_label(torch.tensor([0.2, -0.7, 0.5]))
        tensor([1])
    """
    return bias_gradient.argmin().reshape(1)


@dataclass(frozen=True)
class SignOfGradient:
    """The label attack iDLG for one sample (Zhao, Mopuri, Bilen 2020).

    The true class is the one with a negative entry in the gradient by the last layer's bias.
    """

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the label (1,) of the one sample, read from the last layer's gradient.

        Nothing is drawn from the generator.

        Raises:
            ValueError: the update stems from several samples, or neither a bias of the logits nor a
                last linear layer is trained.
        """
        if problem.num_samples != 1:
            raise ValueError(
                f"iDLG infers the label of 1 sample, the update stems from {problem.num_samples}."
            )
        bias = find_last_bias(problem, scaled=True)
        if bias is not None:
            return idlg_label(problem.gradient[bias].flatten())
        # Without a bias, the label is read from ∂L/∂W. Its rows are ``(softmax − onehot)_k h`` with
        # the same features h.
        weight = find_last_layer(problem).weight
        if weight not in problem.gradient_map.trained:
            raise ValueError("labels are read from the last layer's gradient, and it is frozen.")
        # The first left singular vector of ∂L/∂W is the error up to its sign. The entry of the true
        # class is the largest in magnitude, and negative with the right sign.
        error = torch.linalg.svd(problem.gradient[weight], full_matrices=False).U[:, 0]
        return idlg_label(torch.where(error[error.abs().argmax()] > 0, -error, error))


@dataclass(frozen=True)
class NearestGradient:
    """A label attack for one sample, which compares the update with gradients of other images.

    It takes the class k that maximises ``cos²(∂L(x, k)/∂θ, g*)``, averaged over some images x, for
    the observed gradient g*. In some networks, such as those whose logits are cosine similarities,
    no layer's gradient shows the label. But the label decides more of the direction of a gradient
    than the image does. For K classes, the attack computes K gradients for each image.

    Attributes:
        images: (N, C, H, W) normalised images; ``None`` for random ones.
        draws: number of random images, which are drawn from a prior of natural images.
    """

    images: Tensor | None = None
    draws: int = 8

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the label (1,) of the one sample, by comparing its update with other gradients.

        Raises:
            ValueError: the update stems from several samples.
        """
        if problem.num_samples != 1:
            raise ValueError(
                "the nearest gradient infers the label of 1 sample, the update stems from "
                f"{problem.num_samples}."
            )
        observed = ravel(problem.gradient)
        images = self.images
        if images is None:
            prior = ImagePrior.of(problem.spec)
            draws = torch.randn(self.draws, *problem.spec.shape, generator=generator).double()
            images = problem.spec.clamp(prior.inputs(draws))
        images = images.to(observed)

        def likeness(label: int) -> float:
            cosines = []
            for image in images:
                batch = Batch(image[None], torch.tensor([label]))
                found = problem.gradient_map(problem.params, batch, problem.buffers)
                own = ravel({name: found[name] for name in problem.gradient})
                cosines.append(float(torch.cosine_similarity(own, observed, dim=0)) ** 2)
            return sum(cosines) / len(cosines)

        return torch.tensor([max(range(problem.spec.num_classes), key=likeness)])


@runtime_checkable
class LabelInference(Protocol):
    """A label attack: a function that infers the labels of a batch from its update."""

    def __call__(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return class indices (B,), in ascending order, for the B samples behind an update."""
        ...


@dataclass(frozen=True)
class AutomaticLabels:
    """The default label attack: iDLG for one sample, and class counts for several samples.

    Attributes:
        otherwise: the label attack for one sample if iDLG is not possible, as the last layer is
            frozen or not linear.
        batch: the label attack for several samples.
    """

    otherwise: NearestGradient = field(default_factory=NearestGradient)
    batch: ClassCounts = field(default_factory=ClassCounts)

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the labels (B,) of the samples behind an update, in ascending order.

        Args:
            problem: the network and the update.
            generator: the generator of random numbers.
        """
        if problem.num_samples > 1:
            return self.batch(problem, generator)
        try:
            return SignOfGradient()(problem, generator)
        except ValueError:
            return self.otherwise(problem, generator)


@dataclass(frozen=True)
class AssumedTargets:
    """The targets that an attacker assumes for candidates, to compute the candidates' gradients.

    Attributes:
        values: (B,) int64 class indices, or (B, K) class probabilities in the problem's precision
            (soft labels, which can only be granted). If ``origin`` is ``variables``, they are zeros
            that are not used.
        origin: ``granted`` if the threat model grants the targets, ``inferred`` if they are
            inferred from the update, ``variables`` if they are optimised with the inputs.
    """

    values: Tensor
    origin: Literal["granted", "inferred", "variables"]

    @property
    def may_change(self) -> bool:
        """Whether a search may try other labels, because the present ones are only inferred."""
        return self.origin == "inferred"


def assume_targets(
    problem: Problem, inference: LabelInference | Literal["joint"], generator: torch.Generator
) -> AssumedTargets:
    """Return the targets that an attack assumes for a problem's B samples.

    Targets that the threat model grants, class indices or probabilities, are used unchanged.
    Otherwise class indices are inferred, or optimised with the inputs. If several rounds are
    attacked jointly, they are inferred from the latest round's update. ``inference`` is the label
    attack, or ``joint`` to optimise them.

    Raises:
        ValueError: the inference does not give B indices of the K classes.
    """
    like = problem.like
    count, classes = problem.num_samples, problem.spec.num_classes
    granted = problem.known_targets
    if granted is not None:
        precision = like.dtype if granted.is_floating_point() else torch.int64
        return AssumedTargets(granted.to(like.device, precision), "granted")
    if isinstance(inference, str):
        nothing = torch.zeros(count, dtype=torch.int64, device=like.device)
        return AssumedTargets(nothing, "variables")
    found = inference(problem, generator)
    if found.shape != (count,) or found.is_floating_point():
        raise ValueError(
            f"{type(inference).__name__} must infer {count} class indices, got "
            f"{tuple(found.shape)} of {found.dtype}."
        )
    if not 0 <= int(found.min()) <= int(found.max()) < classes:
        raise ValueError(f"inferred labels must lie in [0, {classes}), got {found.tolist()}.")
    return AssumedTargets(found.to(like.device, torch.int64), "inferred")


def answer(inputs: Float[Tensor, "B C H W"], targets: Tensor) -> Batch:
    """Return an attack's result as a batch, with floating-point numbers in torch's default
    precision.

    Targets are class indices (B,), which stay integers, or probabilities (B, K).
    """
    precision = torch.get_default_dtype()
    if targets.is_floating_point():
        targets = targets.to(precision)
    return Batch(inputs.detach().to(precision), targets)
