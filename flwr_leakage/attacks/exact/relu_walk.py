"""One forward pass through a ReLU network that numbers the ReLUs and puts known values in place.

- A ReLU with known outputs returns these, as constants.
- A ReLU with a known mask multiplies its input by the mask.
- Max pooling over windows that do not overlap, right after a ReLU, counts as a part of the ReLU:
  the mask is then 1 at each window's maximum only, and the outputs are the pooled values.
- Every convolution is noted with the number of the ReLU whose output it takes in.

Skip connections, BatchNorm with given statistics and all other pooling are left to automatic
differentiation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.geometry import Geometry, Pair, numeric_padding, pair
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.relus import ReluCall, relu_call
from flwr_leakage.function_mode import FunctionMode

_MAX_POOL = (F.max_pool2d, torch.max_pool2d)


@dataclass(frozen=True)
class Use:
    """One convolution as a forward pass met it.

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


class _ReachedError(Exception):
    """The pass has come to the last ReLU that is asked for, and ends there."""


class ReluWalk(FunctionMode):
    """The context of such a pass; :meth:`run` makes one. ReLUs are numbered in their order.

    Args:
        names: names of the parameters, by the tensors' ``id``.
        masks: known masks of ReLUs, by number.
        outputs: known outputs of ReLUs, by number; pooled ones where a ReLU is pooled.
        last: the number of the ReLU at which to stop; ``None`` for the whole network.
        pooled: windows of the ReLUs that are known to be pooled, by number.

    Attributes:
        preactivations: the inputs of the ReLUs, by number.
        maxima: where a ReLU is pooled, the largest preactivation of each window, by number.
        windows: where a ReLU is pooled, its window (height, width), by number.
        sources: numbers of the ReLUs by the ``id`` of their output, pooled or not.
        kept: these outputs, so that no other tensor gets the ``id`` of one.
        uses: the convolutions in their order.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        masks: Mapping[int, Tensor] | None = None,
        outputs: Mapping[int, Tensor] | None = None,
        last: int | None = None,
        pooled: Mapping[int, Pair] | None = None,
    ) -> None:
        super().__init__()
        self.names = names
        self.masks = masks or {}
        self.outputs = outputs or {}
        self.last = last
        self.pooled = pooled or {}
        self.preactivations: list[Tensor] = []
        self.maxima: dict[int, Tensor] = {}
        self.windows: dict[int, Pair] = {}
        self.sources: dict[int, int] = {}
        self.kept: list[Tensor] = []
        self.uses: list[Use] = []

    def run(self, problem: Problem, inputs: Tensor) -> Tensor | None:
        """The logits of inputs, or ``None`` where the pass stopped at ``last``."""
        try:
            with self:
                return problem.gradient_map.logits(problem.params, inputs, problem.buffers)
        except _ReachedError:
            return None

    def compared(self, number: int) -> Tensor:
        """What known outputs of a ReLU are compared with: preactivations, or windows' maxima."""
        return self.maxima[number] if number in self.maxima else self.preactivations[number]

    def mask(self, number: int) -> Tensor:
        """Where a ReLU is active; if it is pooled, where it is also its window's maximum."""
        inputs = self.preactivations[number]
        active = (inputs > 0).to(inputs.dtype)
        if number not in self.windows:
            return active
        window = self.windows[number]
        _, indices = F.max_pool2d(inputs, window, return_indices=True)
        maxima = torch.zeros_like(inputs).flatten(2).scatter(2, indices.flatten(2), 1.0)
        return active * maxima.reshape(inputs.shape)

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Handle ReLU, max pooling and convolution; call any other function as it is."""
        call = relu_call(function, args, kwargs)
        if call is not None:
            return self._activate(call)
        if function in _MAX_POOL:
            return self._pool(function, *args, **kwargs)
        outputs = function(*args, **kwargs)
        if function is F.conv2d:
            self._note(outputs, *args, **kwargs)
            # What follows may write into its input; errors are those of the outputs noted.
            return outputs.clone()
        return outputs

    def _activate(self, call: ReluCall) -> Tensor:
        number = len(self.preactivations)
        inputs = call.inputs.clone() if call.in_place else call.inputs
        self.preactivations.append(inputs)
        if number == self.last and number not in self.pooled:
            raise _ReachedError
        if number in self.outputs and number not in self.pooled:
            outputs = self.outputs[number].clone()
        elif number in self.masks:
            outputs = inputs * self.masks[number]
        else:
            outputs = inputs.clamp_min(0)
        return self._from(number, call.answer(outputs))

    def _pool(
        self,
        function: Callable[..., Any],
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,  # false here: with indices it is another function
    ) -> Tensor:
        number = self.sources.get(id(input), -1)
        window = pair(kernel_size)
        plain = pair(padding) == (0, 0) and pair(dilation) == (1, 1) and not ceil_mode
        if number < 0 or not plain or (stride and pair(stride) != window):
            outputs: Tensor = function(input, kernel_size, stride, padding, dilation, ceil_mode)
            return outputs
        self.windows[number] = window
        self.maxima[number] = F.max_pool2d(self.preactivations[number], window)
        if number == self.last:
            raise _ReachedError
        if number in self.outputs:
            outputs = self.outputs[number].clone()
        elif number in self.masks:  # at most one entry of a window is left, so that sums are maxima
            outputs = F.avg_pool2d(input, window, divisor_override=1)
        else:
            outputs = F.max_pool2d(input, window)
        return self._from(number, outputs)

    def _from(self, number: int, outputs: Tensor) -> Tensor:
        self.sources[id(outputs)] = number
        self.kept.append(outputs)
        return outputs

    def _note(
        self,
        outputs: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> None:
        if groups != 1:
            raise ValueError("convolutions must have one group.")
        padding = numeric_padding(padding, weight.shape[2:], dilation)
        geometry = Geometry.of(weight.shape[2:], dilation, padding, stride)
        source = self.sources.get(id(input), -1)
        name = self.names.get(id(weight), "")
        self.uses.append(Use(name, source, input.shape[1:], outputs, geometry))
