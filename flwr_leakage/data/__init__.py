"""Load datasets, partition them among clients, and give each client its batch in a round.

Every loader returns a training set and a test set with the same normalisation.
"""

from flwr_leakage.data.embedded_mnist import embedded_mnist
from flwr_leakage.data.federated_dataset import FederatedDataset
from flwr_leakage.data.image_dataset import ImageDataset, test_images
from flwr_leakage.data.image_folder import image_folder
from flwr_leakage.data.loaded_partition import LoadedPartition, dataset_from_columns
from flwr_leakage.data.npz_dataset import npz_dataset
from flwr_leakage.data.partitions import (
    DirichletPartition,
    DirichletSizePartition,
    IidPartition,
    SizedPartition,
)
from flwr_leakage.data.python_docs import python_docs
from flwr_leakage.data.text_dataset import TextDataset
from flwr_leakage.data.torchvision_dataset import torchvision_dataset

__all__ = [
    "DirichletPartition",
    "DirichletSizePartition",
    "FederatedDataset",
    "IidPartition",
    "ImageDataset",
    "LoadedPartition",
    "SizedPartition",
    "TextDataset",
    "dataset_from_columns",
    "embedded_mnist",
    "image_folder",
    "npz_dataset",
    "python_docs",
    "test_images",
    "torchvision_dataset",
]
