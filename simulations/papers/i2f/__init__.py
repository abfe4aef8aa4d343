"""The experiments of "Understanding Deep Gradient Leakage via Inversion Influence Functions".

Zhang, Hong, Deng, Mahdavi, Zhou, NeurIPS 2023. The paper prints no correlation coefficient and no
table of attacks: its claims are of plots. What its text leaves open is taken from the authors'
published code, and said so.
"""

from simulations.papers.i2f.bound import Bound
from simulations.papers.i2f.cost import Cost
from simulations.papers.i2f.damping import Damping
from simulations.papers.i2f.directions import Directions
from simulations.papers.i2f.dynamics import Dynamics
from simulations.papers.i2f.fairness import Fairness
from simulations.papers.i2f.initialisation import Initialisation
from simulations.papers.i2f.noise import Noise, Panel
from simulations.papers.i2f.perception import Perception
from simulations.papers.i2f.pruning import Pruning
from simulations.papers.i2f.trained import FairnessPanel, TrainedVictim
from simulations.papers.i2f.victim import Victim

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
