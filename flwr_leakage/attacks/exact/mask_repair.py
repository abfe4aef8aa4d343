"""Wrong entries of a ReLU's mask, found and set right by the gradient of a convolution before it.

Let a convolution's output reach the ReLU without mixing channels or positions, as through
BatchNorm. Then the error of its output channel is ``δ[p] = c[p] + m[p] d[p]``, with the ReLU's
mask m, ``c`` the error with the ReLU closed, and ``c + d`` the one with it open. One wrong entry p
changes the residual ``r = ∂L/∂W − Σ_p δ[p] A_p`` of that channel's gradient by ``±d[p] A_p``, where
A_p is the patch that the convolution took in at p. So once the patches are known from all other
channels, entries are turned one after another, each time the one that lowers ‖r‖² the most,

    ‖r‖² − ‖r ∓ d[p] A_p‖² = ±2 d[p] ⟨r, A_p⟩ − d[p]² ‖A_p‖²,

until r is within its noise. The equations of a channel outnumber such entries by far, so that no
false set of a few entries gets there.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Channel:
    """One output channel of a convolution whose gradient contradicts its error.

    Attributes:
        gradient: of its weight, (C, *kernel).
        patches: what the convolution took in at each position (C·K, P).
        closed: the error of its output if the ReLU that follows were closed, (P,).
        opened: the same if it were open.
        limit: the norm of the residual at which gradient and error agree.
    """

    gradient: Tensor
    patches: Tensor
    closed: Tensor
    opened: Tensor
    limit: float

    def repair(self, mask: Tensor) -> Tensor | None:
        """The mask (P,) with the fewest entries turned that the gradient agrees with, if found.

        Args:
            mask: of the ReLU that follows, in this channel.
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
