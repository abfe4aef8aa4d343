"""Run an experiment of a paper in place of the audit; the config names what runs it."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_leakage.simulation.arguments import suggest
from flwr_leakage.simulation.config import Config, ConfigError
from flwr_leakage.simulation.nodes import checked, instantiate


def sized(config: Config) -> dict[str, Any]:
    """The section ``paper`` with the settings of the chosen size; a key that stands in both is
    the section's own, so that ``+paper.KEY=VALUE`` overrides a size.

    Raises:
        ConfigError: there is no such size.
    """
    sizes: Mapping[str, Mapping[str, Any]] = config["sizes"] or {}
    size = config["size"]
    if size not in sizes:
        raise ConfigError(
            f"size must be one of {sorted(sizes)} of this experiment, got {size!r}"
            f"{suggest(str(size), sizes)}."
        )
    return {**sizes[size], **config["paper"]}


def perform(config: Config, overrides: Sequence[str]) -> Any:
    """Build the experiment and hand it to ``lab``'s target, which returns the page.

    Raises:
        ConfigError: naming the key that is wrong and why.
    """
    section = sized(config)
    experiment = instantiate({"paper": section}, "paper")
    run = instantiate(config, "lab")
    settings = {name: value for name, value in section.items() if name != "_target_"}
    return checked("paper", run)(
        experiment=experiment,
        name=config["choices"]["experiment"],
        size=config["size"],
        settings=settings,
        overrides=list(overrides),
        device=config["device"],
    )
