"""The audit's place in Flower: client mod, server strategy, engines."""

from flwr_leakage.audit import ConsoleProgress, Selection, ServerAudit, SilentProgress, Truth
from flwr_leakage.flower.audited_app import audit
from flwr_leakage.flower.client import ClientAudit, LeakageMod, encode
from flwr_leakage.flower.dp_check import Finding, check_privacy
from flwr_leakage.flower.inline_grid import InlineGrid
from flwr_leakage.flower.launch import RayEngine, run_inline, run_ray
from flwr_leakage.flower.legacy import LegacyHonestButCurious, observe_legacy
from flwr_leakage.flower.observed import observe
from flwr_leakage.flower.strategy import HonestButCurious
from flwr_leakage.scores.plan import ScorePlan

__all__ = [
    "ClientAudit",
    "ConsoleProgress",
    "Finding",
    "HonestButCurious",
    "InlineGrid",
    "LeakageMod",
    "LegacyHonestButCurious",
    "RayEngine",
    "ScorePlan",
    "Selection",
    "ServerAudit",
    "SilentProgress",
    "Truth",
    "audit",
    "check_privacy",
    "encode",
    "observe",
    "observe_legacy",
    "run_inline",
    "run_ray",
]
