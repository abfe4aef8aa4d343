"""Compute the dense Jacobian of a gradient by the samples, and test whether the gradient jumps.

It jumps where the derivative of the network by its inputs does, as at the kink of a ReLU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget, Stopwatch
from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.blur import has_kinks as names_kinks
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.problem import Problem, simulate_rounds
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior


def gram_seconds(rows: Tensor) -> float:
    """Return an estimate of the CPU seconds of ``A Aᵀ``, by a timed block of A, ``rows`` (n, k)."""
    block, watch = rows[:512], Stopwatch()
    block @ block.T
    return watch.seconds * (len(rows) / len(block)) ** 2 / 2


_ENTRIES = 2**27
"""Largest number of entries in a block of the Jacobian's columns, which are computed at once: 1 GiB
in float64. At 11 million parameters 128 columns would take 11 GB. The budget is checked between
blocks only."""


@dataclass(frozen=True)
class Jacobian:
    """The pseudo-gradients of all rounds as a function g of the samples, and its dense Jacobian.

    The gradient of a batch may be the mean of its samples' gradients, as in one plain step without
    batch statistics. Then a column of the Jacobian is the derivative of one sample's gradient, and
    costs less by a factor of the number of samples. A test of the gradients shows if this holds.

    Attributes:
        problem: the network and the schedule of each round, in double precision.
        targets: the labels of the samples.
        max_entries: largest number of entries that a Jacobian may have.
    """

    problem: Problem
    targets: Tensor
    max_entries: int

    def require(self, entries: int) -> None:
        """Raise ``ValueError`` if the Jacobian would have more than ``max_entries`` entries.

        It has N numbers for each of the wanted ``entries`` of the gradient, for N input values.
        """
        if self.size * entries > self.max_entries:
            raise ValueError(
                f"the Jacobian may have {self.max_entries} entries, it has {self.size * entries}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (B, C, H, W) of the inputs of all samples."""
        return (self.problem.num_samples, *self.problem.spec.shape)

    @property
    def size(self) -> int:
        """Number N of input values of all samples: samples times pixels times channels."""
        return torch.Size(self.shape).numel()

    def gradient(self, inputs: Tensor) -> Tensor:
        """Return the pseudo-gradients (P,) of all rounds, the latest first, that samples with the
        given inputs (B, C, H, W) would cause.
        """
        return simulate_rounds(self.problem, Batch(inputs, self.targets))

    def transposed(
        self, inputs: Tensor, budget: Budget = UNLIMITED, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return ``(∂g/∂x)ᵀ`` (N, P') at inputs x, or ``None`` if the budget is too small.

        N counts the input values, and P' the wanted entries of g, where ``rows`` (P,) is true;
        ``None`` for all. Before each block of columns of ∂g/∂x, the time of the blocks so far tells
        whether the rest fits into the budget.
        """
        if not self._is_mean(inputs):
            return self._columns(self.gradient, inputs, budget, rows)
        blocks = []
        for index in range(len(inputs)):

            def own(sample: Tensor, index: int = index) -> Tensor:
                return self._of_sample(sample, index) / len(inputs)

            block = self._columns(own, inputs[index : index + 1], budget, rows)
            if block is None:
                return None
            blocks.append(block)
        return torch.cat(blocks)

    def _of_sample(self, sample: Tensor, index: int) -> Tensor:
        p = self.problem
        batch = Batch(sample, self.targets[index : index + 1])
        gradient = p.gradient_map(p.params, batch, p.buffers)
        return ravel({name: gradient[name] for name in p.gradient})

    def _is_mean(self, inputs: Tensor) -> bool:
        if len(inputs) == 1 or len(self.problem.rounds) > 1 or not self.problem.is_single_gradient:
            return False
        with torch.no_grad():
            whole = self.gradient(inputs)
            each = [self._of_sample(x[None], index) for index, x in enumerate(inputs)]
        # The batch's gradient counts as the mean of its samples' gradients if both differ by
        # float64's rounding only, a relative distance of up to 1e-10.
        return bool((torch.stack(each).mean(0) - whole).norm() <= 1e-10 * whole.norm())

    def _columns(
        self,
        function: Callable[[Tensor], Tensor],
        inputs: Tensor,
        budget: Budget,
        rows: Tensor | None,
    ) -> Tensor | None:
        found = []
        basis = torch.eye(inputs.numel(), dtype=inputs.dtype).reshape(-1, *inputs.shape)
        entries = sum(value.numel() for p in self.problem.rounds for value in p.gradient.values())
        blocks, watch = basis.split(max(1, min(128, _ENTRIES // entries))), Stopwatch()
        for number, block in enumerate(blocks):
            left, each = len(blocks) - number, watch.seconds / max(1, number)
            if budget.is_spent or budget.affordable(left, each) < left:
                return None
            columns = torch.func.vmap(lambda v: torch.func.jvp(function, (inputs,), (v,))[1])(block)
            found.append(columns if rows is None else columns[:, rows])
        return torch.cat(found)


def has_kinks(problem: Problem, budget: Budget = UNLIMITED) -> bool:
    """Return whether the derivative of the logits by the inputs jumps, as with ReLUs.

    It does if a forward pass calls a function whose derivative is known to jump. Otherwise a
    numerical test decides.

    Raises:
        BudgetExhausted: the budget is too small for the numerical test (:func:`is_rough`).
    """
    return calls_kinks(problem) or is_rough(problem, budget)


def calls_kinks(problem: Problem) -> bool:
    """Return whether a forward pass of a grey image calls functions that are known to have kinks.

    A kink is a point at which the derivative jumps. The functions are max pooling, and activations
    with a kink between the least and the largest of their inputs, such as ReLU. The inputs of
    hardswish mostly lie between its kinks at ±3.
    """
    grey = torch.full((1, *problem.spec.shape), 0.5)
    inputs = problem.spec.normalize(grey).to(problem.like)
    for step in traced(problem, inputs).steps:
        if isinstance(step.op, Elementwise):
            least, most = float(step.inputs.min()), float(step.inputs.max())
            if any(least <= place <= most for place, _ in step.op.activation.kinks):
                return True
        elif names_kinks(step.op):
            return True
    return False


def is_rough(problem: Problem, budget: Budget = UNLIMITED) -> bool:
    """Return whether the logits' derivative jumps along lines between two random images.

    Along a line with steps of length h, the second differences of a smooth function f are h² f''
    and the fourth differences h⁴ f''''. At a kink, where f' jumps, both are about h times the jump.
    So the function is smooth if fourth differences are far smaller than second ones, and has kinks
    if they are about as large.

    The test finds kinks of any function, such as ReLU6, ``abs`` or a maximum. It costs up to 199
    forward passes. It misses kinks outside the range of these images, such as those of hardswish at
    ±3. It also misses kinks that make less than a tenth of the sum of squared second differences,
    such as those of a few among many smooth units. Activations whose second derivative jumps, such
    as ELU, count as smooth. Activations that change within a few hundredths of the way between two
    images count as rough, and so do networks that always compute in single precision.

    Raises:
        BudgetExhausted: the budget is too small for the test.
    """
    problem = problem.to(torch.float64)  # in single precision, rounding would be taken for kinks
    prior = ImagePrior.of(problem.spec)
    stream = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 3, *problem.spec.shape, generator=stream, dtype=torch.float64)
    images = problem.spec.clamp(prior.inputs(draws.flatten(0, 1)))
    starts, ends = images.reshape(draws.shape)
    watch = Stopwatch()
    with torch.no_grad():
        problem.logits(images[:1])
    each = watch.seconds
    # These lengths are in units of the distance between a line's ends. Steep activations are smooth
    # on the short line only. If there are few ReLUs, they flip on the long line only.
    for length in (1 / 8, 1.0):
        steps = torch.linspace(0, length, 33, dtype=torch.float64).reshape(-1, 1, 1, 1)
        lines = [start + steps * (end - start) for start, end in zip(starts, ends, strict=True)]
        budget.require(each * sum(map(len, lines)), "the test for kinks")
        with torch.no_grad():
            logits = torch.stack([problem.logits(line) for line in lines])
        second = logits.diff(n=2, dim=1)
        # Second differences below 1e-9 of the largest logit may be rounding, and say nothing about
        # kinks. Then the longer line decides.
        if float(second.abs().max()) > 1e-9 * float(logits.abs().max()):
            fourth = second.diff(n=2, dim=1)
            # A kink's second difference d gives fourth differences d, −2d and d, whose squares sum
            # to 6 d². So the limit of 0.7², about a half, is exceeded if kinks make a twelfth of
            # the sum of squared second differences.
            return float(fourth.square().mean()) > 0.7**2 * float(second.square().mean())
    return False
