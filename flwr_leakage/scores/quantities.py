"""Find the names of the quantities that scores measure, before a client's round is scored."""

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from flwr_leakage.scores.base import Score
from flwr_leakage.scores.one_call import ScoreWarning, score


def quantities(scores: Mapping[str, Score]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the quantities that scores measure, and the names of the scores for which
    this is unknown. To find them, each score is computed for one sample of a linear model with 4
    inputs. They are unknown for a score that fails on this model.
    """
    draws = torch.Generator().manual_seed(0)
    # The state of torch's generator is restored, so that the client's next draws do not depend on
    # this call.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", ScoreWarning)
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draws))
        image = torch.rand(1, 1, 2, 2, generator=draws)
        found = score(model, image, torch.tensor([1]), scores, noise_std=0.1)
    names = [m.name for name in scores for m in found[name] if not found[name].error]
    return tuple(names), tuple(name for name in scores if found[name].error)
