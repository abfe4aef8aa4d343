"""A stratified split into train and test."""

import torch
from torch import Tensor


def stratified_split(
    labels: Tensor, test_fraction: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Split indices so that every class gives the same share, rounded, to the test set.

    Args:
        labels: (N,) int64.
        test_fraction: in (0, 1).
        generator: shuffles within classes, and the order of both results.

    Returns:
        Train and test indices, each in random order.

    Raises:
        ValueError: ``test_fraction`` outside (0, 1), or one side is left empty.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must lie in (0, 1), got {test_fraction}.")
    train, test = [], []
    for label in labels.unique(sorted=True):
        members = (labels == label).nonzero().squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        num_test = round(test_fraction * len(members))
        test.append(members[:num_test])
        train.append(members[num_test:])
    sides = [torch.cat(parts) for parts in (train, test)]
    for name, side in zip(("train", "test"), sides, strict=True):
        if not len(side):
            raise ValueError(
                f"test_fraction {test_fraction} leaves no {name} samples of {len(labels)}."
            )
    train_side, test_side = (side[torch.randperm(len(side), generator=generator)] for side in sides)
    return train_side, test_side
