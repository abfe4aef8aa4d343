"""Split labelled samples into a training and a test set, by class."""

import torch
from torch import Tensor


def stratified_split(
    labels: Tensor, test_fraction: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the indices of the training samples and those of the test samples, both in random
    order.

    Every class in ``labels`` (N,) gives its share ``test_fraction`` in (0, 1), rounded to a whole
    number of samples, to the test set.

    Raises:
        ValueError: ``test_fraction`` lies outside of (0, 1), or one of the sets is empty.
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
