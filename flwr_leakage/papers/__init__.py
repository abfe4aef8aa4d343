"""The experiments of the papers that stand behind this project, beside the papers' numbers.

Each is a frozen dataclass of its settings with ``run``; ``conf/experiment/NAME.yaml`` names it and
holds three sizes of its settings, and ``flwr-leakage run +experiment=NAME size=SIZE`` runs it.
"""

from flwr_leakage.papers.experiment import Experiment
from flwr_leakage.papers.findings import Claim, Findings, Judgement, Row
from flwr_leakage.papers.lab import Lab
from flwr_leakage.papers.perform import perform
from flwr_leakage.papers.training import Recipe, Trained

__all__ = [
    "Claim",
    "Experiment",
    "Findings",
    "Judgement",
    "Lab",
    "Recipe",
    "Row",
    "Trained",
    "perform",
]
