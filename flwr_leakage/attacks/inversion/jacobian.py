"""The dense Jacobian of an update with respect to the samples, by forward derivatives."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget, Stopwatch
from flwr_leakage.attacks.problem import Problem, simulate_rounds
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch


def gram_seconds(rows: Tensor, panel: int = 512) -> float:
    """Return about how many CPU seconds ``gram(rows)`` takes, from the time of one of its blocks.

    Args:
        rows: (n, k) the matrix A of ``A Aᵀ``.
        panel: the number of rows in a block, of which ``gram`` computes (n / panel)² / 2.
    """
    block, watch = rows[:panel], Stopwatch()
    block @ block.T
    return watch.seconds * (len(rows) / len(block)) ** 2 / 2


@dataclass(frozen=True)
class Jacobian:
    """The gradients of all rounds as one function of the inputs, and its derivative.

    If a batch's gradient is the mean of its samples' gradients, as in one plain step without batch
    statistics, a column is the derivative of one sample's gradient. It then costs less by a factor
    of the number of samples. The gradients at the point itself decide whether this holds.

    Attributes:
        problem: the problem in double precision.
        targets: the labels of the samples.
        chunk_size: number of columns that are computed together.
        max_entries: largest number of entries of a Jacobian; a larger one is refused.
    """

    problem: Problem
    targets: Tensor
    chunk_size: int = 128
    max_entries: int = 200_000_000

    def require(self, entries: int) -> None:
        """Raise if the Jacobian of so many entries of the update would be too large.

        Raises:
            ValueError: it has more than ``max_entries`` entries.
        """
        if self.size * entries > self.max_entries:
            raise ValueError(
                f"the Jacobian may have {self.max_entries} entries, it has {self.size * entries}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (B, C, H, W) of the inputs."""
        return (self.problem.num_samples, *self.problem.spec.shape)

    @property
    def size(self) -> int:
        """Number of pixels of all samples, times channels."""
        return torch.Size(self.shape).numel()

    def gradient(self, inputs: Tensor) -> Tensor:
        """Return g(x) (P,), all rounds one after another."""
        return simulate_rounds(self.problem, Batch(inputs, self.targets))

    def transposed(
        self, inputs: Tensor, budget: Budget = UNLIMITED, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return ``(∂g/∂x)ᵀ`` (N, P) at inputs; ``None`` if the budget is spent.

        Args:
            inputs: (B, C, H, W) x.
            budget: a limit that is checked between blocks of columns.
            rows: (P,) whether an entry of the update is wanted; ``None`` for all.
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
        # A relative distance of up to 1e-10 is float64's rounding.
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
        for block in basis.split(self.chunk_size):
            if budget.is_spent:
                return None
            columns = torch.func.vmap(lambda v: torch.func.jvp(function, (inputs,), (v,))[1])(block)
            found.append(columns if rows is None else columns[:, rows])
        return torch.cat(found)
