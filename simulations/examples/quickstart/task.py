"""The model, the data, and an ordinary training loop: nothing here knows of an audit."""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from flwr_leakage.data import embedded_mnist


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(8, 16, 5, stride=2, padding=2)
        self.fc1 = nn.Linear(16 * 7 * 7, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, 10) of digits (B, 1, 28, 28)."""
        hidden = torch.sigmoid(self.conv2(torch.sigmoid(self.conv1(images))))
        return self.fc2(torch.sigmoid(self.fc1(hidden.flatten(1))))


@cache
def _digits() -> TensorDataset:
    train, _ = embedded_mnist()
    batch = train.batch(range(len(train)))
    return TensorDataset(batch.inputs, batch.targets)


def load_data(partition: int, num_examples: int, batch_size: int) -> DataLoader:
    """Mini-batches of a client's own digits, shuffled."""
    first = partition * num_examples
    own = TensorDataset(*_digits()[first : first + num_examples])
    return DataLoader(own, batch_size=batch_size, shuffle=True)


def train(model: nn.Module, loader: DataLoader, epochs: int, learning_rate: float) -> float:
    """Train, and return the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model.train()
    losses = []
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(model: nn.Module, loader: DataLoader) -> float:
    """The share of digits that are told correctly."""
    model.eval()
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).float() for images, labels in loader]
    return float(torch.cat(right).mean())
