"""One measure for candidates of any attack: misfit in units of noise, plus a prior of images."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.likelihood import (
    Likelihood,
    estimate_noise,
    kernel_groups,
)
from flwr_leakage.attacks.problem import Problem, simulate_rounds
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior

NOISED = 1e-8
"""An update is noised if noise adds more than this to ``‖g − g*‖² / ‖g*‖²``; less is rounding."""

EXPLAINED = 1.05
"""The mean squared residual, in units of noise, up to which noise is all that is left."""

RING = 1.35
"""Ratio of the outer radius of a ring of frequencies to its inner one."""

PLAUSIBLE = 1.5
"""Mean square of the prior's coordinates up to which an image is no fit of noise; 1 of a draw."""


@dataclass(frozen=True)
class Judgement:
    """A candidate as the attacker sees it, without the truth.

    Attributes:
        energy: −2 log posterior up to a constant; infinite where it is not finite.
        distance: ``‖g − g*‖² / ‖g*‖²``, the mean over rounds; infinite likewise.
        misfit: mean squared residual in units of noise; pruned entries count where they exceed
            what pruning allows.
        is_met: whether the distance is within the tolerance.
        is_explained: whether an update that was noised is explained to its noise, by images that
            are likely under the prior, and tells more than they leave open.
    """

    energy: float
    distance: float
    misfit: float
    is_met: bool = False
    is_explained: bool = False


