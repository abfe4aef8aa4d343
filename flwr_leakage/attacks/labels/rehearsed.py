"""Count the samples of each class behind an update, by methods that are calibrated by rehearsals.

A rehearsal repeats the client's local training on dummy images whose labels are known.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.labels.counts import ClassCounts, class_counts
from flwr_leakage.attacks.network.linear import find_last_bias, find_last_layer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.gradient_map import repeat_training, require_optimizer
from flwr_leakage.params import Params, scale
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior

KINDS = ((0.5, 0.0), (0.9, 0.0), (0.7, 0.3))
"""The kinds of dummy images. For each kind: the probability of a dummy's class up to which the
network's gradient moves the dummy, and the share of labels that are wrong. A method is calibrated
on two kinds and tested on the third. Its error on dummies of another kind is taken for its error on
private samples. The values were chosen on development draws; no results are kept."""

DUMMIES = 240
"""Number of dummy images of each of the :data:`KINDS`, over all classes; there are at least two of
each class. The value bounds the cost of making them."""

SAMPLES, LEAST_BATCH, LARGEST_BATCH = 4096, 4, 32
"""Number of samples that all steps of a rehearsal (a training on dummies) take together, and its
smallest and largest mini-batch. If the training has many steps, the mini-batches are smaller. The
values bound the cost."""

MAX_STEPS = 256
"""Largest number of steps of a rehearsal, which repeats local training on dummy images. There must
be a limit, as a client may claim any number."""

REPLAYED_STEPS = 100
"""Largest number of local steps for which :class:`ClassCounts` is tried. It replays all steps 50
times for each rehearsal, a repetition of the training on dummies."""

CONCENTRATION = 0.5
"""The concentration of the symmetric Dirichlet law from which rehearsals (trainings on dummies)
draw their class frequencies. The value makes clients skewed, as in experiments on label skew; no
results for other values are kept."""

NOISE_DRAWS = 2
"""Number of draws of noise that are added to the update of each rehearsal, as it is and scaled to
the size of the client's clipped update. Six rehearsals give 24 noisy ones."""

NOISE_AGAIN = 24
"""Number of draws of noise that are added to an update that is noisy already, to see how far its
class counts move."""

NOISE_SHARE = 0.01
"""Share of noise in the last layer's update above which the noise counts as that of a defense. From
an update with less noise, class counts follow to within a percent. Rounding is smaller."""

RATES = torch.logspace(-3, 4, 57).tolist()
"""The values among which the free rate r of each method in :data:`METHODS` is chosen. A method
multiplies a change of the classifier by r, and infers class frequencies from the product."""


@dataclass(frozen=True)
class Shift:
    """The change of a classifier's outputs by local training, for fixed inputs, the probes.

    Attributes:
        before: (K,) mean softmax of the probes at the parameters before training.
        after: (K,) mean softmax of the probes at the parameters after training.
        logits: (K,) mean change of the probes' logits.
        bias: (K,) change of the logits' bias; ``None`` if the logits have no trained bias.
    """

    before: Float[Tensor, " K"]
    after: Float[Tensor, " K"]
    logits: Float[Tensor, " K"]
    bias: Float[Tensor, " K"] | None


def _normalized(frequencies: Tensor) -> Tensor:
    positive = frequencies.clamp_min(0)
    return positive / positive.sum().clamp_min(1e-9)


