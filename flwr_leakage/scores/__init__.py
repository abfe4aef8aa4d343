"""Risk scores of a client's samples, computed without an attack."""

from flwr_leakage.operators import Budget
from flwr_leakage.per_sample import ClientSamples, SampleProblem
from flwr_leakage.scores.base import Column, SampleScore, Score
from flwr_leakage.scores.calibration import Calibration, fit_calibration
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.scores.gradient_norm import GradientNorm
from flwr_leakage.scores.influence_krylov_bound import InfluenceKrylovBound
from flwr_leakage.scores.influence_lower_bound import InfluenceLowerBound
from flwr_leakage.scores.input_gradient_norm import InputGradientNorm
from flwr_leakage.scores.inversion_influence import InversionInfluence
from flwr_leakage.scores.jacobian_norm import JacobianNorm
from flwr_leakage.scores.lambda_max import LambdaMax
from flwr_leakage.scores.lavp import LAVP
from flwr_leakage.scores.layer_shares import LayerShares
from flwr_leakage.scores.lipschitz import Lipschitz, lipschitz_constants
from flwr_leakage.scores.nonlinear_bound import NonlinearBound
from flwr_leakage.scores.one_call import ScoreWarning, default_scores, score
from flwr_leakage.scores.plan import ScorePlan, select_samples
from flwr_leakage.scores.result import ScoreResult, Scores
from flwr_leakage.scores.score_round import Account, score_round
from flwr_leakage.scores.singular_influence import SingularInfluence
from flwr_leakage.scores.summary import Summary, summarize
from flwr_leakage.scores.unseen_directions import UnseenDirections

__all__ = [
    "LAVP",
    "Account",
    "Budget",
    "Calibration",
    "ClientSamples",
    "Column",
    "GradientNorm",
    "InfluenceKrylovBound",
    "InfluenceLowerBound",
    "InputGradientNorm",
    "InversionInfluence",
    "JacobianNorm",
    "LambdaMax",
    "LayerShares",
    "Lipschitz",
    "NonlinearBound",
    "SampleProblem",
    "SampleScore",
    "Score",
    "ScorePlan",
    "ScoreResult",
    "ScoreWarning",
    "Scores",
    "SingularInfluence",
    "Summary",
    "UnseenDirections",
    "compute_scores",
    "default_scores",
    "fit_calibration",
    "lipschitz_constants",
    "score",
    "score_round",
    "select_samples",
    "summarize",
]
