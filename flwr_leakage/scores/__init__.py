"""Compute scores of how much a client's samples are at risk, without an attack."""

from flwr_leakage.scores.absolute_influence import AbsoluteInfluence
from flwr_leakage.scores.base import Column, SampleScore
from flwr_leakage.scores.batch_lipschitz import BatchLipschitz
from flwr_leakage.scores.bayesian_bound import BayesianBound
from flwr_leakage.scores.cramer_rao_bound import CramerRaoBound
from flwr_leakage.scores.fisher_leakage import FisherLeakage
from flwr_leakage.scores.gradient_norm import GradientNorm
from flwr_leakage.scores.gradient_sensitivity import GradientSensitivity
from flwr_leakage.scores.influence_krylov_bound import InfluenceKrylovBound
from flwr_leakage.scores.influence_lower_bound import InfluenceLowerBound
from flwr_leakage.scores.input_gradient_norm import InputGradientNorm
from flwr_leakage.scores.inversion_influence import InversionInfluence
from flwr_leakage.scores.jacobian_norm import JacobianNorm
from flwr_leakage.scores.joint_influence import JointInfluence
from flwr_leakage.scores.lambda_max import LambdaMax
from flwr_leakage.scores.lavp import LAVP
from flwr_leakage.scores.layer_shares import LayerShares
from flwr_leakage.scores.lipschitz import Lipschitz
from flwr_leakage.scores.nonlinear_bound import NonlinearBound
from flwr_leakage.scores.one_call import default_scores, score
from flwr_leakage.scores.one_step_bounds import OneStepBounds
from flwr_leakage.scores.poisoning_bound import PoisoningBound
from flwr_leakage.scores.psnr_bound import PSNRBound
from flwr_leakage.scores.reconstruction_robustness import ReconstructionRobustness
from flwr_leakage.scores.singular_influence import SingularInfluence
from flwr_leakage.scores.singular_spectrum import SingularSpectrum
from flwr_leakage.scores.undamped_influence import UndampedInfluence
from flwr_leakage.scores.unseen_directions import UnseenDirections

__all__ = [
    "LAVP",
    "AbsoluteInfluence",
    "BatchLipschitz",
    "BayesianBound",
    "Column",
    "CramerRaoBound",
    "FisherLeakage",
    "GradientNorm",
    "GradientSensitivity",
    "InfluenceKrylovBound",
    "InfluenceLowerBound",
    "InputGradientNorm",
    "InversionInfluence",
    "JacobianNorm",
    "JointInfluence",
    "LambdaMax",
    "LayerShares",
    "Lipschitz",
    "NonlinearBound",
    "OneStepBounds",
    "PSNRBound",
    "PoisoningBound",
    "ReconstructionRobustness",
    "SampleScore",
    "SingularInfluence",
    "SingularSpectrum",
    "UndampedInfluence",
    "UnseenDirections",
    "default_scores",
    "score",
]
