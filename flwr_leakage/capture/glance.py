"""What can be seen of a training without replaying it."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from flwr_leakage.capture.names import Shaped, name_live
from flwr_leakage.capture.training import CapturedTraining


def glance(
    training: CapturedTraining,
    received: Mapping[str, Shaped],
    is_received: Callable[[str, Tensor], bool],
    is_sent: Callable[[str, Tensor], bool],
) -> tuple[str, ...]:
    """What speaks against an update that is not replayed, in words; empty where nothing does.

    Looked at are the parameters before the first step and after the last, and what goes through
    autograd's version counter between. Writes through ``.data`` raise no version, and the gradients
    of later steps are not looked at: neither is seen without a replay.

    Args:
        training: what was captured; it needs no copies.
        received: the arrays that the server sent.
        is_received: whether a tensor has the values of a received array, by its name.
        is_sent: likewise of what the client sends.
    """
    if training.problem:
        return (training.problem,)
    live = {
        name: tensor
        for name, (_, _, tensor) in name_live(received, training.roots).items()
        if isinstance(tensor, nn.Parameter)
    }
    if not live:
        return ("the received arrays are none of a module that was called",)
    found = []
    own = [n for n, p in live.items() if not is_received(n, training.before[id(p)])]
    if own:
        verb = "was" if len(own) == 1 else "were"
        found.append(f"{some(own)} {verb} not the server's before training")
    changed = [name for name, p in live.items() if not is_sent(name, p)]
    if changed:
        found.append(f"{some(changed)} changed after training (noise, clipping or a defense)")
    if training.changed_outside or training.changed_at_end:
        found.append("parameters were changed by something else than the optimizer")
    elif training.unclear_within:
        found.append(
            "a closure's step wrote to parameters otherwise than earlier ones; whether something "
            "else than the optimizer did could not be told"
        )
    return tuple(found)


def some(names: list[str]) -> str:
    """The first names, and how many there are besides."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
