"""Put the audit into Flower: a client mod, a server strategy, and launchers of whole runs.

A run takes place in one process, or on Flower's simulation runtime (Ray).
"""

from typing import TYPE_CHECKING

from flwr_leakage._lazy import lazy

if TYPE_CHECKING:
    from flwr_leakage.audit.progress import ConsoleProgress, SilentProgress
    from flwr_leakage.audit.selection import Selection
    from flwr_leakage.audit.server_audit import ServerAudit
    from flwr_leakage.audit.truth import Truth
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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "flwr_leakage.audit.progress": ("ConsoleProgress", "SilentProgress"),
        "flwr_leakage.audit.selection": ("Selection",),
        "flwr_leakage.audit.server_audit": ("ServerAudit",),
        "flwr_leakage.audit.truth": ("Truth",),
        "flwr_leakage.flower.audited_app": ("audit",),
        "flwr_leakage.flower.client": ("ClientAudit", "LeakageMod", "encode"),
        "flwr_leakage.flower.dp_check": ("Finding", "check_privacy"),
        "flwr_leakage.flower.inline_grid": ("InlineGrid",),
        "flwr_leakage.flower.launch": ("RayEngine", "run_inline", "run_ray"),
        "flwr_leakage.flower.legacy": ("LegacyHonestButCurious", "observe_legacy"),
        "flwr_leakage.flower.observed": ("observe",),
        "flwr_leakage.flower.strategy": ("HonestButCurious",),
        "flwr_leakage.scores.plan": ("ScorePlan",),
    },
)