def _unit(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std().clamp_min(1e-12)


def _bias(shift: Shift) -> Tensor:
    assert shift.bias is not None
    return shift.bias


METHODS: dict[str, Callable[[Shift, float], Tensor]] = {
    "sum of bias gradients": lambda s, r: _normalized((s.before + s.after) / 2 + r * _bias(s)),
    "shift of the bias": lambda s, r: (s.before.log() + r * _bias(s)).softmax(0),
    "shift of bias and logits": lambda s, r: (r * (_unit(_bias(s)) + _unit(s.logits))).softmax(0),
    "shift of the logits": lambda s, r: (s.before.log() + r * s.logits).softmax(0),
    "answers after training": lambda s, r: (r * s.after.log()).softmax(0),
}
"""The methods by name. Each gives class frequencies c (K,) for a :class:`Shift` and one free rate
r > 0.

- The first is exact for SGD of T steps at the rate η if p̄, the mean of the softmax p_t over steps
  t, is known: the bias changes by Δb = −η Σ_t (p_t − c), so that c = p̄ + Δb / (ηT). The method
  takes the mean of the softmax before and after training for p̄.
- The others take c as the class prior that the classifier has learnt. A fully learnt prior shifts
  its logits by log c (label shift; Saerens, Latinne and Decaestecker 2002); r scales the shift.
"""

BIASED = tuple(METHODS)[:3]
"""The names of those of the :data:`METHODS` that need a trained bias of the logits."""

REPLAY = "replay of the last layer"
"""The name of the method by which :class:`ClassCounts` infers class frequencies: it replays the
last layer's training, and has no free rate."""


@dataclass(frozen=True)
class LabelEstimate:
    """An estimate of the class counts behind an update.

    Attributes:
        counts: (K,) number of the client's samples in each class, which sum to the client's total.
        expected_right: share of labels, repeated ones included, that the method had right in
            rehearsals (trainings on dummies with known labels), on average. The method was
            calibrated on other kinds of dummies.
        least_right: the smallest such share among the rehearsals.
        uniform_right: the average share that equal counts for all classes had right in the same
            rehearsals.
        method: the name of the method that was used, as it had the largest share right.
        rehearsals: number of rehearsals.
    """

    counts: Int[Tensor, " K"]
    expected_right: float
    least_right: float
    uniform_right: float
    method: str
    rehearsals: int


def share_right(counts: Tensor, truth: Tensor) -> float:
    """Return the share of labels that two counts (K,) of equal sum have in common.

    It is ``Σ_k min(counts_k, truth_k) / Σ_k truth_k``, which is 1 − TV with the total-variation
    distance TV of the class frequencies. Frequencies may be given in place of counts.

    Example:
        >>> share_right(torch.tensor([3, 1, 0]), torch.tensor([2, 1, 1]))
        0.75
    """
    return float(torch.minimum(counts, truth).sum() / truth.sum())


@dataclass(frozen=True)
class _Rehearsed:
    """One rehearsal of a client's training on dummy samples with known labels.

    Attributes:
        kind: the index of the kind of dummies in ``KINDS``.
        delta: the update that the training gave; empty if it is not kept.
        shift: the change of the classifier's outputs by that training.
        truth: (K,) the frequencies of the dummies' classes.
        replayed: share of labels that a replay of the last layer infers rightly; ``None`` if the
            replay does not apply.
    """

    kind: int
    delta: Params
    shift: Shift
    truth: Tensor
    replayed: float | None


@dataclass(frozen=True)
class Rehearsals:
    """Rehearsals of local training on dummies, from the parameters that the server sent.

    They calibrate the estimates for all clients that train with the same settings from these
    parameters; see :func:`rehearse`.

    Attributes:
        problem: the problem of one of these clients.
        probes: (M, C, H, W) inputs whose logits are compared before and after training.
        bias: the name of the logits' bias, or ``None``.
        head: the name of the last layer's trained weight. It is empty if no layer gives the logits,
            or if its rows do not sum to zero in rehearsals, as after steps of Adam.
        made: the rehearsals.
        schedule_steps: number of local steps of each rehearsal.
    """

    problem: Problem
    probes: Tensor
    bias: str | None
    head: str
    made: list[_Rehearsed]
    schedule_steps: int

    def estimate(self, problem: Problem, num_examples: int | None = None) -> LabelEstimate:
        """Return the class counts behind a client's update.

        The method is the one that was best in rehearsals, repetitions of the training on dummies.
        If the update has noise, the rehearsals get noise of the same size, so that the methods are
        calibrated under it. A client that adds noise may also clip. So half of the rehearsals that
        are judged are scaled to the update's length. Noise is added to the update again several
        times: ``expected_right`` is at most the mean share of labels that stay the same, and
        ``least_right`` the least one (a parametric bootstrap; Efron 1979). The counts sum to
        ``num_examples``, by default to the problem's number of samples.

        Raises:
            ValueError: under the update's noise no method has more labels right than equal counts,
                or the rehearsals' updates, to which noise is added, were not kept.
        """
        std = self._noise_of(problem)
        made = tests = self._under_noise(problem, std, 1.0) if std else self.made
        size = self._clipped_to(problem, std) if std else 1.0
        if std:
            tests = [*made, *self._under_noise(problem, std, size)]
        best, least, name = -1.0, -1.0, ""
        rate: float | None = None
        for tried, method in METHODS.items():
            if tried in BIASED and self.bias is None:
                continue
            shares = []
            for kind in range(len(KINDS)):
                others = [each for each in made if each.kind != kind]
                fitted = _best_rate(method, others)
                shares += [
                    share_right(method(each.shift, fitted), each.truth)
                    for each in tests
                    if each.kind == kind
                ]
            mean = sum(shares) / len(shares)
            if mean > best:
                best, least, name = mean, min(shares), tried
                rate = _best_rate(method, made)
        replayed = [each.replayed for each in tests if each.replayed is not None]
        if len(replayed) == len(tests):
            mean = sum(replayed) / len(replayed)
            if mean > best:
                best, least, name, rate = mean, min(replayed), REPLAY, None
        uniform = torch.full_like(made[0].truth, 1 / len(made[0].truth))
        blind = sum(share_right(uniform, each.truth) for each in made) / len(made)
        observed = scale(problem.gradient, -problem.schedule.learning_rate)

        def inferred(delta: Params) -> Tensor:
            if rate is not None:
                return METHODS[name](_shift(problem, delta, self.probes, self.bias), rate)
            gradient = scale(delta, -1 / problem.schedule.learning_rate)
            return _replay(replace(problem, gradient=gradient))

        frequencies = inferred(observed)
        if std:
            stream = torch.Generator().manual_seed(1)
            step = problem.schedule.learning_rate * std / size
            again = (_with_noise(observed, step, stream) for _ in range(NOISE_AGAIN))
            kept = [share_right(inferred(delta), frequencies) for delta in again]
            best, least = min(best, sum(kept) / len(kept)), min(least, *kept)
        if std and best <= blind:
            raise ValueError(
                f"noise of {std:.2g} on each entry of the update hides the class counts: "
                f"{best:.0%} of labels are expected to be right, and {blind:.0%} by equal counts"
            )
        return LabelEstimate(
            class_counts(
                torch.zeros_like(frequencies), frequencies, num_examples or problem.num_samples
            ),
            best,
            least,
            blind,
            name,
            len(self.made),
        )

    def _noise_of(self, problem: Problem) -> float:
        """Return σ of the noise on the entries of a pseudo-gradient, 0 if none is noticed.

        The errors of a softmax sum to zero over K classes. So do the K rows of the last layer's
        gradient, whatever the samples. So each entry of their sum is noise alone, of variance Kσ².
        If entries are zero, the update was pruned and not noised.
        """
        if not self.head:
            return 0.0
        matrix = problem.gradient[self.head]
        zeros = float((matrix == 0).double().mean())
        if zeros > NOISE_SHARE or _noise_share(matrix) <= NOISE_SHARE:
            return 0.0
        return float(matrix.double().sum(0).square().mean() / len(matrix)) ** 0.5

    def _clipped_to(self, problem: Problem, std: float) -> float:
        """Return the size s ≤ 1 of a client's update G in the last layer, without its noise.

        It is relative to the rehearsals' updates R: ``s² = (‖G‖² − dσ²) / mean ‖R‖²`` for d entries
        with noise σ. The numerator is at least √(2d) σ², the standard deviation of the noise's
        squared norm.
        """
        released, rate = problem.gradient[self.head].double(), problem.schedule.learning_rate
        energies = [float(each.delta[self.head].double().square().sum()) for each in self.made]
        repeated = sum(energies) / len(energies) / rate**2
        own = float(released.square().sum()) - released.numel() * std**2
        own = max(own, (2 * released.numel()) ** 0.5 * std**2)
        return min(1.0, math.sqrt(own / max(repeated, 1e-300)))

    def _under_noise(self, problem: Problem, std: float, size: float) -> list[_Rehearsed]:
        """Return noisy rehearsals: each update, scaled by ``size``, with ``NOISE_DRAWS`` noises.

        A rehearsal's update is that of a training on dummies. ``std`` is the noise's standard
        deviation in an entry of the pseudo-gradient.

        Raises:
            ValueError: the rehearsals' updates were not kept.
        """
        if not all(each.delta for each in self.made):
            raise ValueError(
                f"the update has noise of {std:.2g} on each entry, and rehearsals of more than "
                f"{REPLAYED_STEPS} steps or of a mean update keep nothing to which it can be added"
            )
        step, stream = problem.schedule.learning_rate * std, torch.Generator().manual_seed(0)
        found = []
        for each in self.made * NOISE_DRAWS:
            delta = _with_noise(scale(each.delta, size), step, stream)
            shift = _shift(problem, delta, self.probes, self.bias)
            replayed = _replayed(self.problem, self.schedule_steps, delta, each.truth)
            found.append(replace(each, delta={}, shift=shift, replayed=replayed))
        return found


def _with_noise(delta: Params, std: float, stream: torch.Generator) -> Params:
    """Return an update with independent Gaussian noise of deviation ``std`` added to each entry."""
    return {
        name: value + std * torch.randn(value.shape, generator=stream).to(value)
        for name, value in delta.items()
    }


def _noise_share(matrix: Tensor) -> float:
    """Return ``‖Σₖ Gₖ‖ / ‖G‖`` of a last layer's update G with rows Gₖ: about 1 if G is only noise,
    and 0 up to rounding without noise.
    """
    whole = float(matrix.double().norm())
    return float(matrix.double().sum(0).norm()) / max(whole, 1e-300)


def _replayed(problem: Problem, steps: int, delta: Params, truth: Tensor) -> float | None:
    """Return the share of a rehearsal's labels that a replay of the last layer infers rightly.

    The rehearsal is a training on dummies of ``steps`` steps, with the update ``delta`` and class
    frequencies ``truth`` (K,). The result is ``None`` if the replay refuses it.
    """
    gradient = scale(delta, -1 / problem.schedule.learning_rate)
    posed = replace(problem, gradient=gradient, schedule=replace(problem.schedule, num_steps=steps))
    try:
        return share_right(_replay(posed), truth)
    except ValueError:  # a replay needs a last linear layer, plain SGD and few steps
        return None


def rehearse(
    problem: Problem,
    optimizer: str = "SGD",
    draws: int = 2,
    seed: int = 0,
    max_seconds: float | None = None,
) -> Rehearsals:
    """Return rehearsals, which repeat a client's local training on dummies with known labels.

    They calibrate estimates of the client's class counts. Dummies are draws of a Gaussian prior of
    images, moved along the gradient of their class's probability. So the network's outputs for them
    are about those for samples of their class, and no image is needed. Each rehearsal draws class
    frequencies, and trains from the parameters that the client received, with its optimizer and
    about its number of steps. The change of the classifier is kept.

    Args:
        problem: the problem of an update of the client. The client's training is repeated; the
            update itself is not used.
        optimizer: the name of the client's optimizer, one of
            :data:`~flwr_leakage.gradient_map.OPTIMIZERS`.
        draws: number of rehearsals with each kind of dummies, ≥ 1.
        seed: the seed of all draws.
        max_seconds: CPU seconds; once they are spent, one rehearsal with each kind is enough.
            ``None`` for no limit.

    Raises:
        ValueError: the optimizer is not one of ``OPTIMIZERS``, ``draws`` is less than 1, or even
            one rehearsal with each kind takes more than ``max_seconds``.
    """
    require_optimizer(optimizer)
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}.")
    budget = Budget.of(max_seconds)
    bias, head = find_last_bias(problem), _head(problem)
    is_short = problem.schedule.num_steps <= REPLAYED_STEPS
    keeps_deltas = optimizer == "SGD" and is_short and not problem.members
    stream = torch.Generator().manual_seed(seed)
    probes, _ = _dummies(problem, 0.7, max(DUMMIES // 3 // problem.spec.num_classes, 2), stream)
    steps = rehearsed_steps(problem.schedule.num_steps)
    per_class = max(DUMMIES // problem.spec.num_classes, 2)
    pools = [(_dummies(problem, goal, per_class, stream), wrong) for goal, wrong in KINDS]
    made = []
    for draw in range(draws):
        if draw and budget.is_spent:
            break
        limit = Budget() if draw else budget
        for kind, ((inputs, _), wrong) in enumerate(pools):
            labels, sources = _drawn(problem, steps, per_class, wrong, stream)
            delta = _train(problem, optimizer, inputs, labels, sources, limit)
            counts = torch.bincount(labels.flatten(), minlength=problem.spec.num_classes)
            truth = counts.to(inputs) / counts.sum()
            shift = _shift(problem, delta, probes, bias)
            if head and _noise_share(delta[head]) > NOISE_SHARE:
                head = ""
            delta = delta if keeps_deltas else {}
            replayed = _replayed(problem, steps, delta, truth)
            made.append(_Rehearsed(kind, delta, shift, truth, replayed))
    return Rehearsals(problem, probes, bias, head, made, steps)


def _head(problem: Problem) -> str:
    """Return the name of the last layer's weight; empty if it is frozen, or no layer gives the
    logits.
    """
    try:
        name = find_last_layer(problem).weight
    except ValueError:
        return ""
    return name if name in problem.gradient_map.trained else ""


def rehearsed_steps(num_steps: int) -> int:
    """Return the number of local steps in the rehearsals for a client with ``num_steps`` steps.

    Rehearsals repeat the client's training on dummies. Up to 8 steps it is the same number. Beyond,
    it is the nearest of numbers that grow by factors of 2^¼, and at most 256. So clients of similar
    sizes can share their rehearsals.

    Example:
        >>> [rehearsed_steps(n) for n in (1, 8, 15, 16, 80, 5000)]
        [1, 8, 16, 16, 76, 256]
    """
    if num_steps <= 8:
        return num_steps
    return min(round(2 ** (round(4 * math.log2(num_steps)) / 4)), MAX_STEPS)


def _replay(problem: Problem) -> Tensor:
    """Return the class frequencies (K,) behind an update, by a replay of the last layer.

    Raises:
        ValueError: the update is empty, it has too many steps, or :class:`ClassCounts` refuses it.
    """
    if not problem.gradient or problem.schedule.num_steps > REPLAYED_STEPS:
        raise ValueError("the update is not replayed")
    labels = ClassCounts()(problem, torch.Generator().manual_seed(0))
    counts = torch.bincount(labels, minlength=problem.spec.num_classes)
    return counts / counts.sum()


def _best_rate(method: Callable[[Shift, float], Tensor], made: Sequence[_Rehearsed]) -> float:
    """Return the rate r > 0 at which a method has most labels right over all given rehearsals.

    A rehearsal is a training on dummies with known labels. The method maps the change of a
    classifier's outputs by it, and the rate as one free factor of this change, to class frequencies
    (K,).
    """

    def right(rate: float) -> float:
        return sum(share_right(method(each.shift, rate), each.truth) for each in made)

    return max(RATES, key=right)


def _shift(problem: Problem, delta: Params, probes: Tensor, bias: str | None) -> Shift:
    with torch.no_grad():
        before = problem.logits(probes)
        moved = {name: value + delta[name] for name, value in problem.params.items()}
        after = problem.gradient_map.logits(moved, probes, problem.buffers)
    return Shift(
        before.softmax(1).mean(0).clamp_min(1e-9),
        after.softmax(1).mean(0).clamp_min(1e-9),
        (after - before).mean(0),
        None if bias is None else delta[bias].flatten(),
    )


def _dummies(
    problem: Problem, goal: float, per_class: int, stream: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return dummy inputs (K·M, C, H, W), M for each of K classes, and their classes (K·M,).

    The inputs stand in the order of classes. Each starts as a draw of a prior of images. It moves
    along the normalised gradient of its class's log-probability, by 0.04 of the draw's own length
    at a time, until that probability reaches ``goal`` in (0, 1). The step and the number of
    iterations were chosen on development draws. M is ``per_class``.
    """
    spec, prior = problem.spec, ImagePrior.of(problem.spec)
    like = problem.like
    classes = torch.arange(spec.num_classes).repeat_interleave(per_class)
    codes = torch.randn(len(classes), *spec.shape, generator=stream).double()
    stride = 0.04 * math.sqrt(math.prod(spec.shape))

    def inputs(codes: Tensor) -> Tensor:
        return spec.clamp(prior.inputs(codes)).to(like)

    targets = classes.to(like.device)
    for _ in range(12):
        codes.requires_grad_(True)
        log_softmax = problem.logits(inputs(codes)).log_softmax(1)
        (gradient,) = torch.autograd.grad(-F.nll_loss(log_softmax, targets, reduction="sum"), codes)
        own = log_softmax.detach().gather(1, targets[:, None])[:, 0].exp().to(codes)
        length = gradient.flatten(1).norm(dim=1).clamp_min(1e-12)
        pace = torch.where(own < goal, stride / length, 0.0).reshape(-1, 1, 1, 1)
        codes = (codes + pace * gradient).detach()
        if not bool((own < goal).any()):
            break
    return inputs(codes.detach()).detach(), classes


def _drawn(
    problem: Problem, steps: int, per_class: int, wrong: float, stream: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return labels (T, B) for T steps, and the index (T, B) of the dummy input for each label.

    The labels have random class frequencies. There are ``per_class`` dummies of each class, in the
    order of classes. ``wrong`` is the share of labels whose dummy is of a random class. The number
    of classes and the schedule are those of the problem.
    """
    classes, schedule = problem.spec.num_classes, problem.schedule
    most = min(schedule.batch_size, problem.num_samples, LARGEST_BATCH)
    size = min(max(SAMPLES // steps, LEAST_BATCH), most)
    concentration = torch.full((classes,), CONCENTRATION)
    # A Dirichlet draw is a normalised draw of gammas, here from the given stream.
    frequencies = torch._standard_gamma(concentration, generator=stream).clamp_min(1e-6)
    labels = torch.multinomial(frequencies, steps * size, replacement=True, generator=stream)
    shown = torch.where(
        torch.rand(len(labels), generator=stream) < wrong,
        torch.randint(classes, (len(labels),), generator=stream),
        labels,
    )
    sources = shown * per_class + torch.randint(per_class, (len(labels),), generator=stream)
    return labels.reshape(steps, size), sources.reshape(steps, size)


def _train(
    problem: Problem,
    optimizer: str,
    inputs: Tensor,
    labels: Tensor,
    sources: Tensor,
    budget: Budget,
) -> Params:
    """Return the change θ_local − θ_t of parameters by a training on dummies.

    Step t of the named optimizer takes the ``inputs`` with the indices ``sources[t]`` (B,), and the
    labels ``labels[t]``.
    """

    def batches() -> Iterator[Batch]:
        for step, row in enumerate(sources):
            if budget.is_spent:
                raise ValueError(
                    f"the {len(labels)} steps of a rehearsal take more than the CPU seconds that "
                    f"there are for it"
                )
            yield Batch(inputs[row], labels[step].to(inputs.device))

    start, schedule = problem.params, problem.schedule
    return repeat_training(
        optimizer, problem.gradient_map, start, batches(), schedule, problem.buffers
    )
