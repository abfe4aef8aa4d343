"""Attack the updates that a server observes, evaluate the reconstructions, and record them.

Nothing in this package depends on Flower.
"""

from typing import TYPE_CHECKING

from flwr_leakage._lazy import lazy

if TYPE_CHECKING:
    from flwr_leakage.audit.candidates import Candidates
    from flwr_leakage.audit.large_clients import LargeClients
    from flwr_leakage.audit.note import ClientNote, ReplayResult
    from flwr_leakage.audit.progress import ConsoleProgress, Progress, SilentProgress
    from flwr_leakage.audit.selection import Selection
    from flwr_leakage.audit.server_audit import ServerAudit
    from flwr_leakage.audit.structure_report import Directions, Opening, Structure
    from flwr_leakage.audit.truth import Mixed, Truth, TruthSource
    from flwr_leakage.audit.what_if import WhatIf, WhatIfSource, relative_change

__all__ = [
    "Candidates",
    "ClientNote",
    "ConsoleProgress",
    "Directions",
    "LargeClients",
    "Mixed",
    "Opening",
    "Progress",
    "ReplayResult",
    "Selection",
    "ServerAudit",
    "SilentProgress",
    "Structure",
    "Truth",
    "TruthSource",
    "WhatIf",
    "WhatIfSource",
    "relative_change",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "flwr_leakage.audit.candidates": ("Candidates",),
        "flwr_leakage.audit.large_clients": ("LargeClients",),
        "flwr_leakage.audit.note": ("ClientNote", "ReplayResult"),
        "flwr_leakage.audit.progress": ("ConsoleProgress", "Progress", "SilentProgress"),
        "flwr_leakage.audit.selection": ("Selection",),
        "flwr_leakage.audit.server_audit": ("ServerAudit",),
        "flwr_leakage.audit.structure_report": ("Directions", "Opening", "Structure"),
        "flwr_leakage.audit.truth": ("Mixed", "Truth", "TruthSource"),
        "flwr_leakage.audit.what_if": ("WhatIf", "WhatIfSource", "relative_change"),
    },
)
