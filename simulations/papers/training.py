"""Networks trained as the papers train them, kept on disk by a digest of all settings."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage import models
from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import NoDefense
from flwr_leakage.defenses.base import Defense
from flwr_leakage.metrics import classifier_utility
from flwr_leakage.models import initialize
from flwr_leakage.models.initialization import Scheme
from flwr_leakage.randomness import Reproducible, make_generator
from flwr_leakage.records import Batch, LocalSchedule, Update
from simulations.papers.parts import digest, write_atomically


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: SGD whose rate falls to a tenth at 1/2 and at 3/4 of the epochs.

    LAVP (Hong et al. 2024, appendix): 300 epochs, rate 0.1, × 0.1 at epochs 150 and 225.

    Attributes:
        network: a class of ``flwr_leakage.models``.
        data: a name that ``Lab.data`` knows.
        epochs: passes over the training images, ≥ 0.
        seed: of the weights, the order, the augmentation and the defense's draws.
        options: further arguments of the network.
        initialization: how the weights are drawn.
        checkpoints: epochs whose weights are kept beside the last ones; 0 is before training.
        num_images: the first ones of the training set; ``None`` for all.
        batch_size: samples in a step.
        learning_rate: of SGD.
        momentum: of SGD.
        weight_decay: of SGD.
        augment: shifts by up to 4 pixels and mirrors, drawn anew in each epoch.
        defense: encodes each mini-batch and changes each step's gradient.
    """

    network: str
    data: str
    epochs: int
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    initialization: Scheme = "default"
    checkpoints: Sequence[int] = ()
    num_images: int | None = None
    batch_size: int = 128
    learning_rate: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    augment: bool = False
    defense: Defense = field(default_factory=NoDefense)

    def __post_init__(self) -> None:
        outside = [epoch for epoch in self.checkpoints if not 0 <= epoch <= self.epochs]
        if outside:
            raise ValueError(f"checkpoints must lie in 0 … {self.epochs}, got {outside}.")

    def digest(self, device: torch.device, files: Mapping[str, str]) -> str:
        """The name of the folder of what this trains on a device, from files of these digests."""
        settings = {**asdict(self), "defense": repr(self.defense), "on": device.type}
        return digest({**settings, "data digest": files} if files else settings)

    @property
    def kept(self) -> list[int]:
        """The epochs whose weights are kept, the last included."""
        return sorted({*self.checkpoints, self.epochs})

    def build(self, dataset: ImageDataset) -> nn.Module:
        """The network before training, in eval mode.

        Raises:
            ValueError: there is no such network.
        """
        if self.network not in models.__all__ or not isinstance(
            kind := getattr(models, self.network), type
        ):
            known = [name for name in models.__all__ if isinstance(getattr(models, name), type)]
            raise ValueError(f"network must be one of {known}, got {self.network!r}.")
        spec = dataset.spec
        network = kind(input_shape=spec.shape, num_classes=spec.num_classes, **self.options)
        generator = make_generator(self.seed, purpose="initialization")
        return initialize(network, self.initialization, generator).eval()


@dataclass(frozen=True)
class Trained:
    """What training gave.

    Attributes:
        models: by epoch, in eval mode, buffers included.
        accuracy: on test images, by epoch.
        cpu_seconds: of training, without the measuring of accuracy.
    """

    models: Mapping[int, nn.Module]
    accuracy: Mapping[int, float]
    cpu_seconds: float


def trained(
    recipe: Recipe,
    dataset: tuple[ImageDataset, ImageDataset],
    files: Mapping[str, str],
    cache: Path,
    device: torch.device,
    tell: Callable[[str], None],
    test_images: int = 2000,
) -> Trained:
    """Train, or read back what was trained by the same recipe.

    Args:
        recipe: everything that the weights depend on.
        dataset: the train and the test set.
        files: digests of the dataset's files, by name; see ``data_digests``.
        cache: the folder of all trained networks.
        device: where training runs, and where the networks are put.
        tell: is given a line an epoch.
        test_images: the first ones measure the accuracy.
    """
    folder = cache / recipe.digest(device, files)
    log = folder / "training.json"
    if not log.is_file():
        _train(recipe, dataset, folder, device, tell, test_images)
    stored = json.loads(log.read_text())
    found: dict[int, nn.Module] = {}
    for epoch in recipe.kept:
        network = recipe.build(dataset[0])
        network.load_state_dict(load_file(folder / f"epoch_{epoch:04d}.safetensors"))
        found[epoch] = network.to(device).eval()
    accuracy = {int(epoch): value for epoch, value in stored["accuracy"].items()}
    return Trained(found, accuracy, stored["cpu_seconds"])


