"""The features that several convolutions take in, solved from these convolutions' gradients."""

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
    """The features (1, C, H, W) that several convolutions take in, from their weight gradients.

    Least squares over the equations of all output channels. One whose error has a wrong entry,
    as its ReLU's mask has, contradicts all others; it is left out and the rest is solved again.

    Args:
        uses: the convolutions, at least one.
        errors: ∂L/∂outputs of each, (1, O, H', W').
        gradients: ∂L/∂W of each.
        rank_tolerance: features are determined if the least singular value is above this share
            of the largest.
        trims: solutions; after each, channels that contradict it are left out.
        contradiction: a channel contradicts a solution by a residual above this multiple of the
            median one.

    Raises:
        ValueError: the equations do not determine them.
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
