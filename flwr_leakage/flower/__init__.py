"""The audit's place in Flower: client mod, server strategy, engines."""

from flwr_leakage.flower.audit import ServerAudit
from flwr_leakage.flower.client import ClientAudit, LeakageMod, encode
from flwr_leakage.flower.inline_grid import InlineGrid
from flwr_leakage.flower.launch import run_inline, run_ray
from flwr_leakage.flower.progress import ConsoleProgress, SilentProgress
from flwr_leakage.flower.scoring import ScorePlan
from flwr_leakage.flower.strategy import HonestButCurious
from flwr_leakage.flower.targets import Selection, Truth

__all__ = [
    "ClientAudit",
    "ConsoleProgress",
    "HonestButCurious",
    "InlineGrid",
    "LeakageMod",
    "ScorePlan",
    "Selection",
    "ServerAudit",
    "SilentProgress",
    "Truth",
    "encode",
    "run_inline",
    "run_ray",
]
