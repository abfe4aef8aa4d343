"""What the membership benchmarks share: cases, networks, records, defenses, what a server sees.

Every seed draws the weights, the members, others that are no members and the null records; no image
is in two of these.
"""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist, python_docs
from flwr_leakage.defenses import (
    DPSGD,
    Defense,
    GaussianNoise,
    GradientPruning,
    InstaHide,
    MixUp,
    PercentilePrivacy,
)
from flwr_leakage.defenses.base import LocalRound
from flwr_leakage.gradient_map import GradientMap, repeat_training
from flwr_leakage.losses import NextToken
from flwr_leakage.models import MLP, ConvNet, ResNet18, TextTransformer
from flwr_leakage.normalization import mode_of
from flwr_leakage.params import Params
from flwr_leakage.randomness import Randomness, Reproducible
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, Update
from simulations.benchmarks import lab

QUICKSTART = InputSpec((3, 32, 32), 10, (0.5,) * 3, (0.5,) * 3)
RESERVED = 1600
"""Images at the end of the data that networks are trained on, and that no client has."""


VOCABULARY = 2000
"""Token ids of the texts."""


class Quickstart(nn.Module):
    """The network of Flower's own PyTorch quickstart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 10) of images (B, 3, 32, 32)."""
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2).flatten(1)
        logits: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(hidden)))))
        return logits


