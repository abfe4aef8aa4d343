"""What scores measure is found without a trace."""

import torch

from flwr_leakage.scores import GradientNorm
from flwr_leakage.scores.quantities import quantities


def test_what_the_client_draws_next_does_not_change():
    state = torch.get_rng_state()
    names, unknown = quantities({"g": GradientNorm()})
    assert names == ("gradient_norm",)
    assert not unknown
    assert torch.equal(state, torch.get_rng_state())
