"""Let a package export names whose modules are imported only when a name is first used.

So a client does not import the dependencies of the server's code, and need not have them installed.
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
"""The third-party packages that some parts need, each with the extra of ``flwr-leakage`` that
installs it. A client that only trains and sends updates needs none of these packages."""


def lazy(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` for a package that imports names late.
    ``package`` is the package's ``__name__``; ``homes`` maps the path of each module to the names
    that it defines.

    Raises:
        ImportError: raised by the returned ``__getattr__``, if a name needs a third-party package
            that is not installed. The message names that package, and the extra that installs it.
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
    """Return the error to raise when the feature ``what`` needs a third-party package that is not
    installed. Its message has the pip command for the extra that installs the package. If no extra
    does, ``error`` itself is returned.

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