@dataclass(frozen=True)
class Case:
    """What is tested in a row.

    Attributes:
        network: its name in the table.
        count: the client's samples.
        batch_size: of a step; all samples by default.
        epochs: over the samples.
        rate: learning rate.
        trained: whether the network is trained before.
        double: whether all is computed, and the update sent, in double precision.
        null: null records.
        others: records that are no members.
        defense: of the update, and its name.
        optimizer: of the client.
        untold: whether the server takes SGD for the client's optimizer.
        momentum: of SGD.
        sent: whether the client sends the buffers of its BatchNorm layers, as Flower's own do.
        told: whether the client says that it mixes its records.
        clients: clients of the round, for FedMIA-II; 1 leaves it out.
        share: of ``--seeds`` that the row takes.
    """

    network: str = "quickstart"
    count: int = 32
    batch_size: int = 0
    epochs: int = 1
    rate: float = 0.1
    trained: bool = False
    double: bool = False
    null: int = 250
    others: int = 50
    defense: Defense | None = None
    name: str = ""
    optimizer: str = "SGD"
    untold: bool = False
    momentum: float = 0.0
    told: bool = False
    sent: bool = False
    clients: int = 4
    share: float = 1.0

    @property
    def schedule(self) -> LocalSchedule:
        """The client's, as the server assumes it."""
        size = self.batch_size or self.count
        return LocalSchedule(self.rate, self.epochs * -(-self.count // size), size, self.momentum)

    def __str__(self) -> str:
        """The update in words."""
        size = self.batch_size or self.count
        words = f"{self.count} samples"
        words += ", buffers sent" * self.sent
        words += f", batches of {size}" * (size < self.count)
        words += f", {self.epochs} epochs" * (self.epochs > 1)
        words += ", trained" * self.trained + ", in double precision" * self.double
        words += f", by {self.optimizer}" * (self.optimizer != "SGD")
        words += ", which is not told" * self.untold
        words += f", momentum {self.momentum:g}" * bool(self.momentum)
        return words + f", {self.name}" * bool(self.name) + ", told" * self.told


ROWS = (
    Case(count=8, clients=10),
    Case(count=32, clients=10),
    Case(count=100),
    Case(count=115),
    Case(count=32, trained=True),
    Case(count=64, batch_size=32, epochs=2, rate=0.01, null=400),
    Case(count=100, batch_size=32, epochs=2, null=600),
    Case(count=100, batch_size=32, epochs=3, null=600),
    Case(count=320, batch_size=32, null=1000),
    Case(count=8, optimizer="Adam", rate=0.001, null=400),
    Case(count=32, optimizer="Adam", rate=0.001, null=400),
    Case(count=8, epochs=5, optimizer="Adam", rate=0.001, null=400),
    Case(count=32, batch_size=8, optimizer="Adam", rate=0.001, null=400),
    Case("mlp", 8, clients=10),
    Case("mlp", 32, clients=10),
    Case("mlp", 100),
    Case("mlp", 32, trained=True),
    Case("mlp", 64, 32, 2, 0.01, null=400),
    Case("convnet, K = 10", 8, clients=10),
    Case("convnet, K = 10", 32, null=400, clients=10),
    Case("convnet, K = 10", 8, trained=True),
    Case("convnet, K = 100", 32),
    Case("resnet18, eval mode", 8, clients=1, null=200),
    Case("resnet18, eval mode", 32, clients=1, null=200, others=200, share=0.25),
    Case("resnet18, train mode", 8, clients=1, null=200, sent=True),
    Case("resnet18, train mode", 32, clients=1, null=200, others=200, sent=True, share=0.25),
    Case("resnet18, train mode", 8, clients=1, null=250, others=334, share=0.15),
    Case(count=8, epochs=5, null=400),
    Case(count=8, epochs=5, momentum=0.9, null=400),
    Case(count=32, batch_size=8, null=400),
    Case(count=32, batch_size=8, momentum=0.9, null=400),
    Case("resnet18, eval mode", 8, trained=True, clients=1, null=200, others=200),
    Case(count=8, epochs=5, optimizer="Adam", untold=True, rate=0.001, null=400),
    Case(count=32, batch_size=8, optimizer="Adam", untold=True, rate=0.001, null=400),
    Case("mlp", 32, trained=True, double=True),
    Case("text encoder", 8, null=400, clients=10),
    Case("text encoder", 8, null=400, trained=True),
    Case("text encoder", 32, null=400, clients=10),
    Case("text decoder", 8, null=400, clients=10),
)


class TruncatedSVD(Defense):
    """The core of SVDefense: singular values of each weight's update that hold 99 % of energy."""

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Drop the smaller singular values."""
        delta = {}
        for name, value in update.delta.items():
            if value.ndim < 2:
                delta[name] = value
                continue
            left, sizes, right = torch.linalg.svd(value.flatten(1), full_matrices=False)
            kept = int((sizes.square().cumsum(0) < 0.99 * sizes.square().sum()).sum()) + 1
            delta[name] = (left[:, :kept] * sizes[:kept] @ right[:kept]).reshape(value.shape)
        return replace(update, delta=delta)


DEFENSES: tuple[tuple[str, Defense], ...] = (
    ("noise 1 % of its norm", GaussianNoise(0.01, "norm")),
    ("noise 10 %", GaussianNoise(0.1, "norm")),
    ("noise 100 %", GaussianNoise(1.0, "norm")),
    ("pruning 0.9", GradientPruning(0.9)),
    ("pruning 0.99", GradientPruning(0.99)),
    ("DP-SGD, C = 1, multiplier 1", DPSGD(1.0, 1.0, None)),
    ("DP-SGD, ε = 8", DPSGD(1.0, 1.2005, None)),
    ("DP-SGD, ε = 1", DPSGD(1.0, 7.4613, None)),
    ("MixUp of 4", MixUp()),
    ("InstaHide of 4", InstaHide()),
    ("truncated SVD, 99 % of the energy", TruncatedSVD()),
    ("NVFlare's PercentilePrivacy(10, 0.01)", PercentilePrivacy()),
)
"""Noise multipliers of ε are those of one step, δ = 1e-5, one record replaced by another."""


@dataclass(frozen=True)
class Images:
    """Where a network's records come from.

    Attributes:
        spec: of the inputs.
        records: normalised images, or token ids.
    """

    spec: InputSpec
    records: Batch


@dataclass
class Sources:
    """The data of each network, read once.

    Attributes:
        root: folder of the npz files.
    """

    root: Path
    _read: dict[str, Images] = field(default_factory=dict)

    def __call__(self, network: str) -> Images:
        """The images of a network."""
        kind = network.split(",")[0]
        if kind not in self._read:
            self._read[kind] = self._images(network)
        return self._read[kind]

    def _images(self, network: str) -> Images:
        if network == "mlp":
            train, _ = embedded_mnist()
            records = train.batch(range(len(train)))
            return Images(train.spec, records)
        if network.startswith("text"):
            parts = python_docs(vocabulary=VOCABULARY, next_token=network == "text decoder")
            batches = [part.batch(range(len(part))) for part in parts]
            return Images(parts[0].spec, joined(*batches))
        spec = QUICKSTART if network == "quickstart" else lab.CIFAR10
        files = [lab.read_images(self.root / f"cifar10_{part}.npz") for part in ("test", "train")]
        return Images(spec, lab.normalize(joined(*files), spec))


def make(case: Case, images: Images, seed: int) -> tuple[nn.Module, InputSpec]:
    """A fresh network, untrained or trained, and the inputs' spec."""
    torch.manual_seed(seed)
    spec = images.spec
    if "K = 100" in case.network:
        spec = replace(spec, num_classes=100)
    if case.network == "quickstart":
        network: nn.Module = Quickstart()
    elif case.network == "mlp":
        network = MLP(spec.shape, 10, (128, 64))
    elif case.network.startswith("convnet"):
        network = ConvNet(spec.shape, spec.num_classes, 16, (1, 2, 2), (1, 2, 2), (), False)
    elif case.network.startswith("text"):
        network = TextTransformer(
            spec.shape, spec.num_classes, VOCABULARY, spec.padding, spec.next_token, width=192
        )
    else:
        network = ResNet18(spec.shape, 10).train("train" in case.network)
    if case.trained:
        network.load_state_dict(_trained(case.network, images))
    return network.double() if case.double else network, spec


_TRAINED: dict[str, Params] = {}


def _trained(name: str, images: Images) -> Params:
    """The weights of a network trained on images that no client has; one for all seeds.

    It takes twelve epochs of 25 steps, and two for a ResNet-18.
    """
    if name not in _TRAINED:
        network, _ = make(Case(name), images, 0)
        optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        for _ in range(2 if name.startswith("resnet") else 12):
            lab.train(network, optimizer, lab.shuffled(images.records[-RESERVED:], 64))
        _TRAINED[name] = {k: v.detach().clone() for k, v in network.state_dict().items()}
    return _TRAINED[name]


def split(images: Images, case: Case, spec: InputSpec, seed: int) -> tuple[Batch, Batch, Batch]:
    """Members of all clients, non-members and null records; labels of 100 classes are drawn."""
    order = torch.randperm(len(images.records) - RESERVED, generator=lab.generator(seed))
    count = case.count * case.clients
    ends = (count, count + case.others, count + case.others + case.null)
    chosen = images.records[order[: ends[-1]]]
    if spec.num_classes == 100:
        labels = torch.randint(100, (len(chosen),), generator=lab.generator(seed))
        chosen = Batch(chosen.inputs, labels)
    if case.double:
        chosen = Batch(chosen.inputs.double(), chosen.targets)
    return chosen[: ends[0]], chosen[ends[0] : ends[1]], chosen[ends[1] :]


def mapped(network: nn.Module) -> GradientMap:
    """The client's gradient map; BatchNorm is as the network's mode says."""
    causal = isinstance(network, TextTransformer) and network.causal
    loss = NextToken(0) if causal else F.cross_entropy
    return GradientMap(network, loss, mode_of(network))


def released(
    case: Case, network: nn.Module, members: Batch, seed: int, client: int = 0
) -> Observation:
    """Return the server's view of one client, whose number its defense's draws depend on."""
    gradient_map, used = mapped(network), members
    randomness = Reproducible.from_seed(seed + 1_000_000 * client, purpose="defense")
    if case.defense is not None and case.defense.encodes_batches:
        used = case.defense.on_batch(members, QUICKSTART.num_classes, randomness)
    seen = lab.observe(gradient_map, used, case.schedule)
    seen = replace(seen, update=replace(seen.update, mixed=case.told))
    if case.sent:  # one step of the network itself moves its buffers
        own = copy.deepcopy(network)
        own(used.inputs)
        seen = replace(seen, update=replace(seen.update, buffers=dict(own.named_buffers())))
    if case.optimizer != "SGD":
        batches = (members[window] for window in case.schedule.slices(len(members)))
        delta = repeat_training(
            case.optimizer, gradient_map, seen.params, batches, case.schedule, seen.buffers
        )
        return replace(seen, update=replace(seen.update, delta=delta))
    if case.defense is None:
        return seen
    local = LocalRound(gradient_map, seen.params, seen.buffers, members, used)
    return replace(seen, update=case.defense.on_update(seen.update, randomness, local))


def joined(*batches: Batch) -> Batch:
    """The records of several batches, one after another."""
    return Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.targets for b in batches]))
