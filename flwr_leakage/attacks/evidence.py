"""Compare batches that different attacks found, by misfit and prior, and average several of them.

A batch that an attack found is called a candidate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_leakage.attacks.exact.batch_proof import BatchInputs
from flwr_leakage.attacks.inversion.likelihood import Groups, Likelihood, estimate_noise
from flwr_leakage.attacks.problem import Problem, simulate_rounds
from flwr_leakage.attacks.rounding import FLOAT32_ROUNDING, NOISE_DEVIATIONS
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class Judgement:
    """The attacker's judgement of a candidate batch, for which no private sample is needed.

    g is the candidate's gradient, and g* the observed one.

    Attributes:
        energy: −2 log posterior up to a constant; ∞ if it cannot be computed.
        distance: ``‖g − g*‖² / ‖g*‖²``, the mean over rounds; ∞ if it cannot be computed.
        misfit: mean of (g − g*)² over all entries, in units of the noise's variance. Pruned entries
            count by their excess over the pruning threshold.
        is_met: whether g equals g* in every parameter tensor, up to a tolerance and to rounding.
        is_explained: whether g − g* of a noised update is as small as the noise, with images that
            are likely under the prior. The fit must be better than that of a zero gradient by more
            than free unknowns gain by chance.
    """

    energy: float
    distance: float
    misfit: float
    is_met: bool = False
    is_explained: bool = False


@dataclass(frozen=True)
class Evidence:
    """The evidence that an update gives about candidates for the samples behind it.

    A candidate x̂ has the residuals r = g(x̂) − g*, with its gradient g(x̂) and the observed g*. Its
    energy, which is −2 log posterior up to a constant, is

        E = Σ_t P_t min(1, q_t) + Σ_g D_g log(1 + P_g / D_g max(0, q_g − 1))
            + Σ_i Σ_k (1 + n_k) log(1 + ‖s_ik‖²)

    with ``q = m / σ_t²``, where m is the mean square of r over the P_t entries of tensor t, or over
    the P_g entries of group g. A group g is a kernel, or a column of a matrix
    (:class:`flwr_leakage.attacks.inversion.likelihood.Groups`). Entries that may have been pruned
    count by their excess over the pruning threshold. The noise σ is estimated from the update
    itself. D_g is P_g, or less if the tensor has more entries than there are unknowns
    (:meth:`flwr_leakage.attacks.inversion.likelihood.Likelihood.energy`). s_ik are the n_k
    coordinates of image i in ring k: coordinates of one mean or difference of the colours, at
    frequencies of about one size (:class:`flwr_leakage.spectral.image_prior.ImagePrior`).

    The amounts of a colour and of a frequency differ by far between images. So the scale of each
    ring is unknown, and the ring has Cauchy's law. This law makes fitted noise expensive in the
    rings that are weak in an image.

    The gradient of one clean sample may determine the inputs (features) of a layer and the error
    ∂L/∂z of its outputs z (:class:`~flwr_leakage.attacks.whole_batch.one_sample.OneSample`), and an
    attack may have proven those of a batch (:meth:`told_by`). Then the gradient is not compared,
    but the equations that remain of the update once these features and errors are given, and r
    holds their residuals. Otherwise an error in a candidate's features would change the gradients
    of all layers behind.

    The equations that remain may be fewer than the unknowns. In the directions that they leave
    open, the likeliest image is zero, and a private one has the size that the prior expects. So the
    last sum then counts only the excess over that size: ``Σ_i Σ_k (1 + n_k) max(0, log(‖s_ik‖² /
    n_k))``. Otherwise a grey image would have less energy than the private one.

    Attributes:
        problem: the network, the update and the attacker's knowledge, in double precision.
        likelihood: the likelihood of the residuals r of all rounds.
        groups: the groups g of entries with similar errors.
        prior: the prior of each image; ``None`` for texts, of which all are equally likely.
        tolerance: largest ``‖g − g*‖² / ‖g*‖²`` of a tensor's gradient that counts as equal.
        proven: the equations that replace the gradient once an attack has proven features, and the
            likelihood of their residuals; else ``None``.
    """

    problem: Problem
    likelihood: Likelihood
    groups: Groups
    prior: ImagePrior | None
    tolerance: float
    proven: tuple[KnownErrors, Likelihood] | None = None

    @classmethod
    def of(cls, problem: Problem, tolerance: float) -> "Evidence":
        """Return the evidence of a problem's update, whose noise is estimated from the update.

        ``tolerance`` is the relative squared distance up to which a tensor's gradient counts as
        equal to the observed one.
        """
        problem = problem.to(torch.float64).held
        gradients = [posed.gradient for posed in problem.rounds]
        likelihood = Likelihood.of(gradients, estimate_noise(problem))
        prior = None if problem.spec.is_text else ImagePrior.of(problem.spec)
        return cls(problem, likelihood, Groups.of(problem), prior, tolerance)

    @cached_property
    def told(self) -> tuple[KnownErrors, Likelihood] | None:
        """The equations compared in place of the gradient, and the likelihood of their residuals.

        The equations remain of the update once a layer's features (its inputs) and errors (the
        derivatives of the loss by its outputs) are known. The pair is ``None`` if the gradient
        itself is compared. It is computed when the first candidate is judged, as that takes seconds
        for a large network.
        """
        problem = self.problem
        if self.proven is not None or self.prior is None or self.is_noised:
            return self.proven
        if problem.num_samples != 1 or not problem.is_single_gradient:
            return None
        try:
            return OneSample()(problem, self.likelihood, torch.Generator().manual_seed(0))
        except ValueError:
            return None  # no features are determined, so that gradients are compared

    @property
    def image_prior(self) -> ImagePrior:
        """The normal prior of each image. Texts have none: then an ``AssertionError`` is raised."""
        assert self.prior is not None
        return self.prior

    def told_by(self, weight: str, samples: BatchInputs) -> "Evidence":
        """Return evidence that compares only the equations that proven features leave open.

        The features are the inputs of the layer of which ``weight`` names the weight. ``samples``
        holds the features of each sample, and the number of samples whose features are proven. The
        evidence itself is returned if the update is noised, if not all samples' features are
        proven, or if it already compares such equations.

        Raises:
            ValueError: the features do not separate the rest of the update (see
                :meth:`KnownErrors.of`).
        """
        if self.told is not None or self.is_noised or samples.proven != self.problem.num_samples:
            return self
        generator = torch.Generator().manual_seed(0)
        equations = KnownErrors.of(self.problem, weight, samples, generator)
        return replace(self, proven=(equations, equations.likelihood(None)))

    def gradient(self, batch: Batch) -> Tensor:
        """Return the gradient (P,) that a batch would have caused, in float64.

        P counts the parameters of all rounds, which stand one after another.
        """
        return simulate_rounds(self.problem, _in(torch.float64, batch))

    def judge(self, batch: Batch) -> Judgement:
        """Return the judgement of a candidate batch, which may have any precision.

        ``is_explained`` is true under three conditions, whose limits were chosen on development
        draws (no results were kept). The misfit is at most 1.05, as the residual is then noise. The
        mean square of the prior's coordinates is at most 1.5, as images drawn from the prior have
        1, and images that fit noise have more. A zero gradient has a squared residual, in units of
        noise, that is larger by at least the number of unknowns.
        """
        with torch.no_grad():
            residual = self.likelihood.residual(self.gradient(batch))
        sizes = [len(ravel(p.gradient)) for p in self.problem.rounds]
        pairs = zip(residual.split(sizes), self.likelihood.observed.split(sizes), strict=True)
        distances = [float(r.dot(r) / g.dot(g)) for r, g in pairs]
        if self.told is None:
            energy = self.likelihood.energy(residual, self.unknowns, self.groups)
        else:
            equations, known = self.told
            ordered = equations.in_order(batch.inputs.double())
            rest = known.residual(equations.gradient(ordered, 0.0, precise=True))
            energy = known.energy(rest, self.unknowns, equations.groups)
        plausible = True
        if self.prior is not None:
            inputs = batch.inputs.double()
            coordinates = self.prior.coordinates(inputs)
            is_open = self.told is not None and self.equations < self.unknowns
            energy += ring_energy(coordinates, is_open)
            plausible = float(coordinates.square().mean()) <= 1.5
        distance = sum(distances) / len(distances)
        if not math.isfinite(energy + distance):
            return Judgement(math.inf, math.inf, math.inf)
        misfit = self.likelihood.misfit(residual)
        explained = self.is_noised and misfit <= 1.05 and plausible
        if explained:  # a zero gradient may explain the noise as well
            nothing = self.likelihood.misfit(-self.likelihood.observed)
            explained = (nothing - misfit) * len(residual) >= self.unknowns
        met = distance <= self.tolerance and self._meets(batch, residual)
        return Judgement(energy, distance, misfit, met, explained)

    def _meets(self, batch: Batch, residual: Tensor) -> bool:
        """Return whether the residual r_t of every tensor t is small by a limit of its own.

        The residual (P,) is the candidate's gradient minus the observed one, for all rounds. The
        limit is ``‖r_t‖² ≤ tolerance ‖g*_t‖² + (10 ρ_t)²``, with the observed gradient g*_t. A
        limit for the sum over all tensors would not do, as a last layer may have almost all of the
        norm. ρ_t is the rounding error of the gradient that the client sent: that of the
        candidate's gradient in single precision, plus half a unit in the last place of the
        parameters that were sent, divided by the learning rate.
        """
        single = simulate_rounds(self.problem.to(torch.float32), _in(torch.float32, batch))
        spread = (single.double() - self.likelihood.observed - residual).square()
        travelled = [
            FLOAT32_ROUNDING * posed.params[name].abs().reshape(-1) / posed.schedule.learning_rate
            for posed in self.problem.rounds
            for name in posed.gradient
        ]
        spread += torch.cat(travelled).square()
        sums, likelihood = self.likelihood.sums, self.likelihood
        allowed = self.tolerance * sums(likelihood.observed.square())
        allowed += NOISE_DEVIATIONS**2 * sums(spread)
        return bool((sums(residual.square()) <= allowed).all())

    @property
    def unknowns(self) -> int:
        """Number of unknowns: pixels times channels of all images, or tokens of all texts."""
        return self.problem.num_samples * torch.Size(self.problem.spec.shape).numel()

    @property
    def equations(self) -> float:
        """Number of independent equations by which candidates are compared.

        Each parameter tensor gives at most as many as there are unknowns.
        """
        likelihood = self.likelihood if self.told is None else self.told[1]
        return float(likelihood.independent(self.unknowns).sum())

    @property
    def is_noised(self) -> bool:
        """Whether the update contains noise of more than 1e-8 of its squared norm.

        Less than that counts as rounding.
        """
        likelihood = self.likelihood
        noise = float((likelihood.counts * likelihood.noise.square()).sum())
        return noise > 1e-8 * float(likelihood.observed.dot(likelihood.observed))


def _in(dtype: torch.dtype, batch: Batch) -> Batch:
    """Return a batch in the given precision; integers, such as ids, stay unchanged."""
    both = (batch.inputs, batch.targets)
    return Batch(*(each.to(dtype) if each.is_floating_point() else each for each in both))


def ring_energy(coordinates: Tensor, is_open: bool = False) -> float:
    """Return −2 log density, up to a constant, of images whose spectrum is known up to scales.

    The coordinates (B, C, H, W) of B images under the prior form rings: frequencies of about one
    size, in one channel. Each ring of each image has an unknown variance, with the inverse gamma
    law of shape and scale ½. So its n coordinates s have Cauchy's law, of −2 log density
    ``(1 + n) log(1 + ‖s‖²)``. The result is the sum over rings and images. If ``is_open``, a ring
    instead costs nothing up to ``‖s‖² = n``, the size that the prior expects, and
    ``(1 + n) log(‖s‖² / n)`` beyond.
    """
    height, width = coordinates.shape[-2:]
    squares = torch.arange(height)[:, None].square() + torch.arange(width).square()
    # The outer radius of a ring is 1.35 times its inner radius (development draws; no results are
    # kept).
    numbers = (squares.clamp_min(1).double().log() / (2 * math.log(1.35))).long().flatten()
    sums = coordinates.new_zeros(*coordinates.shape[:2], int(numbers.max()) + 1)
    sums.index_add_(-1, numbers, coordinates.square().flatten(2))
    counts = numbers.bincount()
    costs = (sums / counts.clamp_min(1)).log().clamp_min(0) if is_open else sums.log1p()
    return float(((1 + counts) * costs).sum())


@dataclass(frozen=True)
class Candidate:
    """A batch that an attack found.

    Attributes:
        name: the name of the attack.
        batch: the inputs and labels.
        judged: the fit of the batch to the update and the prior.
    """

    name: str
    batch: Batch
    judged: Judgement

    @property
    def energy(self) -> float:
        """−2 log posterior of the candidate, up to a constant."""
        return self.judged.energy

    def weight(self, least: float, evidence: Evidence) -> float:
        """Return the inverse variance of this candidate's error, relative to another candidate's.

        With the D equations of ``evidence``, of one unknown variance v, the energy E is D log v up
        to a constant. So the weight is exp((least − E) / D), with the other candidate's energy
        ``least``.
        """
        return math.exp((least - self.energy) / evidence.equations)


@dataclass(frozen=True)
class Fusion:
    """A weighted mean of batches that several attacks found.

    Attributes:
        batch: the mean, with samples in the order of the most likely of these batches.
        judged: the fit of the mean to the update and the prior.
        weights: the weight of each batch by the name of its attack; they sum to 1.
    """

    batch: Batch
    judged: Judgement
    weights: dict[str, float]

    def __str__(self) -> str:
        """Return the weights and names of the attacks as a text, such as "of 0.60 a, 0.40 b"."""
        return "of " + ", ".join(f"{weight:.2f} {name}" for name, weight in self.weights.items())


def fuse(candidates: Sequence[Candidate], evidence: Evidence) -> Fusion | None:
    """Return a weighted mean of candidates that is likely to have less error than each of them.

    Weights are inverse variances, which minimise the squared error if the candidates' errors are
    independent. Candidates are added to the mean one after another, the most likely first. A
    candidate is left out if its labels differ from those of the first, or if its gradient is
    farther from the update than a zero gradient.

    It is also left out if it raises the mean's energy, −2 log posterior: around one solution the
    energy is convex, and between two solutions it has a maximum. But energies do not always show
    which of two candidates is better, and with independent errors their mean is better than both if
    their squared errors differ by a factor below three. So the mean may have somewhat more energy
    than the first candidate, unless energies are precise: the residual is mostly noise, or both
    candidates are close to each other.

    The result is ``None`` if nothing can be added to the most likely candidate, or if the update is
    not noised and that candidate meets it to rounding: then candidates differ in their prior only.
    """
    first, *others = sorted(candidates, key=lambda candidate: candidate.energy)
    if not evidence.is_noised and first.judged.misfit <= 1:
        return None
    others = [each for each in others if evidence.is_noised or each.judged.distance < 1]
    parts = [(first, first.batch.inputs.double(), 1.0)]
    fusion: Fusion | None = None
    for other in others:
        weight = other.weight(first.energy, evidence)
        # A batch of weight below 0.3 would improve the mean by at most 1 dB, and worsen it by more
        # if the weight is wrong.
        if not weight >= 0.3:
            break
        mean = _mean(parts)
        inputs = _in_order(other.batch, Batch(mean, first.batch.targets))
        if inputs is None:
            continue
        trial = [*parts, (other, inputs, weight)]
        batch = Batch(_mean(trial).to(first.batch.inputs), first.batch.targets)
        judged = evidence.judge(batch)
        total = sum(weight for *_, weight in trial)
        least = fusion.judged.energy if fusion else first.energy
        # Up to a misfit of 2 the residual is mostly noise, and candidates within 0.01 of the
        # pixels' range lie around one solution. Otherwise different ReLUs may be on, and energies
        # hardly show which of two solutions is better: on a development draw with max pooling, the
        # one of less energy was 5.1 dB worse (no results are kept).
        if first.judged.misfit > 2.0 and _distance(inputs, mean, evidence) > 1e-2:
            least = max(least, first.energy + 2.5 * evidence.equations)
        explains = evidence.is_noised or judged.distance < max(1.0, first.judged.distance)
        if explains and judged.energy < least:
            weights = {part.name: weight / total for part, _, weight in trial}
            parts, fusion = trial, Fusion(batch, judged, weights)
    return fusion


def _mean(parts: Sequence[tuple[Candidate, Tensor, float]]) -> Tensor:
    total = sum(weight for *_, weight in parts)
    return torch.stack([inputs * (weight / total) for _, inputs, weight in parts]).sum(0)


def _distance(one: Tensor, other: Tensor, evidence: Evidence) -> float:
    """Return the root mean square difference of two sets of inputs, in pixels of [0, 1]."""
    pixels = evidence.problem.spec.denormalize
    return float((pixels(one) - pixels(other)).square().mean().sqrt())


def _in_order(found: Batch, model: Batch) -> Tensor | None:
    """Return the inputs of ``found``, each at the place of the nearest sample of ``model``.

    The pairs have the least sum of squared distances. The result is ``None`` if the batches' labels
    differ.
    """
    if found.targets.shape != model.targets.shape:
        return None
    inputs = found.inputs.to(model.inputs)
    number = len(model)
    differ = (model.targets[:, None] != found.targets[None]).reshape(number, number, -1).any(-1)
    # A pair with different labels costs more than any squared distance of images.
    costs = torch.cdist(model.inputs.flatten(1), inputs.flatten(1)).square() + 1e12 * differ
    _, order = linear_sum_assignment(costs.cpu().numpy())
    order = torch.as_tensor(order)
    return inputs[order] if torch.equal(found.targets[order], model.targets) else None
