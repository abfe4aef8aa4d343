"""One ReLU ConvNet written in eight ways: the same attack?

    python -m simulations.benchmarks.attacks_spellings --root FOLDER --images 12

prints a row for each spelling: the PSNR of ``--preset`` on gradients of CIFAR-10 test images from
``--first`` on, averaged to ``--size`` pixels a side, one network for each image (weights of
``--seed``, ``--seed`` + 1, …), labels inferred, one thread.
"""

import statistics
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from simulations.benchmarks import lab
from simulations.benchmarks.portfolio_cases import load


class Modules(nn.Module):
    """Every step is a module."""

    def __init__(self, size: int, padding: str | int = 1) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=padding)
        self.b = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.c = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.fc = nn.Linear(2 * size * size, lab.CLASSES)
        self.relu, self.flatten = nn.ReLU(), nn.Flatten()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.relu(self.c(self.relu(self.b(self.relu(self.a(x))))))
        return self.fc(self.flatten(x))


class Functional(Modules):
    """``F.relu`` and ``view``."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))))
        return self.fc(x.view(x.size(0), -1))


class Methods(Modules):
    """Methods of tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.c(self.b(self.a(x).relu()).relu()).relu()
        return self.fc(x.reshape(len(x), -1))


class Same(Modules):
    """``padding="same"``."""

    def __init__(self, size: int) -> None:
        super().__init__(size, "same")


class Parameters(Modules):
    """Functions of parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = torch.relu(F.conv2d(x, self.a.weight, self.a.bias, padding=1))
        x = torch.relu(F.conv2d(x, self.b.weight, self.b.bias, 2, 1))
        x = torch.relu(F.conv2d(x, self.c.weight, self.c.bias, 2, 1))
        return x.flatten(1) @ self.fc.weight.T + self.fc.bias


class Sequence(Modules):
    """Modules in an ``nn.Sequential`` made on the way, with dropout in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        layers = [self.a, self.relu, self.b, nn.ReLU(inplace=True), self.c, self.relu]
        features: Tensor = nn.Sequential(*layers)(x)
        return self.fc(F.dropout(features.flatten(1), training=self.training))


class Backwards(Modules):
    """A head of own parameters, made before the body and kept as (inputs, outputs); log-softmax."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        head, body = self.fc, [self.c, self.b, self.a]
        del self.fc, self.a, self.b, self.c
        self.weight, self.bias = nn.Parameter(head.weight.detach().T.clone()), head.bias
        self.c, self.b, self.a = body

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities."""
        x = F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))))
        return F.log_softmax(torch.flatten(x, 1) @ self.weight + self.bias, dim=1)


class ChannelsLast(Modules):
    """Memory in another order."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = x.contiguous(memory_format=torch.channels_last)
        x = self.c(self.b(self.a(x).relu()).relu()).relu()
        return self.fc(x.flatten(1))


STYLES = (
    Modules, Functional, Methods, Same, Parameters, Sequence, Backwards, ChannelsLast
)  # fmt: skip


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    lab.add_window(parser, images=12)
    parser.set_defaults(seed=lab.REPORTED_FROM, first=lab.REPORTED_FROM)
    parser.add_argument("--size", type=int, choices=[8, 16, 32], default=32)
    parser.add_argument("--preset", default="feature_matching")
    given = lab.start(parser)
    spec = replace(lab.CIFAR10, shape=(3, given.size, given.size))
    truth = load(given.root, given.split, given.first, given.images, 32 // given.size)
    batch = lab.normalize(truth, spec)
    attack = load_preset(given.preset)
    lab.print_header("spelling", "n", "PSNR, dB", "median", "worst", "CPU s")
    for style in STYLES:
        values, seconds = [], []
        for i in range(given.images):
            torch.manual_seed(given.seed + i)  # layers draw their weights from the global stream
            gradient_map = GradientMap(style(given.size).eval())
            seen = lab.observe(gradient_map, batch[i : i + 1], client_id=i)
            (result,), spent = lab.run_attack(attack, gradient_map, spec, [seen])
            found = None if result.batch is None else result.batch.inputs
            values.append(lab.psnr(found, truth.inputs[i : i + 1], spec))
            seconds.append(spent)
        lab.print_row(
            style.__name__, len(values), lab.spread(values, 1),
            f"{statistics.median(values):.1f}", f"{min(values):.1f}",
            f"{statistics.fmean(seconds):.1f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
