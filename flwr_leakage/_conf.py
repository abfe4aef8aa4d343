"""Where the Hydra configs are, beside the package or in its wheel, and the attack by default."""

from pathlib import Path

DEFAULT_ATTACK = "strongest"
"""The preset that attacks where nobody names another; ``conf/config.yaml`` names the same."""


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