def _train(
    recipe: Recipe,
    dataset: tuple[ImageDataset, ImageDataset],
    folder: Path,
    device: torch.device,
    tell: Callable[[str], None],
    test_images: int,
) -> None:
    train_set, test_set = dataset
    network = recipe.build(train_set).to(device)
    optimizer = torch.optim.SGD(
        network.parameters(),
        recipe.learning_rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
    milestones = [recipe.epochs // 2, recipe.epochs * 3 // 4]
    rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    test = [test_set.batch(c) for c in torch.arange(len(test_set))[:test_images].split(500)]
    accuracy: dict[int, float] = {}
    seconds, began = 0.0, time.process_time()
    for epoch in range(recipe.epochs + 1):
        if epoch in recipe.kept:
            seconds += time.process_time() - began
            state = {name: value.cpu() for name, value in network.state_dict().items()}
            path = folder / f"epoch_{epoch:04d}.safetensors"
            write_atomically(path, partial(save_file, state))
            accuracy[epoch] = classifier_utility(network.cpu().eval(), test).accuracy
            network.to(device)
            tell(f"{recipe.network} {recipe.defense} epoch {epoch}: {accuracy[epoch]:.3f}")
            began = time.process_time()
        if epoch < recipe.epochs:
            _train_epoch(recipe, epoch, train_set, network, optimizer)
            rate.step()
    log = json.dumps(
        {"recipe": repr(recipe), "accuracy": accuracy, "cpu_seconds": round(seconds, 2)}
    )
    write_atomically(folder / "training.json", lambda unfinished: unfinished.write_text(log))


def _train_epoch(
    recipe: Recipe,
    epoch: int,
    train_set: ImageDataset,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    network.train()
    device = next(network.parameters()).device
    order = make_generator(recipe.seed, server_round=epoch, purpose="order")
    size = min(recipe.num_images or len(train_set), len(train_set))
    for step, chosen in enumerate(torch.randperm(size, generator=order).split(recipe.batch_size)):
        if len(chosen) < 2 and recipe.epochs:
            continue  # BatchNorm in train mode has no variance of one sample
        batch = train_set.batch(chosen)
        if recipe.augment:
            batch = Batch(shift_and_mirror(batch.inputs, order), batch.targets)
        draws = Reproducible.from_seed(
            recipe.seed, server_round=epoch, client_id=step, purpose="defense"
        )
        batch = recipe.defense.on_batch(batch, train_set.spec.num_classes, draws)
        optimizer.zero_grad()
        inputs, targets = batch.inputs.to(device), batch.targets.to(device)
        F.cross_entropy(network(inputs), targets).backward()
        _defend_gradient(recipe, network, len(batch), draws)
        optimizer.step()


def _defend_gradient(
    recipe: Recipe, network: nn.Module, num_examples: int, draws: Reproducible
) -> None:
    """Replace the gradient by what a client of one step with learning rate 1 would release."""
    if isinstance(recipe.defense, NoDefense):
        return
    params = {name: p for name, p in network.named_parameters() if p.grad is not None}
    raw = {name: -p.grad for name, p in params.items() if p.grad is not None}
    update = Update(raw, {}, LocalSchedule(1.0, 1, num_examples), num_examples)
    released = recipe.defense.on_update(update, draws).delta
    for name, parameter in params.items():
        parameter.grad = -released[name]


def shift_and_mirror(images: Tensor, generator: torch.Generator, most: int = 4) -> Tensor:
    """Shift a batch (B, C, H, W) by up to ``most`` pixels, zeros following; mirror half of it.

    One shift a batch: as random over an epoch's steps as one a sample, and cheap.
    """
    down, right = torch.randint(2 * most + 1, (2,), generator=generator).tolist()
    height, width = images.shape[2:]
    padded = F.pad(images, (most, most, most, most))
    shifted = padded[:, :, down : down + height, right : right + width]
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    return torch.where(mirrored[:, None, None, None], shifted.flip(3), shifted)
