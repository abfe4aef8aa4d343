"""Find the package's Hydra configs, and build scores and defenses from their YAML files.

The folder of the configs lies beside the package in a clone, and inside it in a wheel.
"""

import importlib
from pathlib import Path
from typing import Any

DEFAULT_ATTACK = "strongest"
"""The name of the attack preset that is used if the user names none. ``conf/config.yaml`` has the
same default."""


def conf_dir() -> Path:
    """Return the folder of the Hydra configs: ``config.yaml`` and one folder per config group.

    Raises:
        FileNotFoundError: the package was installed without its configs.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"expected conf/config.yaml in {package} or {package.parent}.")


def load_part(group: str, name: str) -> Any:
    """Return the score or defense that the YAML file ``conf/<group>/<name>.yaml`` describes, built
    with its settings. A file that lists several parts by name gives a dictionary of these parts.
    ``group`` is ``score`` or ``defense``, whose files can be read without Hydra.

    Raises:
        ValueError: the group has no file of this name; the message lists the names that the group
            has.
    """
    import yaml  # PyYAML is a dependency of Flower

    folder = conf_dir() / group
    texts = {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.yaml"))}
    # Skip files with ``${…}``, such as ``${dataset}``: only Hydra can fill in a run's settings.
    nodes = {stem: yaml.safe_load(text) for stem, text in texts.items() if "${" not in text}
    known = [each for each, node in nodes.items() if "every" not in node.get("defaults", ())]
    if name not in known:
        raise ValueError(f"{group} must be one of {known}, got {name!r}.")
    node = dict(nodes[name])
    for other in node.pop("defaults", ()):
        node |= nodes[other]
    return _built(node)


def _built(node: Any) -> Any:
    """Return a parsed YAML value in which each mapping with an entry ``_target_`` has become an
    object of the class that this entry names. The mapping's other entries are built first, and
    become the arguments of the class.
    """
    if isinstance(node, list):
        return [_built(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    settings = {key: _built(value) for key, value in node.items()}
    target = settings.pop("_target_", None)
    if target is None:
        return settings
    module, _, cls = target.rpartition(".")
    return getattr(importlib.import_module(module), cls)(**settings)
