"""The parts of a pinned case: a network, the acts of the client and the wire, and an attack."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks.labels.assumed import LabelInference
from flwr_leakage.data import embedded_mnist
from flwr_leakage.records import Batch, InputSpec, LocalSchedule

Wire = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Case:
    """One problem, and the preset that attacks it.

    Attributes:
        name: says what is special; unique among the cases of its preset.
        preset: of ``conf/attack``.
        network: builds the network, under a global seed of 0.
        count: number of samples.
        first: index of the first digit.
        size: of the images: digits of 28×28 pixels are averaged to 8×8 or 14×14.
        colour: whether the images have three channels.
        labels: true class ids; those of the digits by default.
        known: whether the attacker is given the labels.
        schedule: the client's; one step of all samples by default.
        wire: what happens to the gradient, or to the parameters' change, one after another.
        trained: steps of SGD on other digits before the attack.
        train_mode: whether the network is in train mode.
        loss: of logits and class ids.
        members: numbers of examples of the clients of an aggregate.
        rounds: how many rounds of the same samples are seen; the network moves between them.
        batch_norm_knowledge: what the attacker knows of the statistics of a network in train mode.
        overrides: of the preset.
        labelling: takes the place of the preset's label attack.
        grain: share of uniform noise in the pixels, so that no region is black.
        brightness: factor of the pixels; more than 1 leaves what the server takes for possible.
        claimed: the number of samples that the client tells, where it is not ``count``.
    """

    name: str
    preset: str
    network: Callable[[], nn.Module]
    count: int = 1
    first: int = 0
    size: int = 8
    colour: bool = False
    labels: tuple[int, ...] = ()
    known: bool = False
    schedule: LocalSchedule | None = None
    wire: tuple[Wire, ...] = ()
    trained: int = 0
    train_mode: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    members: tuple[int, ...] = ()
    rounds: int = 1
    batch_norm_knowledge: str = "none"
    overrides: tuple[str, ...] = ()
    labelling: LabelInference | None = None
    grain: float = 0.0
    brightness: float = 1.0
    claimed: int = 0

    @property
    def key(self) -> str:
        """The name of the case among all cases."""
        return f"{self.preset}: {self.name}"

    @property
    def spec(self) -> InputSpec:
        """The public facts about the images."""
        channels = 3 if self.colour else 1
        return InputSpec((channels, self.size, self.size), 10, (0.1307,), (0.3081,))

    def truth(self) -> Batch:
        """The private samples, normalised."""
        pixels, labels = _digits(self.size)
        chosen = slice(self.first, self.first + self.count)
        images, targets = pixels[chosen], labels[chosen]
        if self.colour:
            shades = torch.tensor([0.9, 0.5, 0.2])[:, None, None]
            images = 0.1 + 0.8 * (images * shades + images.flip(-1) * (0.6 - shades).clamp(0))
        if self.grain:
            noise = torch.rand(images.shape, generator=torch.Generator().manual_seed(self.first))
            images = (1 - self.grain) * images + self.grain * noise
        if self.labels:
            targets = torch.tensor(self.labels)
        return Batch(self.spec.normalize(self.brightness * images), targets)

    def model(self) -> nn.Module:
        """The network that the server sent."""
        torch.manual_seed(0)
        model = self.network().train(self.train_mode)
        if self.trained:
            _train(model, self)
        return model

    def gradient(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the gradient of the mean loss of a batch by name; frozen parameters have none."""
        named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        loss = self.loss(model(batch.inputs), batch.targets)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return {
            name: torch.zeros_like(value) if gradient is None else gradient
            for (name, value), gradient in zip(named.items(), found, strict=True)
        }

    def sent(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what the wire delivers of gradients or of a change of parameters."""
        for act in self.wire:
            gradients = act(gradients)
        return gradients


@functools.cache
def _digits(size: int) -> tuple[Tensor, Tensor]:
    """Pixels (n, 1, size, size) in [0, 1] of the test digits, and their labels."""
    _, test = embedded_mnist(mean=(0.0,), std=(1.0,))
    batch = test.batch(list(range(400)))
    pixels = batch.inputs
    if size == 8:
        pixels = F.avg_pool2d(F.pad(pixels, (2, 2, 2, 2)), 4)
    elif size != 28:
        pixels = F.avg_pool2d(pixels, 28 // size)
    return pixels, batch.targets


def _train(model: nn.Module, case: Case) -> None:
    """Some steps of SGD on 32 digits each, from the end of those that cases attack."""
    pixels, labels = _digits(case.size)
    images = case.spec.normalize(pixels.expand(-1, case.spec.shape[0], -1, -1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(case.trained):
        chosen = [100 + (32 * step + index) % 300 for index in range(32)]
        optimizer.zero_grad()
        case.loss(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()


def noised(share: float) -> Wire:
    """Gaussian noise of a share of the root mean square of all entries."""

    def add(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        entries = torch.cat([value.flatten() for value in gradients.values()])
        size = share * entries.square().mean().sqrt()
        return {
            name: value + size * torch.randn(value.shape, generator=generator)
            for name, value in gradients.items()
        }

    return add


def pruned(share: float) -> Wire:
    """All but the largest entries of each tensor become zero: ``share`` of them."""

    def prune(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, value in gradients.items():
            drop = int(share * value.numel())
            limit = value.abs().flatten().sort().values[drop - 1] if drop else -1.0
            kept[name] = torch.where(value.abs() > limit, value, 0.0)
        return kept

    return prune


def clipped(norm: float) -> Wire:
    """Scaled to a norm of at most ``norm``."""

    def clip(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = torch.cat([value.flatten() for value in gradients.values()]).norm()
        return {name: value * min(1.0, norm / float(whole)) for name, value in gradients.items()}

    return clip


def half(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cast to float16 and back."""
    return {name: value.half().float() for name, value in gradients.items()}


def scrambled(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Pure noise of each tensor's size: an update that no sample has."""
    generator = torch.Generator().manual_seed(2)
    return {
        name: value.square().mean().sqrt() * torch.randn(value.shape, generator=generator)
        for name, value in gradients.items()
    }


def spoiled(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One entry is not a number."""
    name, value = next(iter(gradients.items()))
    value = value.clone()
    value.view(-1)[0] = torch.nan
    return {**gradients, name: value}


def silenced(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zero everywhere."""
    return {name: torch.zeros_like(value) for name, value in gradients.items()}