@dataclass(frozen=True)
class Evidence:
    """What an update says about candidates for the samples behind it.

    The energy of a candidate x̂ with residuals r = g(x̂) − g* is

        E = Σ_t P_t min(1, q_t) + Σ_g D_g log(1 + P_g / D_g max(0, q_g − 1))
            + Σ_i Σ_k (1 + n_k) log(1 + ‖s_ik‖²)

    with ``q = m / σ_t²`` of the mean square m of r over the P_t entries of tensor t, or the P_g of
    group g: a kernel, or a column of a matrix
    (:func:`flwr_leakage.attacks.inversion.likelihood.kernel_groups`). Entries that may have been
    pruned count by how far they exceed what pruning allows. The noise σ is estimated from the
    update itself. D_g is P_g, or less where the tensor has more entries than there are unknowns
    (:meth:`flwr_leakage.attacks.inversion.likelihood.Likelihood.energy`). s_ik are the n_k
    coordinates of image i in ring k: of one mean or difference of the colours, and of frequencies
    of about one size (:class:`flwr_leakage.spectral.image_prior.ImagePrior`).

    How much of a colour and of a frequency an image has differs by far between images. So the
    scale of each ring is unknown, and the ring has Cauchy's law. Noise that was fitted is dear in
    the rings of which an image has little, where a normal law of one size for all images would take
    it for nothing.

    The gradient of one clean sample may tell a layer's features and error
    (:class:`~flwr_leakage.attacks.whole_batch.one_sample.OneSample`). Then r is that of the
    equations which are left with both given: else what a candidate gets wrong in its features runs
    through all layers behind, and an attack that fits these first seems the better one.

    Attributes:
        problem: in double precision.
        likelihood: of all rounds' residuals.
        told: equations in the place of the gradient, and what was observed of them, or ``None``.
        groups: the number of the group of each entry (P,).
        prior: of each sample.
        tolerance: a distance at which the gradient counts as met.
    """

    problem: Problem
    likelihood: Likelihood
    groups: Tensor
    prior: ImagePrior
    tolerance: float
    told: tuple[KnownErrors, Likelihood] | None = None

    @classmethod
    def of(cls, problem: Problem, tolerance: float) -> "Evidence":
        """Read the noise from the update; see :func:`estimate_noise`."""
        problem = problem.to(torch.float64)
        gradients = [posed.gradient for posed in problem.rounds]
        likelihood = Likelihood.of(gradients, estimate_noise(problem))
        groups = kernel_groups([value.shape for each in gradients for value in each.values()])
        found = cls(problem, likelihood, groups, ImagePrior.of(problem.spec), tolerance)
        if found.is_noised or problem.num_samples != 1 or not problem.is_single_gradient:
            return found
        try:
            told = OneSample()(problem, likelihood, torch.Generator().manual_seed(0))
        except ValueError:
            return found  # the gradient itself is all that there is
        return replace(found, told=told)

    def gradient(self, batch: Batch) -> Tensor:
        """g(x̂) (P,), of all rounds one after another, in double precision."""
        soft = batch.targets.is_floating_point()
        batch = Batch(batch.inputs.double(), batch.targets.double() if soft else batch.targets)
        return simulate_rounds(self.problem, batch)

    def judge(self, batch: Batch) -> Judgement:
        """Judge a candidate, in any precision."""
        with torch.no_grad():
            residual = self.likelihood.residual(self.gradient(batch))
        sizes = [len(ravel(p.gradient)) for p in self.problem.rounds]
        pairs = zip(residual.split(sizes), self.likelihood.observed.split(sizes), strict=True)
        distances = [float(r.square().sum() / g.square().sum()) for r, g in pairs]
        inputs = batch.inputs.double()
        coordinates = torch.stack([self.prior.coordinates(x[None]) for x in inputs])
        energy = self._misfit_energy(residual, inputs) + ring_energy(coordinates)
        distance = sum(distances) / len(distances)
        if not math.isfinite(energy + distance):
            return Judgement(math.inf, math.inf, math.inf)
        misfit = self.likelihood.misfit(residual)
        plausible = float(coordinates.square().mean()) <= PLAUSIBLE
        explained = self.is_noised and misfit <= EXPLAINED and plausible
        if explained:  # what is all noise is explained by anything, and tells nothing of samples
            nothing = self.likelihood.misfit(-self.likelihood.observed)
            explained = (nothing - misfit) * len(residual) >= self.unknowns
        return Judgement(energy, distance, misfit, distance <= self.tolerance, explained)

    def _misfit_energy(self, residual: Tensor, inputs: Tensor) -> float:
        """Of the gradient's residual, or of images by what the gradient told."""
        if self.told is None:
            return self.likelihood.energy(residual, self.unknowns, self.groups)
        equations, known = self.told
        rest = known.residual(equations.gradient(inputs, 0.0, precise=True))
        return known.energy(rest, self.unknowns, equations.groups)

    @property
    def unknowns(self) -> int:
        """Pixels of all samples, times channels."""
        return self.problem.num_samples * torch.Size(self.problem.spec.shape).numel()

    @property
    def equations(self) -> float:
        """Those that candidates are judged by, as far as they can be independent."""
        likelihood = self.likelihood if self.told is None else self.told[1]
        return float(likelihood.independent(self.unknowns).sum())

    @property
    def is_noised(self) -> bool:
        """Whether more than rounding was added to the update."""
        noise = float((self.likelihood.counts * self.likelihood.noise.square()).sum())
        return noise > NOISED * float(self.likelihood.observed.square().sum())


def ring_energy(coordinates: Tensor) -> float:
    """−2 log density, up to a constant, of coordinates (B, C, H, W) whose rings have no known size.

    The square of a ring's size has the inverse gamma law of shape and scale ½, so that its n
    coordinates have Cauchy's: ``(1 + n) log(1 + ‖s‖²)``.
    """
    height, width = coordinates.shape[-2:]
    squares = torch.arange(height)[:, None].square() + torch.arange(width).square()
    numbers = (squares.clamp_min(1).double().log() / (2 * math.log(RING))).long().flatten()
    sums = coordinates.new_zeros(*coordinates.shape[:2], int(numbers.max()) + 1)
    sums.index_add_(-1, numbers, coordinates.square().flatten(2))
    return float(((1 + numbers.bincount()) * sums.log1p()).sum())
