"""Choose the settings that an app takes from a run's config, which is untrusted.

Under ``flwr run`` the person who submits the run writes the run config. For a client this is the
server's side, which is the adversary. So a client on a real node takes only the local training from
it, which the server determines anyway: the keys of ``TAKEN``, with values that are numbers or names
of packaged options. It takes no defense, no class and no path. All other settings are the client's
own, from its node config::

    flower-supernode ... --node-config 'partition-id=0 num-partitions=2
        leakage-overrides="defense=pruning score=default"
        leakage-allow="model client.learning_rate"'

``leakage-overrides`` are Hydra overrides of the packaged config, and replace those of the run;
``leakage-allow`` replaces ``TAKEN``, and may be empty. Scores stay on the node, as they describe
private data, unless its owner adds ``scoring.send=true``. A virtual node of Flower's simulation
runtime has no owner but the person who runs the simulation: it follows the run config. On real and
virtual nodes, a run config can only name classes that the packaged config names.
"""

import logging
import shlex
import sys
from functools import lru_cache
from pathlib import Path

from flwr.app import Context
from hydra.core.override_parser.types import Override

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import Config, ConfigError, compose, parse_overrides
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.foreign import check_targets
from flwr_leakage.simulation.nodes import checked

OVERRIDES_KEY = "leakage-overrides"
ALLOW_KEY = "leakage-allow"

TAKEN = (
    "model",
    "client.batch_size",
    "client.epochs",
    "client.learning_rate",
    "client.momentum",
    "client.num_steps",
    "client.weight_decay",
)
"""The keys that a client on a real node takes from a run's config by default."""

_LOG = logging.getLogger(__name__)


def on_virtual_node() -> bool:
    """Return whether this process is an actor of Flower's simulation runtime, and no SuperNode.

    The state of the process decides this, as neither a message nor a run config can be trusted.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def config_of_run(context: Context) -> Config:
    """Return the config that Flower's run config describes, for a server or a virtual node.

    Raises:
        ConfigError: the config names a class that the packaged config does not name.
    """
    overrides = str(context.run_config.get("hydra-overrides", ""))
    return _composed(tuple(shlex.split(overrides)), _run_dir(context))


def experiment_of_client(context: Context) -> Experiment:
    """Return the experiment of a client.

    On a virtual node the run's config describes the experiment, on a real node the client's own
    config does.

    Raises:
        ConfigError: the config cannot be used. On a real node the message goes to the server, and
            so reveals nothing of the client's own config. The reason is in the client's log.
    """
    own = {OVERRIDES_KEY, ALLOW_KEY} & set(context.node_config)
    if on_virtual_node() and not own:
        return build(config_of_run(context))
    try:
        config, remark = _own_config(
            str(context.run_config.get("hydra-overrides", "")),
            str(context.node_config.get(OVERRIDES_KEY, "")),
            str(context.node_config.get(ALLOW_KEY, " ".join(TAKEN))),
            context.node_config.get("num-partitions"),
            _run_dir(context),
        )
        return build(config, remark)
    except Exception as error:  # the text of any error may hold private data
        _LOG.exception("flwr_leakage: this node's own config cannot be used: %s", error)
        raise ConfigError("this node's config cannot be used; its own log says why.") from None


@lru_cache(maxsize=4)
def _composed(overrides: tuple[str, ...], run_dir: str) -> Config:
    config = compose(list(overrides), run_dir)
    check_targets(config)
    return config


@lru_cache(maxsize=4)
def _own_config(
    of_run: str, of_node: str, allowed: str, num_partitions: object, run_dir: str
) -> tuple[Config, str]:
    """Return a client's own config, and the text on it that the client sends to the server.

    ``of_run`` and ``of_node`` are the Hydra overrides in the run config and in the node config, and
    ``allowed`` are the keys that the client takes from the run config; each is one text.
    ``num_partitions`` is the number of clients in the node config, or ``None``.
    """
    taken, left_out = split_overrides(shlex.split(of_run), tuple(allowed.split()))
    partitions = [] if num_partitions is None else [f"num_clients={num_partitions}"]
    # On a real node scores stay there, and their cost is measured in seconds, as no run has to be
    # reproducible.
    scoring = ["scoring.send=false", "scoring.min_samples=0", "scoring.product_price=null"]
    overrides = [*scoring, *taken, *partitions, *shlex.split(of_node)]
    config = compose(overrides, run_dir)
    remark = f"defense={config['choices'].get('defense', 'none')} of its own config"
    if left_out:
        remark += f"; not taken from the run's config: {', '.join(left_out)}"
        _LOG.warning("flwr_leakage: %s.", remark)
    return config, f"{remark}."


def split_overrides(
    overrides: list[str], allowed: tuple[str, ...]
) -> tuple[list[str], tuple[str, ...]]:
    """Return the overrides of a run that a client follows, and the keys of the overrides that it
    ignores.

    An override is followed if its key is among ``allowed`` and its value is a number, a truth value
    or null; for a config group, if it is the name of a packaged option.

    Raises:
        ConfigError: an override cannot be parsed.
    """
    parsed = checked("hydra-overrides", parse_overrides)(overrides)
    followed = [_is_plain(override, allowed) for override in parsed]
    taken = [text for text, follow in zip(overrides, followed, strict=True) if follow]
    left_out = {o.key_or_group for o, follow in zip(parsed, followed, strict=True) if not follow}
    return taken, tuple(sorted(left_out))


def _is_plain(override: Override, allowed: tuple[str, ...]) -> bool:
    key = override.key_or_group
    if key not in allowed or override.type is None or override.type.name != "CHANGE":
        return False
    if override.is_sweep_override() or override.package is not None:
        return False
    value = override.value()
    group = conf_dir() / key
    if group.is_dir():
        return str(value) in {path.stem for path in group.glob("*.yaml")}
    return value is None or isinstance(value, bool | int | float)


def _run_dir(context: Context) -> str:
    """Return the path of the run folder, which only the server writes to."""
    run_dir = str(context.run_config.get("run-dir", ""))
    return run_dir or str(Path.home() / ".flwr" / "leakage" / f"run-{context.run_id}")
