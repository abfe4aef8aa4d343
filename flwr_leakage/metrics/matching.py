"""Match reconstructions with private samples, so that their total error is smallest."""

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def pairwise_mse(
    truth: Float[Tensor, "B C H W"], reconstructed: Float[Tensor, "M C H W"]
) -> Float[Tensor, "B M"]:
    """Return the mean squared error of each original against each reconstruction, in float64.

    The errors are computed from differences, as the expansion by inner products loses its digits
    where a reconstruction is nearly exact.
    """
    distances = torch.cdist(
        truth.double().flatten(1),
        reconstructed.double().flatten(1),
        compute_mode="donot_use_mm_for_euclid_dist",
    )
    return distances.square() / truth[0].numel()


def match_samples(
    truth: Float[Tensor, "B C H W"], reconstructed: Float[Tensor, "M C H W"]
) -> Int[Tensor, " B"]:
    """Return the reconstruction that belongs to each original, so that the sum of MSEs is smallest.

    The linear sum assignment is solved exactly (SciPy's modified Jonker–Volgenant, Crouse 2016).

    Args:
        truth: B original images, in pixels.
        reconstructed: M images, in pixels. One that is not finite is left out.

    Returns:
        For each original the index of its reconstruction; −1 if there are too few reconstructions
        and none is left for this original.

    Example:
        >>> images = torch.arange(3.0).reshape(3, 1, 1, 1)
        >>> match_samples(images, images.flip(0) + 0.1)
        tensor([2, 1, 0])
    """
    assignment = torch.full((len(truth),), -1)
    finite = reconstructed.flatten(1).isfinite().all(1).nonzero().squeeze(1)
    if len(truth) and len(finite):
        cost = pairwise_mse(truth, reconstructed[finite])
        rows, columns = linear_sum_assignment(cost.cpu().numpy())
        assignment[torch.as_tensor(rows)] = finite.cpu()[torch.as_tensor(columns)]
    return assignment
