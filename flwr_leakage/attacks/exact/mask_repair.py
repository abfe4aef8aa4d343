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

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ContradictedChannel:
    """One output channel of a convolution whose gradient contradicts its error.

    Attributes:
        gradient: ∂L/∂W of the channel, (C, *kernel).
        patches: the inputs of the convolution at each output position, (C·K, P).
        closed: the errors (P,) of the channel's output if the following ReLU were closed.
        opened: the errors (P,) if that ReLU were open.
        limit: norm of the residual up to which gradient and error agree.
    """

    gradient: Tensor
    patches: Tensor
    closed: Tensor
    opened: Tensor
    limit: float

    def repair(self, mask: Tensor) -> Tensor | None:
        """Return the mask (P,) with a few entries turned so that the gradient agrees, or None.

        Args:
            mask: the mask (P,) of the following ReLU in this channel.
        """
        mask = mask.clone()
        change = self.opened - self.closed
        squares = change.square() * self.patches.square().sum(0)
        residual = self.gradient.flatten() - self.patches @ (self.closed + mask * change)
        while float(residual.norm()) > self.limit:
            steps = (1 - 2 * mask) * change
            gains = 2 * steps * (residual @ self.patches) - squares
            best = int(gains.argmax())
            if not float(gains[best]) > 0:
                return None
            residual = residual - steps[best] * self.patches[:, best]
            mask[best] = 1 - mask[best]
        return mask
