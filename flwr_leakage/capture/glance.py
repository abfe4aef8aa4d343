"""What can be seen of a training without replaying it."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from flwr_leakage.capture.names import Shaped, name_live
from flwr_leakage.capture.training import CapturedTraining

Differing = Callable[[Mapping[str, Tensor]], list[str]]
"""The names of the tensors that have other values than some arrays."""


class Glance:
    """Compares the parameters before the first step and after the last.

    Args:
        received: the arrays that the server sent.
        not_received: which tensors have other values than those.
    """

    def __init__(self, received: Mapping[str, Shaped], not_received: Differing) -> None:
        self._received, self._not_received = received, not_received
        self._models: list[nn.Module] = []
        self._live: dict[str, Tensor] = {}
        self._own: list[str] = []

    def begin(self, model: nn.Module) -> None:
        """A model is about to be called for the first time."""
        self._models.append(model)
        found = name_live(self._received, self._models)
        named = {name: tensor for name, (_, _, tensor) in found.items()}
        new = {
            name: tensor
            for name, tensor in named.items()
            if isinstance(tensor, nn.Parameter) and name not in self._live
        }
        self._own += self._not_received(new)
        self._live |= new

    def causes(self, training: CapturedTraining, not_sent: Differing) -> tuple[str, ...]:
        """What speaks against an update that is not replayed, in words; empty where nothing does.

        What goes through autograd's version counter between the steps is seen. Writes through
        ``.data`` raise no version, and the gradients of later steps are not looked at: neither is
        seen without a replay.

        Args:
            training: what was captured; it needs no copies.
            not_sent: which tensors have other values than what the client sends.
        """
        if training.problem:
            return (training.problem,)
        if not self._live:
            return ("the received arrays are none of a module that was called",)
        found = []
        if own := self._own:
            verb = "was" if len(own) == 1 else "were"
            found.append(f"{some(own)} {verb} not the server's before training")
        if changed := not_sent(self._live):
            found.append(f"{some(changed)} changed after training (noise, clipping or a defense)")
        if training.changed_outside or training.changed_at_end:
            found.append("parameters were changed by something else than the optimizer")
        elif training.unclear_within:
            found.append(
                "a closure's step wrote to parameters otherwise than earlier ones; whether "
                "something else than the optimizer did could not be told"
            )
        return tuple(found)


def some(names: list[str]) -> str:
    """The first names, and how many there are besides."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
