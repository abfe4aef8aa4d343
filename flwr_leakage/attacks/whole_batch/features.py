"""The features that a linear layer of a network takes, if possible without the ReLU before them.

Features ``h = max(0, c(x))`` behind the last ReLU of a pass also show its mask: where they are zero
the ReLU is off, whatever a candidate's own c(x) is. So candidates are fitted by c, the pass without
that ReLU. Max pooling and flattening between the ReLU and the layer change nothing, as the maximum
of ReLUs is the ReLU of the maximum. Averages do, so that the ReLU stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.calls import Op
from flwr_leakage.attacks.network.linear import AtLayer
from flwr_leakage.attacks.network.trace import ReachedError, Run
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR
from flwr_leakage.normalization import capture_batch_norm_inputs
from flwr_leakage.params import Params


class _Until(AtLayer):
    """The reader that ends a pass at one linear layer, and leaves one ReLU out.

    Args:
        names: the names of the parameters, by the tensors' ``id``.
        weight: the name of the layer's weight.
        left_out: number of the ReLU that is left out, −1 for none.

    Attributes:
        relus: number of calls of ReLUs so far.
    """

    def __init__(self, names: Mapping[int, str], weight: str, left_out: int) -> None:
        super().__init__(names, weight, _reached)
        self.left_out = left_out
        self.relus = 0

    def on_op(self, op: Op, run: Run) -> Tensor:
        """Return a call's outputs; leave the ReLU out, and stop at the layer."""
        if isinstance(op, Elementwise) and op.activation.is_relu:
            self.relus += 1
            if self.relus == self.left_out + 1:
                return op.answer(op.inputs)
        return super().on_op(op, run)


def _reached(features: Tensor) -> NoReturn:
    raise ReachedError(features)


@dataclass(frozen=True)
class FeaturePass:
    """The features c(x) of one network.

    Attributes:
        problem: the problem with the network.
        weight: the name of the layer's weight.
        left_out: number of the ReLU that is left out, −1 if none can be.
    """

    problem: Problem
    weight: str
    left_out: int

    @classmethod
    def of(cls, problem: Problem, weight: str, probes: Tensor) -> "FeaturePass":
        """Return the pass, without the last ReLU if a few inputs (N, C, H, W) show it can go."""
        whole = cls(problem, weight, -1)
        features, relus = whole.run(problem.params, probes)
        bare = cls(problem, weight, relus - 1)
        outputs, _ = bare.run(problem.params, probes)
        error = float((outputs.clamp_min(0) - features).abs().max())
        largest = float(features.abs().max())
        return bare if relus and error <= FLOAT32_RELATIVE_ERROR * largest else whole

    def __call__(self, params: Params, inputs: Tensor) -> Tensor:
        """Return c(x) (B, n), differentiable in inputs and parameters."""
        return self.run(params, inputs)[0]

    def with_held_loss(self, params: Params, inputs: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return c(x) (B, n), and what the layers before it add to the loss.

        Layers that normalise by a batch's statistics, held as constants, add something; see
        :func:`flwr_leakage.normalization.held_loss`.
        """
        gradient_map = self.problem.gradient_map
        if not gradient_map.held:
            return self(params, inputs), 0.0
        with capture_batch_norm_inputs(gradient_map.model) as captured:
            features = self(params, inputs)
        return features, gradient_map.held_loss(captured, self.problem.buffers)

    def run(self, params: Params, inputs: Tensor) -> tuple[Tensor, int]:
        """Return c(x) (B, n), and the number of ReLUs in the pass."""
        walk = _Until(
            {id(value): name for name, value in params.items()}, self.weight, self.left_out
        )
        try:
            with walk:
                self.problem.gradient_map.logits(params, inputs, self.problem.buffers)
        except ReachedError as reached:
            return reached.values, walk.relus
        raise ValueError(f"the pass does not meet {self.weight}.")
