"""Match exchanged arrays to a model: they may be all of it, a part, or hold others besides."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from flwr.app import Array

from flwr_leakage.capture import TrainingFacts
from flwr_leakage.capture.glance import some
from flwr_leakage.capture.names import match
from flwr_leakage.capture.order import runs
from flwr_leakage.capture.sent import PARAMETERS, first_variates, multiple_of
from flwr_leakage.flower.arrays import MalformedArraysError, NotFiniteError, read_reply
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params, add, ravel, scale, subtract


@dataclass(frozen=True)
class Part:
    """The match of arrays to a model, by names and shapes, or by order where they have no names.

    Attributes:
        names: the names of the model's entries, by the arrays' names.
        extra: names of arrays that are none of the model's, such as control variates.
        missing: the model's parameters that are not exchanged: personal or frozen ones.
        num_entries: of the model.
        alike: the first names of the parts that have the shapes of arrays without names; empty
            where no more than one has.
    """

    names: Mapping[str, str]
    extra: tuple[str, ...]
    missing: tuple[str, ...]
    num_entries: int
    alike: tuple[str, ...] = ()

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], gradient_map: GradientMap) -> "Part":
        """Match arrays of these names and shapes.

        Raises:
            MalformedArraysError: none of them is a parameter of the model, or one has its name and
                another shape.
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
        """Return whether the arrays make up the model, each under the model's own name."""
        own = all(name == own for name, own in self.names.items())
        return own and not self.extra and len(self.names) == self.num_entries

    def read(
        self, arrays: Mapping[str, Array], gradient_map: GradientMap
    ) -> tuple[Params, Params, tuple[str, ...]]:
        """Read the parameters and buffers that are exchanged; the names of narrower arrays.

        Raises:
            MalformedArraysError: as in :func:`flwr_leakage.flower.arrays.read_arrays`.
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
        """Return the array that fits each parameter among those that are none of the model's.

        They fit by their shapes and in order, as control variates do. Nothing is returned where a
        parameter has none.
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
        """Return in words what is exchanged; empty if it is the whole model and nothing else."""
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
    """The control variates of SCAFFOLD's clients, summed from the changes that they send.

    A client takes steps along g + c − c_i and sends the change of c_i ← c_i − c + (x − y)/(K η)
    (Karimireddy et al., 2020, option II of equation 4). After one step of a client that was heard
    in all of its rounds, its first variates and the sum tell g itself.
    """

    def __init__(self) -> None:
        self._heard: dict[int, tuple[Params, Params]] = {}

    def hear(self, client: int, change: Params, params: Params) -> None:
        """Add the change that a client sends in a round in which it was sent ``params``."""
        if change:
            _, own = self._heard.get(client, ({}, {}))
            self._heard[client] = change, add(own or first_variates(change, params), change)

    def without(
        self, client: int, facts: TrainingFacts | None, delta: Params, server: Params
    ) -> Params:
        """Return −η g where a client's one step was changed by control variates; else ``delta``.

        Args:
            client: the client that was heard in this round.
            facts: the facts that it told.
            delta: the change of its parameters.
            server: the server's variates c that it was sent; empty for none.
        """
        change, own = self._heard.get(client, ({}, {}))
        rate = facts.learning_rate if facts and facts.num_steps == 1 else 0.0
        if not rate or not change.keys() == server.keys() == delta.keys():
            return delta
        step = scale(delta, -1 / rate)
        gap = subtract(step, add(change, server))
        if ravel(gap).norm() > _VARIATES_FIT * ravel(step).norm():
            return delta  # the control variates do not explain this step
        return scale(own, -rate)


_VARIATES_FIT = 1e-3
"""Changes of variates that differ from what the step explains by more, relatively, are others."""


def change_made(facts: TrainingFacts | None, local: Params, params: Params) -> Params:
    """Return θ_local − θ_t of the parameters that a client sends.

    A client is free to tell anything: what it says decides the attack on itself alone, and is no
    error here.

    Args:
        facts: the facts that the client told, with the multiple of the update that it sends. Where
            the multiple follows from steps that it did not tell, it is taken to be 1.
        local: the parameters that it sent.
        params: the values that it was sent, of at least those parameters.
    """
    if facts is None or facts.sends == PARAMETERS:
        return subtract(local, {name: params[name] for name in local})
    steps = facts.num_steps or (1 if facts.sends.endswith("its update") else 0)
    with suppress(ArithmeticError, ValueError):
        multiple = multiple_of(facts.sends, facts.learning_rate, facts.momentum, steps)
        if multiple and math.isfinite(multiple):
            return scale(local, 1 / multiple)
    return dict(local)
