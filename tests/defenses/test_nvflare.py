import math

import numpy as np
import torch

from flwr_leakage.defenses import PercentilePrivacy, SVTPrivacy
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import LocalSchedule, Update

STEPS = 4


def make_update(count: int, size: float = 0.03) -> Update:
    generator = torch.Generator().manual_seed(0)
    delta = {
        "w": size * torch.randn(count, 2, generator=generator),
        "scalar": torch.tensor(0.5),
    }
    return Update(delta, {}, LocalSchedule(0.1, STEPS, 8), 8)


def seeded(seed: int) -> Reproducible:
    return Reproducible(torch.Generator().manual_seed(seed))


def test_percentile_privacy_is_the_filter_entry_by_entry() -> None:
    update = make_update(500)
    released = PercentilePrivacy(25.0, 0.01).on_update(update, seeded(0)).delta
    cutoff = np.percentile(ravel(update.delta).abs().numpy() / STEPS, 25.0)
    for before, after in zip(update.delta["w"].flatten(), released["w"].flatten(), strict=True):
        step = float(before) / STEPS
        expected = 0.0 if abs(step) < cutoff else max(-0.01, min(0.01, step))
        assert math.isclose(float(after), expected * STEPS, rel_tol=1e-5)
    assert torch.equal(released["scalar"], update.delta["scalar"])  # as the filter passes it


def test_percentile_privacy_leaves_out_nothing_where_a_tenth_is_zero() -> None:
    update = make_update(500, 1e-3)
    update.delta["w"][:60] = 0.0  # units that no sample activates
    released = PercentilePrivacy().on_update(update, seeded(0)).delta
    torch.testing.assert_close(released["w"], update.delta["w"])


def test_svt_privacy_sends_its_fraction_with_its_noise() -> None:
    count, gamma = 20_000, 1e-5
    update = make_update(count // 2)
    sent = SVTPrivacy(gamma=gamma).on_update(update, seeded(1)).delta["w"].flatten() / STEPS
    kept = sent[sent != 0]
    # A tenth is drawn from about a half of the entries with replacement, so that some are the same.
    assert 0.08 * count < len(kept) < 0.1 * count
    # The mean magnitude of Laplacian noise is its scale, here 20 times the clip.
    assert math.isclose(float(kept.abs().mean()), 20 * gamma, rel_tol=0.06)
    assert float(sent.sign() @ update.delta["w"].flatten().sign()) / len(kept) < 0.1


def test_svt_privacy_ends_on_an_update_that_is_no_number() -> None:
    update = make_update(50, math.nan)
    assert SVTPrivacy().on_update(update, seeded(0)).delta["w"].isfinite().all()
