"""What the benchmarks of the scores share: networks, their images, and dense spectra."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet, ResNet18, initialize
from flwr_leakage.models.initialization import Scheme
from flwr_leakage.operators import LinearOperator, SampleJacobian
from flwr_leakage.records import Batch
from flwr_leakage.spectral import gradient_start
from simulations.benchmarks import lab


@dataclass(frozen=True)
class Setting:
    """A network and the images that it is scored on.

    Attributes:
        name: ``LeNet``, ``ConvNet`` or ``ResNet18``.
        shape: (C, H, W) of the inputs.
        count: images.
        trained: whether the network is trained first.
        scheme: of the initial weights, as ``flwr_leakage.models.initialize`` names them;
            ``None`` is U(−½, ½) for LeNet (Zhu et al. 2019) and torch's own for the others.
    """

    name: str
    shape: lab.Shape
    count: int
    trained: bool = False
    scheme: Scheme | None = None


SETTINGS = {
    "LeNet 28": Setting("LeNet", (1, 28, 28), 2),
    "LeNet 28 trained": Setting("LeNet", (1, 28, 28), 2, trained=True),
    "LeNet 32": Setting("LeNet", (3, 32, 32), 2),
    "ReLU ConvNet 32": Setting("ConvNet", (3, 32, 32), 1),
    "ReLU ConvNet 32 He": Setting("ConvNet", (3, 32, 32), 1, scheme="kaiming"),
    "ReLU ConvNet 32 trained": Setting("ConvNet", (3, 32, 32), 1, trained=True),
    "ResNet-18 w16 32": Setting("ResNet18", (3, 32, 32), 1),
}


def build_model(
    name: str, shape: lab.Shape, width: int = 16, seed: int = 0, scheme: Scheme | None = None
) -> nn.Module:
    """Models of the field with random weights; see ``Setting`` for the arguments."""
    if name == "LeNet":
        model: nn.Module = LeNet(shape, lab.CLASSES, num_convolutions=3)
        return initialize(model, scheme or "uniform", lab.generator(seed))
    model = (
        lab.small_convnet(shape) if name == "ConvNet" else ResNet18(shape, lab.CLASSES, width=width)
    )
    return initialize(model, scheme or "default", lab.generator(seed))


def train_with_adam(model: nn.Module, data: Batch, epochs: int = 15) -> None:
    """Adam with a learning rate of 1e-3 in batches of 32."""
    optimizer = torch.optim.Adam(model.requires_grad_(True).parameters(), 1e-3)
    order = lab.generator(1)
    for _ in range(epochs):
        lab.train(model, optimizer, lab.shuffled(data, 32, order))


def load_batch(shape: lab.Shape, count: int, cifar: str | None) -> Batch:
    """Real images, pixels in [0, 1], enlarged by interpolation where the size is larger."""
    if shape[0] == 1:
        images = embedded_mnist(mean=(0.0,), std=(1.0,))[1].batch(list(range(count)))
        inputs, labels = images.inputs, images.targets
    else:
        images = load_cifar(cifar)
        inputs, labels = images.inputs[:count], images.targets[:count]
    if inputs.shape[-1] != shape[-1]:
        inputs = F.interpolate(inputs, size=shape[1:], mode="bilinear")
    return Batch(inputs.contiguous(), labels)


def load_cifar(path: str | None) -> Batch:
    """All images of an .npz, pixels in [0, 1]."""
    if path is None:
        raise SystemExit("this section needs --cifar, an .npz with images and labels")
    images = lab.read_images(Path(path))
    return Batch(images.inputs.contiguous(), images.targets)


def training_data(shape: lab.Shape, cifar: str | None) -> Batch:
    """Images that no table is computed on: 4,000 digits, or all but the file's first 100."""
    if shape[0] == 1:
        return embedded_mnist(mean=(0.0,), std=(1.0,))[0].batch(list(range(4000)))
    return load_cifar(cifar)[100:]


def prepare(
    setting: Setting, count: int, cifar: str | None, seed: int = 0
) -> tuple[nn.Module, Batch]:
    """The network, with a draw of weights, and its images."""
    model = build_model(setting.name, setting.shape, seed=seed, scheme=setting.scheme)
    if setting.trained:
        train_with_adam(model, training_data(setting.shape, cifar))
    return model, load_batch(setting.shape, count, cifar)


def operator_of(model: nn.Module, batch: Batch, dtype: torch.dtype) -> SampleJacobian:
    """The Jacobian of every sample."""
    gradient_map = GradientMap(model)
    params = {name: value.to(dtype) for name, value in gradient_map.params.items()}
    return SampleJacobian(gradient_map, params, Batch(batch.inputs.to(dtype), batch.targets))


def dense_gram(operator: LinearOperator) -> Tensor:
    """JJᵀ of each sample in float64, column by column."""
    columns = [operator.gram(operator.unit(i)) for i in range(operator.num_inputs)]
    gram = torch.stack(columns, 2)
    return (gram + gram.transpose(1, 2)) / 2


@dataclass(frozen=True)
class Spectra:
    """JJᵀ of S samples: eigenvalues (S, N), ascending, and eigenvectors (S, N, N) as columns."""

    eigenvalues: Tensor
    vectors: Tensor

    def influence(self, projected: Tensor, relative_damping: float = 0.0) -> Tensor:
        """‖(JJᵀ + εI)⁻¹Jδ‖ of each sample from ``projected`` = Jδ, ε relative to λmax."""
        along = torch.einsum("snk,sn->sk", self.vectors, projected)
        shifted = self.eigenvalues + relative_damping * self.eigenvalues[:, -1:]
        return (along / shifted).norm(dim=1)


def dense_spectra(model: nn.Module, batch: Batch, together: int = 8) -> Spectra:
    """In float64, from the dense J of a few samples at a time."""
    parts = []
    for first in range(0, len(batch), together):
        dense = operator_of(model, batch[first : first + together], torch.float64).to_dense()
        parts.append(torch.linalg.eigh(dense.transpose(1, 2) @ dense))
    return Spectra(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def krylov_start(operator: SampleJacobian) -> Tensor:
    """As the scores start for a rough value: Jg and a tenth of noise."""
    return gradient_start(operator, lab.generator())


def angular_gram(operator: SampleJacobian, gram: Tensor) -> Tensor:
    """(JJᵀ − (Jg)(Jg)ᵀ/‖g‖²)/‖g‖² from a dense JJᵀ."""
    along = operator.rmatvec(operator.value)
    squared = (operator.value**2).sum(1)[:, None, None]
    return (gram - along[:, :, None] * along[:, None] / squared) / squared
