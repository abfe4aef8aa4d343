"""Run a federated leakage audit: ``python simulations/run.py [group=option] [key=value] …``."""

import sys

import hydra
from flwr_leakage._conf import conf_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from simulations.build import ConfigError, to_config
from simulations.launch import launch
from simulations.overrides import check_overrides


@hydra.main(version_base=None, config_path=str(conf_dir()), config_name="config")
def main(cfg: DictConfig) -> None:
    """Run one audit; Hydra calls it once for each point of a sweep (``-m``)."""
    choices = {k: v for k, v in HydraConfig.get().runtime.choices.items() if "/" not in k}
    try:
        launch(to_config(cfg), {key: str(value) for key, value in choices.items()})
    except (ConfigError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    problem = check_overrides(sys.argv[1:])
    if problem:
        sys.exit(f"error: {problem}")
    main()
