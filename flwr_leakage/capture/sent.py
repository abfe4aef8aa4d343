"""Find whether a client sends its parameters or a multiple of its update."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flwr_leakage.capture.training import CapturedTraining, rate_of
from flwr_leakage.params import norm

PARAMETERS, ANOTHER_MULTIPLE = "parameters", "another multiple of its update"
SENDS: dict[str, Callable[[float, float, int], float]] = {
    "its update": lambda rate, momentum, steps: 1.0,
    "minus its update": lambda rate, momentum, steps: -1.0,
    "its mean gradient": lambda rate, momentum, steps: -1.0 / (rate * steps),
    "minus its update by step": lambda rate, momentum, steps: -1.0 / steps,
    "FedNova's normalised update": lambda rate, momentum, steps: -1.0 / _fednova(momentum, steps),
}
"""The multiples of the update θ_local − θ_t that clients of published methods send. The key is a
name for users; the value is the factor as a function of the learning rate, the momentum and the
number of steps. SCAFFOLD (Karimireddy et al., 2020) sends the update, FedNova (Wang et al., 2020)
the update divided by the sum of its normalising vector."""

_CLOSE = 1e-3
"""The relative difference up to which two factors of the update, or two updates, count as the
same. With a larger one, an update with weak noise could count as a multiple of the trained one."""


def multiple_of(name: str, rate: float, momentum: float, steps: int) -> float:
    """Return the factor by which clients multiply the update θ_local − θ_t before they send it.

    ``name`` is a key of ``SENDS``, ``rate`` the learning rate, ``momentum`` that of SGD, and
    ``steps`` the number of local steps, ≥ 1.

    Raises:
        ValueError: ``name`` is no key of ``SENDS``, or ``steps`` is 0.
    """
    if name not in SENDS or steps < 1:
        raise ValueError(f"expected one of {list(SENDS)} and a step, got {name!r} and {steps}.")
    return SENDS[name](rate, momentum, steps)


def multiple_sent(
    sent: Mapping[str, Tensor], received: Mapping[str, Tensor], end: Mapping[str, Tensor]
) -> float:
    """Return the factor f if a client sends f times its update; 0 if it sends anything else.

    ``received`` and ``end`` are the parameters before and after training.
    """
    names = [name for name in sent if name in end]
    if not any(bool(received[name].any()) for name in names):
        return 0.0
    trained = {name: end[name].double().cpu() - received[name].double() for name in names}
    return factor_between({name: sent[name].double() for name in names}, trained) or 0.0


def factor_between(sent: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> float | None:
    """Return the factor f if ``sent`` equals f times ``trained`` up to a relative difference of
    ``_CLOSE``; else ``None``.
    """
    whole = norm(trained.values())
    if not whole:
        return None
    factor = sum(float((sent[name] * each).sum()) for name, each in trained.items()) / whole**2
    rest = norm(sent[name] - factor * each for name, each in trained.items())
    return factor if rest <= _CLOSE * norm(sent.values()) else None


def first_variates(change: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a client's control variates (SCAFFOLD) before it first changed them.

    They are zero (Karimireddy et al., 2020), or ``params``, the parameters that the client
    received, as in Flower's baseline ``niid_bench``. The first change of the variates, ``change``,
    is a gradient minus these initial variates. If they are ``params``, ``change`` has the component
    −1 along ``params``, else about 0; −1/2 is the threshold.
    """
    square = norm(params[name] for name in change) ** 2
    inner = sum(
        float((params[name].double() * each.double()).sum()) for name, each in change.items()
    )
    begins = -inner > square / 2
    return {
        name: params[name] if begins else torch.zeros_like(each) for name, each in change.items()
    }


def name_of(multiple: float, training: CapturedTraining) -> str:
    """Return the name of the quantity that a client sends.

    ``multiple`` is the factor by which the client multiplies its update, or 0 if it sends its
    parameters. The result is a key of ``SENDS``, ``PARAMETERS``, or ``ANOTHER_MULTIPLE`` for an
    unknown factor.
    """
    if not multiple:
        return PARAMETERS
    options = training.steps[0].options
    rate, momentum = rate_of(options), float(options[0].get("momentum", 0.0))
    for name, of in SENDS.items():
        if math.isclose(multiple, of(rate, momentum, training.num_steps), rel_tol=_CLOSE):
            return name
    return ANOTHER_MULTIPLE


def _fednova(momentum: float, steps: int) -> float:
    """Return the sum of FedNova's normalising vector for SGD with momentum (Wang et al., 2020).

    It is (τ − ρ(1 − ρ^τ)/(1 − ρ))/(1 − ρ) for τ steps with momentum ρ.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
