"""Directions of an image that its gradient does not see, and what an image prior makes of them.

    python -m simulations.benchmarks.attacks_unseen --root FOLDER --seed 1

prints a Markdown row an image of a ReLU network. The Jacobian J of the gradient, at the true image,
comes from a dense JJᵀ in float64. *Unseen* are the eigenvectors with eigenvalues below 1e-15 of the
largest: along them the gradient stays the same until an activation flips, so no attack on the
gradient can tell images apart that differ in these only. *Plausible* is the image with the
gradient of the true one to first order that ``ImagePrior`` likes best, all activations given: a
PSNR that an attack with this prior exceeds by luck only, or by the activations' bounds. As a
check, *change* is the gradient's relative change with a small step towards the plausible image,
over that with an equal step in a random direction. Without a threat model: it sees the truth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, InputSpec
from flwr_leakage.spectral.image_prior import ImagePrior
from simulations.benchmarks import lab
from simulations.benchmarks.scores_setup import dense_gram, operator_of

UNSEEN = 1e-15
"""Of the largest eigenvalue: a gap of several orders of magnitude lies there."""

STEP = 1e-4
"""Share of the way to the plausible image: no activation should flip."""


@dataclass(frozen=True)
class Unseen:
    """What the gradient of an image does not see.

    Attributes:
        count: of directions.
        least_seen: smallest other eigenvalue over the largest.
        plausible: the image with the same gradient to first order of highest prior density.
        change: see the module.
    """

    count: int
    least_seen: float
    plausible: Tensor
    change: float


def find_unseen(network: nn.Module, sample: Batch, spec: InputSpec) -> Unseen:
    """Of one image (1, C, H, W), in float64."""
    prior = ImagePrior.of(spec)
    truth = sample.inputs.double()
    pull = torch.func.vmap(lambda flat: prior.pull(flat.reshape(spec.shape)).flatten())
    gram = dense_gram(operator_of(network, sample, torch.float64))[0]
    seen, vectors = torch.linalg.eigh(gram)
    count = int((seen < UNSEEN * seen[-1]).sum())
    # With x = μ + L s, the plausible s is the shortest one with the same coordinates Vᵀ L s along
    # the directions V that are seen.
    constraints = pull(vectors[:, count:].T)
    goal = vectors[:, count:].T @ (truth - prior.grey).flatten()
    coordinates = constraints.T @ torch.linalg.solve(constraints @ constraints.T, goal)
    plausible = prior.inputs(coordinates.reshape(spec.shape))
    change = _change(network, truth, plausible - truth, sample.targets)
    return Unseen(count, float(seen[count] / seen[-1]), plausible, change)


def _change(network: nn.Module, truth: Tensor, way: Tensor, targets: Tensor) -> float:
    gradient_map = GradientMap(network)
    params = {name: value.double() for name, value in gradient_map.params.items()}

    def gradient(inputs: Tensor) -> Tensor:
        return ravel(gradient_map(params, Batch(inputs, targets)))

    noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0)).double()
    noise *= way.norm() / noise.norm()
    here = gradient(truth)
    along, across = (gradient(truth + STEP * each) - here for each in (way, noise))
    return float(along.norm() / across.norm())


def main() -> None:
    """Read the command line, run, print the table."""
    parser = lab.command(__doc__)
    lab.add_data(parser)
    lab.add_window(parser)
    parser.add_argument("--network", choices=("relu", "relu-trained"), default="relu-trained")
    given = lab.start(parser)
    spec = lab.CIFAR10
    network = lab.make_network(given.network, spec, given.root, given.seed)
    pixels = lab.load(given.root, given.split, given.first, given.images)
    lab.print_header("image", "unseen", "least seen, λ/λmax", "plausible, dB", "change")
    for index in range(given.images):
        image = pixels[index : index + 1]
        found = find_unseen(network, lab.normalize(image, spec), spec)
        lab.print_row(
            given.first + index,
            found.count,
            f"{found.least_seen:.0e}",
            f"{lab.psnr(found.plausible.float(), image.inputs, spec):.1f}",
            f"{found.change:.0e}",
        )


if __name__ == "__main__":
    main()
