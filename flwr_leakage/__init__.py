"""Gradient-leakage audits for Flower: risk scores, defenses and attacks while one trains.

Without Flower, two calls: ``score(model, inputs, targets)`` and ``attack(model, update, spec=…)``.
The place of the audit in a Flower app is in ``flwr_leakage.flower``.
"""

from flwr_leakage.attacks.one_call import ParameterChange, attack
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap, local_update
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
    "score",
]
