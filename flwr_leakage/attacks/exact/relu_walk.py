"""Run a forward pass through a ReLU network that numbers the ReLUs and applies known masks.

A mask says which units of a ReLU are on.

- A unit whose state is known passes its input on if it is on, and zero if it is off.
- Max pooling right after a ReLU counts as a part of the ReLU: only the maximum of each window is
  then on, and the outputs are the pooled values. Such masks are for windows that do not overlap.
- The pass records every convolution with the number of the ReLU whose output it takes.

Automatic differentiation handles skip connections, BatchNorm with given statistics and all other
pooling.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.known import Mask
from flwr_leakage.attacks.network.activations import Elementwise
from flwr_leakage.attacks.network.blur import blurred_relu
from flwr_leakage.attacks.network.calls import Affine, Geometry, Op, Pair, Pool
from flwr_leakage.attacks.network.trace import ReachedError, Run, Trace
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.normalization import capture_batch_norm_inputs


@dataclass(frozen=True)
class Use:
    """One call of a convolution in a forward pass, with the ReLU that gave its input.

    Attributes:
        name: the name of the convolution's weight.
        source: the number of the ReLU whose output, pooled or not, is the input; −1 for another
            input.
        input_shape: shape (C, H, W) of the input.
        outputs: the outputs (1, N, H', W').
        geometry: kernel size, padding and stride.
        norm: the name of the BatchNorm layer that takes the outputs, or None.
    """

    name: str
    source: int
    input_shape: torch.Size
    outputs: Tensor
    geometry: Geometry
    norm: str | None = None


class ReluWalk:
    """A forward pass that applies known masks of ReLUs, numbered from 0 in order of their calls.

    Args:
        problem: the network.
        inputs: (1, C, H, W) inputs of the pass.
        masks: the known states of ReLUs' units, by the ReLU's number.
        last: the number of the ReLU at which the pass stops; ``None`` for the whole network.
        pooled: the windows (height, width) of the ReLUs that are known to be max-pooled, by the
            ReLU's number.
        head: the name of the weight of a linear layer at which the pass stops; empty for none.
        values: known outputs of ReLUs, by number. They replace the outputs that the pass computes,
            while derivatives stay those of the mask.
        widths: for each ReLU the standard deviation (1, C, 1, 1) of noise in its inputs, over which
            it is averaged; empty for none.

    Attributes:
        outputs: the logits, or the outputs of the layer ``head``; ``None`` if the pass stopped at
            ``last``.
        features: the inputs of the layer ``head``; ``None`` if the pass did not reach it.
        preactivations: the inputs of the ReLUs, in the order of their numbers.
        maxima: the largest preactivation in each window of max-pooled ReLUs, by the ReLU's number.
        windows: the window (height, width) of max-pooled ReLUs, by the ReLU's number.
        overlapping: the call of max pooling over windows that overlap or are padded, by the number
            of the ReLU that is pooled.
        pools: the max-pooled outputs, by the number of the ReLU.
        sources: the number of each ReLU by the ``id`` of its output, pooled or not.
        uses: the calls of convolutions in their order.
        norm_inputs: the input of each BatchNorm layer, by the layer's name.
    """

    def __init__(
        self,
        problem: Problem,
        inputs: Tensor,
        masks: Mapping[int, Mask] | None = None,
        last: int | None = None,
        pooled: Mapping[int, Pair] | None = None,
        head: str = "",
        values: Mapping[int, Tensor] | None = None,
        widths: Sequence[Tensor] = (),
    ) -> None:
        self.masks = masks or {}
        self.last = last
        self.pooled = pooled or {}
        self.head = head
        self.features: Tensor | None = None
        self.values = values or {}
        self.widths = widths
        self.preactivations: list[Tensor] = []
        self.maxima: dict[int, Tensor] = {}
        self.windows: dict[int, Pair] = {}
        self.overlapping: dict[int, Pool] = {}
        self.pools: dict[int, Tensor] = {}
        self.sources: dict[int, int] = {}
        self.uses: list[Use] = []
        self._kept: list[Tensor] = []  # Python may reuse the id of a tensor that is not kept
        self._answers: list[Tensor] = []
        run = partial(problem.logits, inputs)
        with capture_batch_norm_inputs(problem.gradient_map.model) as self.norm_inputs:
            trace = Trace.of(run, problem.params, self._answer, records=False)
        self.outputs: Tensor | None = trace.reached if self.features is not None else trace.outputs
        norms = {id(taken): name for name, taken in self.norm_inputs.items()}
        self.uses = [
            replace(use, norm=norms.get(id(answer)))
            for use, answer in zip(self.uses, self._answers, strict=True)
        ]

    def compared(self, number: int) -> Tensor:
        """Return the values of this pass that the known positive outputs of one ReLU must equal.

        ``number`` is the ReLU's place in the order of calls. The values are the ReLU's inputs, or
        the largest input of each window if max pooling follows.
        """
        return self.maxima[number] if number in self.maxima else self.preactivations[number]

    def _answer(self, op: Op, run: Run) -> Tensor:
        """Return the outputs of a call, with known masks applied to ReLUs and to their max pooling.

        ``run`` makes the recognised call ``op``, and returns the outputs that the model computes.
        """
        if isinstance(op, Elementwise) and op.activation.is_relu:
            return self._activate(op)
        number = self.sources.get(id(op.inputs), -1)
        if number >= 0 and isinstance(op, Pool) and op.is_largest:
            return self._pool(op, number)
        outputs: Tensor = run()
        if isinstance(op, Affine) and self.head and op.is_layer(self.head):
            self.features = op.inputs
            raise ReachedError(outputs)
        if not isinstance(op, Affine) or not op.is_convolution:
            return outputs
        geometry = op.geometry
        assert geometry is not None
        self.uses.append(Use(op.name, number, op.inputs.shape[1:], outputs, geometry))
        # A later call may write into its input, and must not change the recorded outputs.
        self._answers.append(outputs.clone())
        return self._answers[-1]

    def _activate(self, op: Elementwise) -> Tensor:
        number = len(self.preactivations)
        inputs = op.inputs.clone() if op.in_place else op.inputs
        self.preactivations.append(inputs)
        if number == self.last and number not in self.pooled:
            raise ReachedError(inputs)
        width = self.widths[number] if self.widths else None
        outputs = inputs.clamp_min(0) if width is None else blurred_relu(inputs, width)
        if number in self.masks:
            outputs = self.masks[number].gate(inputs, outputs)
        if number in self.values:
            outputs = outputs + (self.values[number] - outputs).detach()
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
        # Only one entry of a window is on, so that the sum over the window is its value.
        if number in self.masks and number not in self.overlapping:
            outputs = F.avg_pool2d(op.inputs, window, divisor_override=1)
        else:
            outputs = pool(op.inputs)
        self.pools[number] = outputs
        return self._from(number, outputs)

    def _from(self, number: int, outputs: Tensor) -> Tensor:
        self.sources[id(outputs)] = number
        self._kept.append(outputs)
        return outputs
