"""The repair of wrong entries of a ReLU's mask, by the gradient of the convolution before it.

Let a convolution's output reach the ReLU without mixing channels or positions, as through
BatchNorm. Then the error of its output channel is ``δ[p] = c[p] + m[p] d[p]``, with the ReLU's
mask m, the error c with the ReLU closed, and the error ``c + d`` with the ReLU open. One wrong
entry p changes the residual ``r = ∂L/∂W − Σ_p δ[p] A_p`` of that channel's gradient by
``±d[p] A_p``, where A_p is the patch that the convolution took in at p. All other channels give the
patches. Then the repair turns one entry after another, each time the one that lowers ‖r‖² the most,

    ‖r‖² − ‖r ∓ d[p] A_p‖² = ±2 d[p] ⟨r, A_p⟩ − d[p]² ‖A_p‖²,

until r is within its noise. A channel has far more equations than wrong entries, so that no false
set of a few entries meets them.
"""

import torch
from torch import Tensor


def repaired(
    on: Tensor, gradient: Tensor, patches: Tensor, closed: Tensor, opened: Tensor, limit: float
) -> Tensor | None:
    """Return the mask of a channel with a few entries turned so that the gradient agrees, or None.

    Args:
        on: booleans (P,), true where the following ReLU is on in this channel.
        gradient: ∂L/∂W of the channel, (C, *kernel).
        patches: the inputs of the convolution at each output position, (C·K, P).
        closed: the errors (P,) of the channel's output if the following ReLU were closed.
        opened: the errors (P,) if that ReLU were open.
        limit: norm of the residual up to which gradient and error agree.
    """
    on, change = on.clone(), opened - closed
    squares = change.square() * patches.square().sum(0)
    residual = gradient.flatten() - patches @ torch.where(on, opened, closed)
    while float(residual.norm()) > limit:
        steps = torch.where(on, -change, change)
        gains = 2 * steps * (residual @ patches) - squares
        best = int(gains.argmax())
        if not float(gains[best]) > 0:
            return None
        residual = residual - steps[best] * patches[:, best]
        on[best] = ~on[best]
    return on
