"""Capture one training of unmodified PyTorch code by hooks, and replay it."""

from flwr_leakage.capture.check import TOLERANCE, ReplayCheck, check_replay
from flwr_leakage.capture.facts import TrainingFacts, differences, facts_of
from flwr_leakage.capture.glance import Glance
from flwr_leakage.capture.recorder import Limits, capture
from flwr_leakage.capture.replay import replay
from flwr_leakage.capture.training import CapturedTraining

__all__ = [
    "TOLERANCE",
    "CapturedTraining",
    "Glance",
    "Limits",
    "ReplayCheck",
    "TrainingFacts",
    "capture",
    "check_replay",
    "differences",
    "facts_of",
    "replay",
]
