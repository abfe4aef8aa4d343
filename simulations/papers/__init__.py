"""The experiments of the papers that stand behind this project, beside the papers' numbers.

Each is a frozen dataclass of its settings with ``run``. The file ``conf/experiment/NAME.yaml``
names it and holds its settings of each size. They run from a clone of the project, by ``python
simulations/run.py experiment=NAME size=SIZE``; the installed package does not hold them.
"""

from simulations.papers.experiment import Experiment
from simulations.papers.findings import Claim, Findings, Judgement, Row
from simulations.papers.lab import Lab
from simulations.papers.perform import perform
from simulations.papers.training import Recipe, Trained

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
