"""Match the arrays that server and clients exchange with a model's entries.

The arrays may be the whole model or only a part, and arrays of other use may be among them.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from flwr.app import Array

from flwr_leakage.audit import ServerAudit
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.capture.glance import some
from flwr_leakage.capture.names import match
from flwr_leakage.capture.order import runs
from flwr_leakage.capture.sent import PARAMETERS, first_variates, multiple_of
from flwr_leakage.flower.arrays import MalformedArraysError, NotFiniteError, read_reply
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params, add, ravel, scale, subtract
from flwr_leakage.records import Observation, Update


@dataclass(frozen=True)
class Part:
    """The match of exchanged arrays with the entries of a model's ``state_dict``, by names and
    shapes.

    Arrays without names are matched by their order and shapes.

    Attributes:
        names: for each matched array, by its name, the name of the model's entry.
        extra: the names of arrays that match no entry of the model, such as SCAFFOLD's control
            variates.
        missing: the names of the model's parameters that are not exchanged, as they are personal or
            frozen.
        num_entries: the number of entries of the model's ``state_dict``.
        alike: if arrays without names fit several parts of the model by their shapes, the name of
            the first entry of each such part; empty if only one part fits.
    """

    names: Mapping[str, str]
    extra: tuple[str, ...]
    missing: tuple[str, ...]
    num_entries: int
    alike: tuple[str, ...] = ()

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], gradient_map: GradientMap) -> "Part":
        """Return how arrays of these names and shapes match the entries of a model.

        Arrays without names have the names ``0``, ``1``, ….

        Raises:
            MalformedArraysError: no array matches a parameter of the model, or an array has a
                parameter's name and another shape.
        """
        params = gradient_map.params
        state = {name: value.detach() for name, value in gradient_map.model.state_dict().items()}
        for name, shape in shapes.items():
            if name in state and tuple(shape) != tuple(state[name].shape):
                raise MalformedArraysError(
                    f"{name!r} must have shape {tuple(state[name].shape)}, got {tuple(shape)}."
                )
        names = match(shapes, state, params.keys())
        if not set(names.values()) & params.keys():
            raise MalformedArraysError(
                f"expected the {len(state)} arrays of the model's state_dict or a part of them, "
                f"got {len(shapes)} that no part fits."
            )
        extra = tuple(name for name in shapes if name not in names)
        missing = tuple(name for name in params if name not in names.values())
        alike: list[str] = []
        if missing and not extra and all(name.isdigit() for name in shapes):
            order = [tuple(shapes[name]) for name in sorted(shapes, key=int)]
            own = {name: tuple(value.shape) for name, value in state.items()}
            alike = runs(order, own, params.keys())
        return Part(names, extra, missing, len(state), tuple(alike) if len(alike) > 1 else ())

    @property
    def is_whole(self) -> bool:
        """Return whether the arrays are exactly the model's entries, each under its own name."""
        own = all(name == own for name, own in self.names.items())
        return own and not self.extra and len(self.names) == self.num_entries

    def read(
        self, arrays: Mapping[str, Array], gradient_map: GradientMap
    ) -> tuple[Params, Params, tuple[str, ...]]:
        """Return the exchanged parameters and buffers, and the names of less precise arrays.

        The results are keyed by the names of the model's entries. An array is less precise if its
        numbers have fewer bits than the model's.

        Raises:
            MalformedArraysError: an array does not fit the model's entry, or is not finite; see
                :func:`flwr_leakage.flower.arrays.read_arrays`.
        """
        own = set(self.names.values())
        params = {name: value for name, value in gradient_map.params.items() if name in own}
        buffers = {name: value for name, value in gradient_map.buffers.items() if name in own}
        held = {each: arrays[name] for name, each in self.names.items()}
        for name in self.extra:
            values = torch.tensor(arrays[name].numpy())
            if not bool(torch.isfinite(values).all()):
                raise NotFiniteError(f"{name!r} holds entries that are NaN or infinite.")
        return read_reply(held, params, buffers)

    def variates(self, arrays: Mapping[str, Array], gradient_map: GradientMap) -> Params:
        """Return the control variates (SCAFFOLD) among the arrays, by the parameter's name.

        They are arrays that match no entry of the model. In order, each parameter is paired with
        the next such array of its shape. The result is empty if a parameter finds none.
        """
        others = iter(self.extra)
        found: Params = {}
        for name, value in gradient_map.params.items():
            fits = (other for other in others if tuple(arrays[other].shape) == tuple(value.shape))
            if (fitting := next(fits, None)) is None:
                return {}
            found[name] = torch.tensor(arrays[fitting].numpy()).to(value)
        return found

    def sentence(self) -> str:
        """Return sentences on which arrays are exchanged; empty if they are exactly the whole
        model.
        """
        said = []
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            said.append(
                f"{len(self.names)} of the model's {self.num_entries} arrays are exchanged, and "
                f"{some(list(self.missing))} {verb} not known to the server. Attacks take the "
                f"given model's values for what is not known; where a client's own differ, an "
                f"attack that fails is no evidence of safety"
            )
        if self.alike:
            said.append(
                f"The arrays have the shapes of several parts of the model, which begin with "
                f"{' and '.join(self.alike)}, and are taken for {next(iter(self.names.values()))} "
                f"and what follows. If they are another part, give a model whose state_dict begins "
                f"with that one; until then no attack is evidence of safety"
            )
        if self.extra:
            several = len(self.extra) > 1
            shown = "" if all(map(str.isdigit, self.extra)) else f" ({some(list(self.extra))})"
            said.append(
                f"{len(self.extra)} exchanged array{'s' * several}{shown} "
                f"{'are' if several else 'is'} none of the model's, such as control variates, and "
                f"no attack on several steps looks at them"
            )
        return ". ".join(said)


