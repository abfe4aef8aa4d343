"""Read the masks that dropout applied off the update of one sample.

Dropout before a linear layer ``z = W h + b`` makes some of its features h zero. For one sample
``∂L/∂W = e hᵀ`` with the error ``e = ∂L/∂z``, so that columns of zeros show these features. A
feature is also zero if the ReLU before it is off. Then dropping it changes nothing.

The layer before the ReLU shows if dropout was active. Its bias b' has the gradient
``∂L/∂b'_c = s Σ_k (Wᵀ e)_k``, summed over the features k of channel c that are not zero. The factor
s is 1 / (1 − p) if dropout with rate p was active, and otherwise 1. ReLUs and max-poolings between
both layers route the error of a feature to one position of its channel.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Affine, Normalise
from flwr_leakage.attacks.network.trace import Trace
from flwr_leakage.dropout import PER_CHANNEL, Masked
from flwr_leakage.params import Params

ROUTED = 1e-2
"""Relative residual of a bias's gradient up to which it confirms that dropout scaled the errors.
Rounding leaves 1e-5, and a scale that is wrong by a dropout of p = 0.1 leaves 0.1."""

ROUNDED = 0.02
"""Largest share of zeros within the nonzero rows and columns of a linear layer's gradient at which
these zeros count as entries that the rounding of sent parameters has lost. With a larger share the
update counts as pruned, and its zeros show no mask."""


def read_masks(
    forward: Callable[[], object], params: Params, gradient: Params
) -> list[Tensor | None]:
    """Return the mask of each call of dropout in a forward pass, in the order of the calls.

    A mask holds 0 for dropped units and 1 / (1 − p) for others, with the rate p. It has the shape
    of the call's input for one sample, with size 1 along axes that are dropped together. It is
    ``None`` if the update shows no mask: dropout was not active, or no linear layer takes the
    call's outputs, or their maxima after pooling.

    ``forward`` passes one sample of noise through the network with the parameters ``params``, and
    still calls dropout. ``gradient`` is the observed gradient ∇_θ L of one sample.
    """
    plain = _Marked(params, -1)
    plain.run(forward)
    found: list[Tensor | None] = []
    for number, (function, rate, inputs) in enumerate(plain.calls):
        shape = inputs[:2] if function in PER_CHANNEL else inputs
        marked = _Marked(params, number, torch.Size([*shape, *[1] * (len(inputs) - len(shape))]))
        marked.run(forward)
        found.append(marked.mask(rate, gradient, plain.trace))
    return found


class _Marked(Masked):
    """A forward pass in which one call of dropout outputs the numbers 1, 2, … of its units.

    The inputs of a later linear layer then tell which unit each feature came from.

    Args:
        params: the parameters of the pass.
        number: the index of that call among the calls of dropout; −1 for none.
        shape: the shape of the call's mask.
    """

    def __init__(self, params: Params, number: int, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.trace = Trace(params)
        self.number = number
        self.units = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(tuple(shape))
        self.place = 0

    def run(self, forward: Callable[[], object]) -> None:
        """Run a forward pass and record its layers.

        The call of dropout that this pass marks outputs the numbers 1, 2, … of its units.
        """
        with torch.no_grad(), self.trace, self:
            forward()

    def outputs(self, number: int, inputs: Tensor) -> Tensor:
        """Return the outputs of the call of dropout with the index ``number`` in the pass.

        They are 1, 2, …, which number the units, for the one call that this pass marks. Every other
        call returns its inputs, so that nothing is dropped.
        """
        if number != self.number:
            return inputs
        self.place = len(self.trace.steps)
        return self.units.to(inputs).expand_as(inputs).clone()

    def mask(self, rate: float, gradient: Params, plain: Trace) -> Tensor | None:
        """Return the mask of the marked call of dropout, or ``None`` if the update shows none.

        The marked call outputs the numbers 1, 2, … of its units in this pass, by which the layer
        behind it tells them apart. The mask holds 0 and 1 / (1 − ``rate``). ``gradient`` is the
        observed gradient ∇_θ L of one sample, and ``plain`` the record of the same pass without a
        marked call.
        """
        steps = list(zip(self.trace.steps, plain.steps, strict=True))[self.place :]
        layers = [
            (op, own.inputs)
            for step, own in steps
            if isinstance(op := step.op, Affine) and not op.is_convolution and op.name in gradient
        ]
        if not layers:
            return None
        op, natural = layers[0]
        weights, errors = gradient[op.name], gradient.get(op.bias_name or "")
        units = op.inputs.flatten().long() - 1
        count = self.units.numel()
        if not torch.equal(units.unique(), torch.arange(count)) or op.inputs.ndim != 2:
            return None  # another layer has changed the numbers, or some units leave no trace
        if errors is None:
            return None
        is_on, has_error = (weights != 0).any(0), (weights != 0).any(1)
        missing = weights[has_error][:, is_on] == 0
        # No mask shows if no column is zero as a whole, as under noise, or if many zeros lie in
        # other columns, as after pruning.
        if bool(is_on.all()) or float(missing.double().mean()) > ROUNDED:
            return None
        routed = torch.where(is_on, errors @ op.weight, 0.0)
        routed = routed.new_zeros(count).index_add_(0, units, routed) / (1 - rate)
        are_natural = bool((natural == 0).any())  # ReLUs make outputs zero, GELUs do not
        if not self._follows_a_layer(routed if are_natural else None, gradient):
            return None
        kept = torch.zeros(count)
        kept[units[is_on]] = 1 / (1 - rate)
        return kept.reshape(self.units.shape)

    def _follows_a_layer(self, routed: Tensor | None, gradient: Params) -> bool:
        """Return whether the bias of the layer before one call of dropout shows that it was active.

        The call is the marked one, whose mask is read. ``routed`` holds the errors ∂L/∂h of its
        inputs h under an active dropout, one for each unit. Dropout is active if their sum over
        each channel is the gradient of that layer's bias. If the zeros in the gradient prove
        dropout by themselves, ``routed`` is ``None``, and any layer before the call is enough.
        """
        for step in reversed(self.trace.steps[: self.place]):
            if isinstance(step.op, Affine | Normalise):
                bias = gradient.get(step.op.bias_name or "")
                if routed is None or bias is None or len(routed) % len(bias):
                    return routed is None
                sums = routed.reshape(len(bias), -1).sum(1)
                return float((bias - sums).norm()) <= ROUTED * float(bias.norm())
        return False
