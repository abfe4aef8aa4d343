"""Names of a package that are imported when they are first asked for.

What a client needs then does not import what a server needs, and may be installed without it.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EXTRAS = {
    "PIL": "server",
    "hydra": "server",
    "jinja2": "server",
    "lpips": "server",
    "matplotlib": "server",
    "omegaconf": "server",
    "safetensors": "server",
    "torchmetrics": "server",
    "torchvision": "server",
    "mlxtend": "all",
    "pandas": "all",
    "ray": "all",
}
"""The extra that brings each package which a light client can do without."""


def lazy(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        homes: the names that it offers, by the module that defines them.

    Raises:
        ImportError: (of the returned function) a name needs a package of an extra that is not
            installed; the message names both.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(home_of[name]), name)
        except ModuleNotFoundError as error:
            raise missing(f"{package}.{name}", error) from error
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(home_of)


def missing(what: str, error: ModuleNotFoundError) -> ImportError:
    """Return the error of something that needs a missing package, with its extra.

    Example:
        >>> print(missing("observe", ModuleNotFoundError("No module named 'x'", name="jinja2")))
        observe needs jinja2, which is not installed: pip install 'flwr-leakage[server]'
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return error
    return ImportError(
        f"{what} needs {package}, which is not installed: "
        f"pip install 'flwr-leakage[{EXTRAS[package]}]'"
    )
