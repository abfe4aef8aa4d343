"""A tiny training loop in all its variants, to be captured."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def network(batch_norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    norm = [nn.BatchNorm2d(4)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        *norm,
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 16, 8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(8, 3),
    )


def pixels(count: int = 12, seed: int = 1) -> Tensor:
    """Images of 8 bits, black and white among them."""
    draws = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (count, 1, 6, 6), generator=draws)
    levels[:, :, 0, 0], levels[:, :, 0, 1] = 0, 255
    return levels.float() / 255


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, lr=0.1, **settings)


@dataclass
class Loop:
    """An ordinary training loop; every field is a thing that people do."""

    model: nn.Module = field(default_factory=network)
    optimizer: Callable = sgd
    loss: Callable = field(default=lambda model, logits, labels: F.cross_entropy(logits, labels))
    images: Tensor = field(default_factory=lambda: (pixels() - 0.5) / 0.5)
    batch_size: int = 4
    epochs: int = 1
    accumulate: int = 1
    before: Callable = field(default=lambda model: None)
    on_gradients: Callable = field(default=lambda model: None)
    after: Callable = field(default=lambda model: None)
    closure: bool = False
    precision: torch.dtype | None = None

    def run(self) -> nn.Module:
        self.before(self.model)
        self.model.train()
        optimizer = self.optimizer(self.model.parameters())
        labels = torch.arange(len(self.images)) % 3
        images, targets = self.images.split(self.batch_size), labels.split(self.batch_size)
        chunks = list(zip(images, targets, strict=True))
        for _ in range(self.epochs):
            for start in range(0, len(chunks), self.accumulate):
                part = chunks[start : start + self.accumulate]

                def compute(part=part):
                    optimizer.zero_grad()
                    for images, targets in part:
                        kind = self.precision or torch.bfloat16
                        with torch.autocast("cpu", kind, enabled=self.precision is not None):
                            logits = self.model(images)
                            loss = self.loss(self.model, logits, targets) / len(part)
                        loss.backward()
                    self.on_gradients(self.model)
                    return loss

                if self.closure:
                    optimizer.step(compute)
                else:
                    compute()
                    optimizer.step()
        self.after(self.model)
        return self.model


def shift(model, group):
    with torch.no_grad():
        model[0].bias.add_(1)


CHANGES = [
    (lambda model, group: None, (False, False)),
    (shift, (True, False)),
    (lambda model, group: group.update(lr=0.05), (False, True)),
]
"""What somebody does to a model and a group of settings, and whether either is another then."""


def at_the_second_step(change):
    """The settings of a loop in which ``change`` comes between backward and the second step."""
    optimizers, calls = [], []

    def make(parameters):
        optimizers.append(sgd(parameters, momentum=0.9))
        return optimizers[0]

    def on_gradients(model):
        calls.append(model)
        if len(calls) == 2:
            change(model, optimizers[0].param_groups[0])

    return {"optimizer": make, "on_gradients": on_gradients}
