"""The features that one or more convolutions take in, solved from the convolutions' gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.relu_walk import Use
from flwr_leakage.attacks.exact.weight_equations import weight_equations


def solve_features(
    uses: Sequence[Use],
    errors: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rank_tolerance: float,
    trims: int = 3,
    contradiction: float = 5.0,
) -> Tensor:
    """The features (1, C, H, W) that one or more convolutions take in, from their weight gradients.

    This is a least-squares solution over the equations of all output channels. Where a ReLU's mask
    has a wrong entry, so has the error of its channel, and the channel's equations contradict all
    others. Such channels are left out, and the rest is solved again.

    Args:
        uses: the convolutions, at least one.
        errors: ∂L/∂outputs of each, (1, O, H', W').
        gradients: ∂L/∂W of each.
        rank_tolerance: the equations determine the features if their least singular value is at
            least this share of the largest.
        trims: how often they are solved; after each solution, contradicting channels are left out.
        contradiction: a channel contradicts a solution if its residual is above this multiple of
            the median residual.

    Raises:
        ValueError: the equations do not determine the features.
    """
    channels, height, width = uses[0].input_shape
    matrices: list[Tensor] = []
    targets: list[Tensor] = []
    for use, error, gradient in zip(uses, errors, gradients, strict=True):
        matrix, right = weight_equations(error, gradient, use.input_shape, use.geometry)
        matrices += list(matrix)
        targets += list(right)
    kept = torch.arange(len(matrices))
    for _ in range(trims):
        matrix = torch.cat([matrices[i] for i in kept])
        if len(matrix) < height * width:
            raise ValueError("there are fewer equations than features.")
        gram = torch.linalg.eigvalsh(matrix.T @ matrix)
        if gram[0] < rank_tolerance**2 * gram[-1]:
            raise ValueError("the equations do not determine the features.")
        solution = torch.linalg.lstsq(matrix, torch.cat([targets[i] for i in kept])).solution
        residuals = torch.stack(
            [(m @ solution - t).norm() for m, t in zip(matrices, targets, strict=True)]
        )
        kept = (residuals <= contradiction * residuals[residuals > 0].median()).nonzero()[:, 0]
    return solution.T.reshape(1, channels, height, width)