class Variates:
    """The control variates of SCAFFOLD's clients, as a server computes them from the changes that
    clients send.

    A client with variates c_i takes K steps of size η along g + c − c_i, where g is its gradient
    and c are the server's variates. It then updates c_i ← c_i − c + (x − y)/(K η), where x and y
    are the parameters before and after its training, and sends the change of c_i (Karimireddy et
    al., 2020, option II of equation 4). For K = 1 the new c_i is g. So a server that saw all rounds
    of a client gets g as the initial variates plus the sum of the changes.
    """

    def __init__(self) -> None:
        self._heard: dict[int, tuple[Params, Params]] = {}

    def hear(self, client: int, change: Params, params: Params) -> None:
        """Add a client's change of its control variates (SCAFFOLD) in a round to their sum.

        ``change`` is empty if the client sends none. ``params`` are the parameters that the client
        was sent.
        """
        if change:
            _, own = self._heard.get(client, ({}, {}))
            self._heard[client] = change, add(own or first_variates(change, params), change)

    def without(
        self, client: int, facts: TrainingFacts | None, delta: Params, server: Params
    ) -> Params:
        """Return a client's change of the parameters in a round without the effect of SCAFFOLD's
        control variates.

        If the client took one step, the result is −η g with its learning rate η and gradient g.
        Otherwise, or if this step does not agree with the change of variates that ``hear`` added,
        the result is ``delta``, the observed change. ``facts`` are those that the client told on
        its training, or ``None``. ``server`` are the server's variates c that the client was sent;
        empty if none.
        """
        change, own = self._heard.get(client, ({}, {}))
        rate = facts.learning_rate if facts and facts.num_steps == 1 else 0.0
        if not rate or not change.keys() == server.keys() == delta.keys():
            return delta
        step = scale(delta, -1 / rate)
        gap = subtract(step, add(change, server))
        if ravel(gap).norm() > _VARIATES_FIT * ravel(step).norm():
            # The control variates do not explain this step, so that their effect cannot be removed.
            return delta
        return scale(own, -rate)


_VARIATES_FIT = 1e-3
"""The largest relative difference between a client's step and the step that its control variates
(SCAFFOLD) explain, at which their effect is removed. With a larger difference the observed change
of the parameters is attacked as it is."""


def change_made(facts: TrainingFacts | None, local: Params, params: Params) -> Params:
    """Return the change θ_local − θ_t of the parameters by a client's training.

    ``local`` are the tensors that the client sent, and ``params`` the parameters θ_t that it was
    sent. If a client sends a multiple of its update instead of its parameters, ``facts``, which the
    client told on its training, say so. If the multiple depends on a number of steps that was not
    told, the number is taken to be 1. A false claim is no error: it only spoils the attack on this
    client.
    """
    if facts is None or facts.sends == PARAMETERS:
        return subtract(local, {name: params[name] for name in local})
    steps = facts.num_steps or (1 if facts.sends.endswith("its update") else 0)
    with suppress(ArithmeticError, ValueError):
        multiple = multiple_of(facts.sends, facts.learning_rate, facts.momentum, steps)
        if multiple and math.isfinite(multiple):
            return scale(local, 1 / multiple)
    return dict(local)


def observation_of(
    audit: ServerAudit, where: tuple[int, int], sent: tuple[Params, Params], made: Update
) -> Observation:
    """Return the observation of a client that may have trained only a part of the model.

    Args:
        audit: the audit. If parameters are missing in the update, the audit's later attacks use the
            updates of the others alone.
        where: the round and the client.
        sent: the parameters and the buffers that the client was sent.
        made: the client's update; parameters that are missing in it count as unchanged.
    """
    params, buffers = sent
    if len(made.delta) < len(params):
        audit.learn_from(made.delta)
    delta = {
        k: made.delta[k] if k in made.delta else torch.zeros_like(v) for k, v in params.items()
    }
    return Observation(*where, params, buffers, replace(made, delta=delta))
