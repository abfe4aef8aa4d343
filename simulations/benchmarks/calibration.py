"""Predict the error of an attack from a score, by a line fitted to recorded attacks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import spearmanr

Outcome = Literal["rmse", "psnr"]
MIN_PAIRS = 5


@dataclass(frozen=True)
class Calibration:
    """log₁₀RMSE, or PSNR in dB, as a straight line in log₁₀ of a score, with its error.

    Attributes:
        score: the score's name.
        outcome: ``rmse`` (in the unit of the recorded attacks) or ``psnr`` (dB).
        conditions: the attack, model, data and threat model of the recorded attacks, in words.
            The line holds under these conditions only.
        slope: change of log₁₀RMSE, or of PSNR in dB, when the score grows tenfold.
        intercept: log₁₀RMSE or PSNR at a score of 1.
        error: leave-one-out root mean squared error, in decades of the RMSE or in dB.
        baseline_error: leave-one-out error of a prediction without the score, the mean of the
            other attacks. A score is of use if ``error`` is smaller.
        rank_correlation: Spearman's ρ of score and outcome; 0 if all outcomes are equal.
        num_pairs: recorded attacks used.
    """

    score: str
    outcome: Outcome
    conditions: str
    slope: float
    intercept: float
    error: float
    baseline_error: float
    rank_correlation: float
    num_pairs: int


def fit_calibration(
    score: str,
    values: Sequence[float | None],
    outcomes: Sequence[float | None],
    outcome: Outcome = "rmse",
    conditions: str = "",
) -> Calibration:
    """Fit a line by least squares to the samples whose score and outcome are known.

    Args:
        score: the score's name.
        values: of the score, positive; pairs with ``None`` or 0 are left out.
        outcomes: the RMSE or PSNR that an attack reached on the same samples.
        outcome: ``rmse`` or ``psnr``.
        conditions: the attack, model, data and threat model of the recorded attacks, in words.

    Raises:
        ValueError: fewer than five pairs, or all scores equal.
    """
    if outcome not in ("rmse", "psnr"):
        raise ValueError(f"outcome must be 'rmse' or 'psnr', got {outcome!r}.")
    pairs = [
        (math.log10(value), reached if outcome == "psnr" else math.log10(reached))
        for value, reached in zip(values, outcomes, strict=True)
        if value is not None
        and reached is not None
        and value > 0
        and (outcome == "psnr" or reached > 0)
    ]
    if len(pairs) < MIN_PAIRS:
        raise ValueError(f"at least {MIN_PAIRS} pairs of numbers are needed, got {len(pairs)}.")
    x, y = np.array(pairs).T
    if np.ptp(x) == 0:
        raise ValueError("the scores must not all be equal.")
    slope, intercept = np.polyfit(x, y, 1)
    # Leave-one-out residuals of a line have a closed form through the leverages.
    leverage = 1 / len(x) + (x - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum()
    residuals = (y - intercept - slope * x) / (1 - leverage)
    alone = (y - y.mean()) * len(y) / (len(y) - 1)
    return Calibration(
        score=score,
        outcome=outcome,
        conditions=conditions,
        slope=float(slope),
        intercept=float(intercept),
        error=float(np.sqrt((residuals**2).mean())),
        baseline_error=float(np.sqrt((alone**2).mean())),
        # Outcomes that are all equal have no ranks to follow.
        rank_correlation=float(spearmanr(x, y).statistic) if np.ptp(y) else 0.0,
        num_pairs=len(pairs),
    )
