"""Run a forward pass through a ReLU network that numbers the ReLUs and applies known masks.

- A unit of a ReLU whose state is known passes its input on, or nothing.
- Max pooling right after a ReLU counts as a part of the ReLU: only each window's maximum is then
  on, and the outputs are the pooled values. Masks of maxima are for windows that do not overlap.
- The pass records every convolution with the number of the ReLU whose output it takes in.

Automatic differentiation handles skip connections, BatchNorm with given statistics and all other
pooling.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.known import Mask
from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.blur import blurred_relu
from flwr_leakage.attacks.network.calls import Affine, Geometry, Normalise, Op, Pair, Pool
from flwr_leakage.attacks.network.trace import ReachedError, Run, Trace
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class Use:
    """One call of a convolution in a forward pass.

    Attributes:
        name: the name of its weight.
        source: number of the ReLU whose output, pooled or not, it takes in; −1 for another input.
        input_shape: (C, H, W) of its input.
        outputs: its outputs (1, N, H', W').
        geometry: its kernel size, padding and stride.
    """

    name: str
    source: int
    input_shape: torch.Size
    outputs: Tensor
    geometry: Geometry


@dataclass(frozen=True)
class Normalised:
    """A BatchNorm of a pass whose batch's own statistics are held as constants.

    Attributes:
        op: the call, with its inputs z (1, C, H, W) and the statistics.
        first: m₁ (C,).
        second: m₂ (C,).
    """

    op: Normalise
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, op: Normalise, held: tuple[Tensor, Tensor]) -> "Normalised":
        """Return the call with ``γ ∂L/∂β`` and ``γ ∂L/∂γ`` of its layer."""
        count = op.inputs[0, 0].numel()
        return cls(op, held[0] / count, held[1] / count)

    @property
    def deviation(self) -> Tensor:
        """The standard deviation σ (C,)."""
        assert self.op.variance is not None
        return (self.op.variance + self.op.eps).sqrt()

    def normal(self, inputs: Tensor) -> Tensor:
        """Return x̂ of inputs z (1, C, H, W)."""
        assert self.op.mean is not None
        return (inputs - _wide(self.op.mean)) / _wide(self.deviation)

    def pull(self, normal: Tensor | None) -> Tensor:
        """Return the statistics' part of δ, for x̂ (1, C, H, W); ``None`` stands for x̂ = 0."""
        first, second = _wide(self.first), _wide(self.second)
        own = first if normal is None else first + second * normal
        return (-own / _wide(self.deviation)).expand_as(self.op.inputs)


def _wide(values: Tensor) -> Tensor:
    return values[:, None, None]


class ReluWalk:
    """A pass that applies known masks of ReLUs, which are numbered in their order.

    Args:
        problem: the network.
        inputs: (1, C, H, W) inputs of the pass.
        masks: known masks of ReLUs, by number.
        last: the number of the ReLU at which to stop; ``None`` for the whole network.
        pooled: windows of the ReLUs that are known to be pooled, by number.
        blur: width of the blur of ReLUs without a mask, in units of their inputs' deviation.

    Attributes:
        logits: the logits, or ``None`` if the pass stopped at ``last``.
        preactivations: the inputs of the ReLUs, by number.
        maxima: the largest preactivation of each window of pooled ReLUs, by number.
        windows: the window (height, width) of pooled ReLUs, by number.
        overlapping: by number, the pooling of a ReLU whose windows overlap, or are padded.
        pools: the pooled outputs, by the number of the ReLU.
        sources: numbers of the ReLUs by the ``id`` of their output, pooled or not.
        uses: the convolutions in their order.
        normalised: by the index of a convolution in ``uses``, the BatchNorm that takes its outputs
            and holds the batch's own statistics as constants.
    """

    def __init__(
        self,
        problem: Problem,
        inputs: Tensor,
        masks: Mapping[int, Mask] | None = None,
        last: int | None = None,
        pooled: Mapping[int, Pair] | None = None,
        blur: float = 0.0,
    ) -> None:
        self.masks = masks or {}
        self.last = last
        self.pooled = pooled or {}
        self.blur = blur
        self.preactivations: list[Tensor] = []
        self.maxima: dict[int, Tensor] = {}
        self.windows: dict[int, Pair] = {}
        self.overlapping: dict[int, Pool] = {}
        self.pools: dict[int, Tensor] = {}
        self.sources: dict[int, int] = {}
        self.uses: list[Use] = []
        self.normalised: dict[int, Normalised] = {}
        self._held = problem.gradient_map.held
        self._convolved: dict[int, int] = {}
        self._kept: list[Tensor] = []  # the id of a tensor that is kept alive is not reused
        run = partial(problem.logits, inputs)
        trace = Trace.of(run, problem.params, self._answer, records=False)
        self.logits: Tensor | None = trace.outputs

    def compared(self, number: int) -> Tensor:
        """Return the values that known outputs must equal: preactivations, or maxima of windows."""
        return self.maxima[number] if number in self.maxima else self.preactivations[number]

    def _answer(self, op: Op, run: Run) -> Tensor:
        """Return the outputs of a call, with known masks of ReLUs and their max pooling."""
        if isinstance(op, Elementwise) and op.activation.is_relu:
            return self._activate(op)
        number = self.sources.get(id(op.inputs), -1)
        if number >= 0 and isinstance(op, Pool) and op.is_largest:
            return self._pool(op, number)
        if isinstance(op, Normalise) and id(op.inputs) in self._convolved:
            name = op.name.removesuffix(".weight")
            if name in self._held:
                use = self._convolved[id(op.inputs)]
                self.normalised[use] = Normalised.of(op, self._held[name])
        outputs: Tensor = run()
        if not isinstance(op, Affine) or not op.is_convolution:
            return outputs
        geometry = op.geometry
        assert geometry is not None
        self.uses.append(Use(op.name, number, op.inputs.shape[1:], outputs, geometry))
        # A later call may write into its input, and must not change the recorded outputs.
        outputs = outputs.clone()
        self._convolved[id(outputs)] = len(self.uses) - 1
        self._kept.append(outputs)
        return outputs

    def _activate(self, op: Elementwise) -> Tensor:
        number = len(self.preactivations)
        inputs = op.inputs.clone() if op.in_place else op.inputs
        self.preactivations.append(inputs)
        if number == self.last and number not in self.pooled:
            raise ReachedError(inputs)
        outputs = inputs.clamp_min(0)
        if self.blur and number not in self.masks:
            outputs = blurred_relu(inputs, self.blur * inputs.detach().std())
        if number in self.masks:
            outputs = self.masks[number].gate(inputs, outputs)
        return self._from(number, op.answer(outputs))

    def _pool(self, op: Pool, number: int) -> Tensor:
        window = op.window
        pool = partial(
            F.max_pool2d,
            kernel_size=window,
            stride=op.stride,
            padding=op.padding,
            dilation=op.dilation,
            ceil_mode=op.ceil_mode,
        )
        self.windows[number] = window
        if not op.is_plain:
            self.overlapping[number] = op
        self.maxima[number] = pool(self.preactivations[number])
        if number == self.last:
            raise ReachedError(self.maxima[number])
        # only one entry of a window is on, so that the sum is its value
        if number in self.masks and op.is_plain:
            outputs = F.avg_pool2d(op.inputs, window, divisor_override=1)
        else:
            outputs = pool(op.inputs)
        self.pools[number] = outputs
        return self._from(number, outputs)

    def _from(self, number: int, outputs: Tensor) -> Tensor:
        self.sources[id(outputs)] = number
        self._kept.append(outputs)
        return outputs
