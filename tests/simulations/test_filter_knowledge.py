"""What a server is said to know of a filter holds for the gradient that was filtered."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from flwr_leakage import defenses as d
from flwr_leakage.params import Params, ravel, scale
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import LocalSchedule, Update
from simulations.benchmarks import filter_knowledge as known
from simulations.benchmarks import filters

RATE = 0.1
CASES = {
    "whole": (d.NoDefense(), known.whole),
    "bounded": (d.GradientPruning(0.8), known.bounded()),
    "bounded and clipped": (d.PercentilePrivacy(30.0, 0.05), known.bounded(0.05)),
    "masked": (d.RandomSubset(0.3), known.masked),
    "signs": (d.SignSGD(), known.signs),
    "low rank": (d.TruncatedSVD(0.7), known.low_rank),
}


def gradient(seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"kernels": (6, 2, 3, 3), "weight": (9, 12), "bias": (9,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def sent_of(defense: d.Defense, g: Params) -> Params:
    update = Update(scale(g, -RATE), {}, LocalSchedule(RATE), 1)
    draws = Reproducible(torch.Generator().manual_seed(1))
    return defense.on_update(update, draws).pseudo_gradient()


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_itself_fits_and_another_does_not(name: str) -> None:
    defense, reading = CASES[name]
    own, other = gradient(0), gradient(7)
    sent = sent_of(defense, own)
    knows = reading(sent, RATE)
    assert float(knows.misfit(own, sent)) < 1e-9
    assert float(knows.misfit(other, sent)) > 0.05


@pytest.mark.parametrize("name", sorted(set(CASES) - {"whole"}))
def test_completion_by_the_gradient_itself_is_the_gradient(name: str) -> None:
    defense, reading = CASES[name]
    own = gradient(0)
    sent = sent_of(defense, own)
    completed = reading(sent, RATE).complete(own, sent)
    assert not torch.equal(ravel(sent), ravel(own))
    torch.testing.assert_close(completed, own, rtol=1e-4, atol=1e-4)


def test_noise_of_the_sparse_vector_leaves_the_gradient_likelier_than_others() -> None:
    own = gradient(0)
    sent = sent_of(d.SVTPrivacy(0.9, noise_var=8.0, gamma=1.0), own)
    knows = known.clipped_under_noise(1.0)(sent, RATE)
    others = [float(knows.misfit(gradient(seed), sent)) for seed in range(1, 6)]
    assert float(knows.misfit(own, sent)) < min(others)


def test_what_is_orthogonal_or_untouched_fits() -> None:
    own = gradient(0)
    sent = d.censor.orthogonal_noise(own, Reproducible(torch.Generator().manual_seed(1)))
    knows = known.orthogonal(sent, RATE)
    assert float(knows.misfit(own, sent)) < 1e-9
    assert float(knows.misfit(sent, sent)) < 1e-9
    assert float(knows.misfit(scale(sent, 0.5), sent)) > 0.1


def test_a_row_that_is_there_is_not_measured_again(tmp_path: Path, monkeypatch) -> None:
    measured = []

    def measure(network: str, kind: filters.Filter, sources: object, seed: int) -> dict:
        measured.append((network, seed))
        return {
            "psnr": 20.0 + seed, "plain": 15.0, "blind": 9.0, "rank": 1, "untouched": False,
            "p_values": [1e-3] * filters.MEMBERS + [0.5] * 50, "accuracy": 0.5, "seconds": 1.0,
        }  # fmt: skip

    for name in ("image", "members", "trained"):
        monkeypatch.setattr(filters, name, measure)
    given = Namespace(output=tmp_path / "rows.jsonl", root=tmp_path)
    cases = [("CENSOR", "mlp", part, seed, given) for part in filters.PARTS for seed in (100, 102)]
    for case in cases * 2:
        filters.run(*case)
    assert len(measured) == len(cases)
    *_, row = filters.table(filters.read(given.output)).splitlines()
    assert row.startswith("| CENSOR | mlp | 2 / 2 | 121.0 [120.0, 122.0] | 15.0 | 9.0 | 2 of 2 |")
    assert "| 0 of 4 | 50.0" in row
