"""What a server does with what it observes: grant, attack, evaluate, record. No Flower here."""

from flwr_leakage.audit.note import ClientNote, ReplayResult
from flwr_leakage.audit.progress import ConsoleProgress, Progress, SilentProgress
from flwr_leakage.audit.selection import Selection
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.audit.truth import Truth, TruthSource

__all__ = [
    "ClientNote",
    "ConsoleProgress",
    "Progress",
    "ReplayResult",
    "Selection",
    "ServerAudit",
    "SilentProgress",
    "Truth",
    "TruthSource",
]
