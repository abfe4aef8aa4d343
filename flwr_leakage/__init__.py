"""Gradient-leakage audits for Flower: risk scores, defenses and attacks during training.

Three functions work without Flower: ``score(model, inputs, targets)`` measures the risk of samples,
``attack(model, update, spec=…)`` reconstructs samples from an update, and ``membership(model,
update, records, spec=…, null=…)`` tests whether given records were among its samples.
``flwr_leakage.flower`` holds the client mod and the server strategy that audit a Flower app.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr_leakage.attacks.one_call import ParameterChange, attack
    from flwr_leakage.attacks.presets import load_preset
    from flwr_leakage.audit.structure import structure
    from flwr_leakage.gradient_map import GradientMap, local_update
    from flwr_leakage.members.one_call import membership
    from flwr_leakage.records import (
        Batch,
        Exposure,
        InputSpec,
        LocalSchedule,
        Measurement,
        Observation,
        Reconstruction,
        ThreatModel,
        Update,
    )
    from flwr_leakage.schedules import EpochSchedule
    from flwr_leakage.scores.one_call import score

__all__ = [
    "Batch",
    "EpochSchedule",
    "Exposure",
    "GradientMap",
    "InputSpec",
    "LocalSchedule",
    "Measurement",
    "Observation",
    "ParameterChange",
    "Reconstruction",
    "ThreatModel",
    "Update",
    "attack",
    "load_preset",
    "local_update",
    "membership",
    "score",
    "structure",
]

_HOMES = {
    "attacks.one_call": ("ParameterChange", "attack"),
    "attacks.presets": ("load_preset",),
    "audit.structure": ("structure",),
    "gradient_map": ("GradientMap", "local_update"),
    "members.one_call": ("membership",),
    "schedules": ("EpochSchedule",),
    "scores.one_call": ("score",),
}
"""The submodules of this package, each with the exported names that it defines. The submodule
``records`` defines all names that are not listed here."""


def __getattr__(name: str) -> Any:
    """Return the exported name's object, whose submodule is imported on the first use, so that the
    command's ``--help`` runs without importing torch.

    Raises:
        AttributeError: the package exports no such name.
        ImportError: the submodule needs a third-party package that is not installed.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("flwr-leakage")
    if name not in __all__:
        raise AttributeError(f"module 'flwr_leakage' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "records")
    try:
        return getattr(importlib.import_module(f"flwr_leakage.{home}"), name)
    except ModuleNotFoundError as error:
        from flwr_leakage._lazy import missing

        raise missing(name, error) from error


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
