"""One experiment of a paper, as Hydra gives its config: see ``simulations/run.py``."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from flwr_leakage.simulation.arguments import suggest
from flwr_leakage.simulation.config import Config, ConfigError, to_config
from flwr_leakage.simulation.nodes import checked, instantiate
from flwr_leakage.simulation.sweep import fail

CONF = Path(__file__).parent / "conf"
"""The folder of the experiments' configs."""


@hydra.main(version_base=None, config_path=str(CONF), config_name="config")
def run_by_hydra(cfg: DictConfig) -> None:
    """Run one experiment; Hydra calls it once for each point of a sweep (``-m``)."""
    hydra_config = HydraConfig.get()
    try:
        config = to_config(cfg, hydra_config.runtime.choices)
        perform_config(config, hydra_config.overrides.task)
    except Exception as error:
        # The other points of a sweep go on, whatever one of them died of.
        if hydra_config.mode == RunMode.MULTIRUN:
            fail(hydra_config.runtime.output_dir, error, None)
            return
        if isinstance(error, ConfigError):
            sys.exit(f"error: {error}")
        if isinstance(error, OSError):  # such as on a full disk
            sys.exit(f"error: the page or what is kept cannot be written or read: {error}")
        raise


def sized(config: Config) -> dict[str, Any]:
    """Return the section ``paper`` with the settings of the chosen size.

    A key that stands in both is the section's own, so that ``+paper.KEY=VALUE`` overrides a size.
    The size ``thorough`` holds what differs from ``cpu``, and needs not be there.

    Raises:
        ConfigError: there is no such size.
    """
    sizes: Mapping[str, Mapping[str, Any]] = config["sizes"]
    sizes = {**sizes, "thorough": _over(sizes["cpu"], sizes.get("thorough", {}))}
    size = config["size"]
    if size not in sizes:
        raise ConfigError(
            f"size must be one of {sorted(sizes)} of this experiment, got {size!r}"
            f"{suggest(str(size), sizes)}."
        )
    return {**sizes[size], **config["paper"]}


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` with the values of ``above``, sections key by key."""
    both = {
        key: _over(below[key], value) if isinstance(below.get(key), Mapping) else value
        for key, value in above.items()
    }
    return {**below, **both}


def perform_config(config: Config, overrides: Sequence[str]) -> Path:
    """Build the experiment and hand it to ``lab``'s target, which returns the page.

    Args:
        config: composed from ``CONF``, with the chosen experiment among its ``choices``.
        overrides: of the command line, for the page.

    Raises:
        ConfigError: naming the key that is wrong and why.
    """
    section = sized(config)
    experiment = instantiate({"paper": section}, "paper")
    run = instantiate(config, "lab")
    settings = {name: value for name, value in section.items() if name != "_target_"}
    page: Path = checked("paper", run)(
        experiment=experiment,
        name=config["choices"]["experiment"],
        size=config["size"],
        settings=settings,
        overrides=list(overrides),
        device=config["device"],
    )
    return page
