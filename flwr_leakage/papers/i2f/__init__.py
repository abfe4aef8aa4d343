"""The experiments of "Understanding Deep Gradient Leakage via Inversion Influence Functions".

Zhang, Hong, Deng, Mahdavi, Zhou, NeurIPS 2023. The paper prints no correlation coefficient and no
table of attacks: its claims are of plots. What its text leaves open is taken from the authors'
published code, and said so.
"""

from flwr_leakage.papers.i2f.bound import Bound
from flwr_leakage.papers.i2f.cost import Cost
from flwr_leakage.papers.i2f.damping import Damping
from flwr_leakage.papers.i2f.directions import Directions
from flwr_leakage.papers.i2f.dynamics import Dynamics
from flwr_leakage.papers.i2f.fairness import Fairness, FairnessPanel
from flwr_leakage.papers.i2f.initialisation import Initialisation
from flwr_leakage.papers.i2f.noise import Noise, Panel
from flwr_leakage.papers.i2f.perception import Perception
from flwr_leakage.papers.i2f.pruning import Pruning
from flwr_leakage.papers.i2f.trained import TrainedVictim
from flwr_leakage.papers.i2f.victim import Victim

__all__ = [
    "Bound",
    "Cost",
    "Damping",
    "Directions",
    "Dynamics",
    "Fairness",
    "FairnessPanel",
    "Initialisation",
    "Noise",
    "Panel",
    "Perception",
    "Pruning",
    "TrainedVictim",
    "Victim",
]
