"""The label of a single sample from the sign of the last layer's gradient."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from flwr_leakage.attacks.labels.last_layer import find_last_bias, find_last_layer
from flwr_leakage.attacks.problem import Problem


def idlg_label(bias_gradient: Tensor) -> Tensor:
    """Return the class (1,) whose bias gradient ``softmax(z)_k − 1[k = y]`` is negative.

    With cross-entropy and one sample, only the true class has a negative entry (Zhao, Mopuri,
    Bilen 2020, eq. 3). The function takes the smallest entry, which is robust to noise.

    Example:
        >>> idlg_label(torch.tensor([0.2, -0.7, 0.5]))
        tensor([1])
    """
    return bias_gradient.argmin().reshape(1)


@dataclass(frozen=True)
class SignOfGradient:
    """The label attack iDLG (Zhao, Mopuri, Bilen 2020) for one sample."""

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the label (1,).

        Raises:
            ValueError: the update stems from several samples, or neither a bias of the logits nor
                a last linear layer is trained.
        """
        if problem.num_samples != 1:
            raise ValueError(
                f"iDLG infers the label of 1 sample, the update stems from {problem.num_samples}."
            )
        bias = find_last_bias(problem, scaled=True)
        if bias is not None:
            return idlg_label(problem.gradient[bias].flatten())
        # Without a bias, the rows of ∂L/∂W are (softmax − onehot)_k · h with one common h.
        weight = find_last_layer(problem).weight
        if weight not in problem.gradient_map.trained:
            raise ValueError("labels are read from the last layer's gradient, and it is frozen.")
        return idlg_label(_row_coefficients(problem.gradient[weight]))


def _row_coefficients(weight_gradient: Tensor) -> Tensor:
    """Return the logit error u (K,), up to a positive factor, of a rank-one gradient u hᵀ.

    The product leaves the sign of u open. A logit error has one negative entry, which is the
    largest in magnitude.
    """
    left, _, _ = torch.linalg.svd(weight_gradient, full_matrices=False)
    error = left[:, 0]
    return torch.where(error[error.abs().argmax()] > 0, -error, error)
