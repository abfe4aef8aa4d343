"""What a server does with what it observes: grant, attack, evaluate, record. No Flower here."""

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.audit.progress import ConsoleProgress, Progress, SilentProgress
from flwr_leakage.audit.selection import Selection
from flwr_leakage.audit.server_audit import ServerAudit
from flwr_leakage.audit.truth import Truth, TruthSource
from flwr_leakage.audit.what_if import WhatIf, WhatIfSource, relative_change

__all__ = [
    "ClientNote",
    "ConsoleProgress",
    "Progress",
    "Selection",
    "ServerAudit",
    "SilentProgress",
    "Truth",
    "TruthSource",
    "WhatIf",
    "WhatIfSource",
    "relative_change",
]
