"""Where the Hydra configs are: beside the package in a checkout, inside it in a wheel."""

from pathlib import Path


def conf_dir() -> Path:
    """Return the folder that holds ``config.yaml`` and one folder per config group.

    Raises:
        FileNotFoundError: the package was installed without its configs.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"expected conf/config.yaml in {package} or {package.parent}.")
