"""Check the settings of a Flower strategy before a run, as most strategies do not check them."""

import math
from collections.abc import Mapping
from typing import Any

from flwr.serverapp.strategy import Bulyan, MultiKrum, Strategy

from flwr_leakage.flower.dp_check import asked_clients
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.values import RANGES

WORDS: Mapping[str, str] = {
    "fraction_train": "lie in (0, 1]",
    "fraction_evaluate": "lie in [0, 1]",
    "min_train_nodes": "be ≥ 0",
    "min_evaluate_nodes": "be ≥ 0",
    "min_available_nodes": "be ≥ 0",
    "num_malicious_nodes": "be ≥ 0",
    "eta": "be positive",
    "eta_l": "be positive",
    # FedAdam and similar strategies divide by √v + τ. As the average v of squared updates may be
    # zero, τ must be positive.
    "tau": "be positive",
    "beta_1": "lie in [0, 1)",
    "beta_2": "lie in [0, 1)",
    "server_learning_rate": "be positive",
    "server_momentum": "lie in [0, 1)",
    "q": "be ≥ 0",
    "client_learning_rate": "be positive",
    "noise_multiplier": "be ≥ 0",
    "clipping_norm": "be positive",
}
"""The range in which a strategy's setting must lie, by the setting's name: a key of
``flwr_leakage.values.RANGES``."""


SPOKEN: Mapping[str, tuple[str, ...]] = {
    "arrayrecord_key": ("arrays",),
    "configrecord_key": ("config",),
    "weighted_by_key": ("num-examples", "train-loss"),
    "train_loss_key": ("train-loss",),
}
"""The allowed values of those settings of a strategy that name an entry of a message: the names
that clients of a simulation use."""


def check_strategy(strategy: Strategy, num_clients: int, key: str = "strategy") -> None:
    """Check the settings of a Flower strategy, and the numbers of clients that it needs.

    Flower waits forever for nodes that do not exist. With fewer clients than their guarantees need,
    Krum, Bulyan and the trimmed mean aggregate without a guarantee, or skip every round. A wrapped
    strategy is checked, too. ``key`` is the path of the strategy in the config.

    Raises:
        ConfigError: a setting is wrong. The message names its key.
    """
    settings = vars(strategy)
    for name, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}.{name} must be finite, got {value}.")
        if name in WORDS and not RANGES[WORDS[name]](value):
            raise ConfigError(f"{key}.{name} must {WORDS[name]}, got {value}.")
        if value not in (known := SPOKEN.get(name, (value,))):
            raise ConfigError(
                f"{key}.{name} must be {' or '.join(known)}, which the clients send, got {value!r}."
            )
    phases = ["train", "available"]
    phases += ["evaluate"] * bool(settings.get("fraction_evaluate", 1.0))
    for name in (f"min_{phase}_nodes" for phase in phases):
        if settings.get(name, 0) > num_clients:
            raise ConfigError(
                f"{key}.{name} must be at most num_clients={num_clients}, got {settings[name]}."
            )
    inner = settings.get("strategy")
    asked = asked_clients(inner if isinstance(inner, Strategy) else strategy, num_clients)
    problem = _too_few(strategy, settings, asked)
    if problem:
        raise ConfigError(
            f"{key}.{problem}, of the {asked} of num_clients={num_clients} that a round asks."
        )
    if isinstance(inner, Strategy):
        check_strategy(inner, num_clients, f"{key}.strategy")


def _too_few(strategy: Strategy, settings: Mapping[str, Any], asked: int) -> str:
    """Return a text on the first setting that needs more clients than the ``asked`` ones of a
    round; empty if there is none.
    """
    if "num_malicious_nodes" in settings:
        # With n clients, f of them malicious, Bulyan needs n ≥ 4f + 3 (El Mhamdi et al. 2018), Krum
        # n > 2f + 2 (Blanchard et al. 2017).
        factor = 4 if isinstance(strategy, Bulyan) else 2
        most, got = (asked - 3) // factor, settings["num_malicious_nodes"]
        if got > most:
            needs = factor * got + 3
            return (
                f"num_malicious_nodes={got} takes at least {factor} · {got} + 3 = {needs} clients"
            )
    if isinstance(strategy, MultiKrum):
        most, got = asked - settings["num_malicious_nodes"], settings["num_nodes_to_select"]
        if not 1 <= got <= most:
            return (
                f"num_nodes_to_select must lie in [1, {most}], the clients that are not "
                f"malicious, got {got}"
            )
    if (sampled := settings.get("num_sampled_clients", 0)) > asked:
        return (
            f"num_sampled_clients must be at most {asked}, as the noise is divided by it, got "
            f"{sampled}"
        )
    trimmed = settings.get("beta", 0.0)
    if trimmed and int(trimmed * asked) == 0:
        return f"beta must be 0 or at least 1/{asked}, as it trims nobody, got {trimmed}"
    return ""
