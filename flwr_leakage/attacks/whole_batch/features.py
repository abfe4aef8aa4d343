"""The features that a linear layer of a network takes, if possible without the ReLU before them.

Features ``h = max(0, c(x))`` behind the last ReLU of a pass also show its mask: where they are zero
the ReLU is off, whatever a candidate's own c(x) is. So candidates are fitted by c, the pass without
that ReLU. Max pooling and flattening between the ReLU and the layer change nothing, as the maximum
of ReLUs is the ReLU of the maximum. Averages do, so that the ReLU stays.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.calls import Affine, Op
from flwr_leakage.attacks.network.trace import ReachedError, Run, Trace
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR
from flwr_leakage.normalization import capture_batch_norm_inputs
from flwr_leakage.params import Params


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
        relus = 0

        def answer(op: Op, run: Run) -> Tensor:
            nonlocal relus
            if isinstance(op, Affine) and op.is_layer(self.weight):
                raise ReachedError(op.inputs)
            if isinstance(op, Elementwise) and op.activation.is_relu:
                relus += 1
                if relus == self.left_out + 1:
                    return op.answer(op.inputs)
            outputs: Tensor = run()
            return outputs

        logits = self.problem.gradient_map.logits
        run = partial(logits, params, inputs, self.problem.buffers)
        trace = Trace.of(run, params, answer, records=False)
        if trace.reached is not None:
            return trace.reached, relus
        raise ValueError(f"the pass does not meet {self.weight}.")
