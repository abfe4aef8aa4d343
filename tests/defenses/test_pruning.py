import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.defenses.pruning import prune_update
from flwr_leakage.params import ravel


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ratio=st.floats(0, 0.999),
    seed=st.integers(0, 1000),
    per_layer=st.booleans(),
)
def test_kept_entries_are_the_largest(
    sizes: list[int], ratio: float, seed: int, per_layer: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    delta = {f"w{i}": torch.randn(n, generator=generator) for i, n in enumerate(sizes)}
    pruned = prune_update(delta, ratio, per_layer)
    groups = [[name] for name in delta] if per_layer else [list(delta)]
    for names in groups:
        before = ravel({name: delta[name] for name in names})
        after = ravel({name: pruned[name] for name in names})
        kept = after != 0
        assert int((~kept).sum()) == int(round(ratio * len(before), 6) // 1)
        assert torch.equal(after[kept], before[kept])
        if not kept.all():
            assert before[kept].abs().min() >= before[~kept].abs().max()


def test_ties_do_not_prune_more() -> None:
    pruned = prune_update({"w": torch.ones(10)}, 0.3)
    assert int((pruned["w"] != 0).sum()) == 7


def test_global_and_per_layer_differ() -> None:
    delta = {"small": torch.full((4,), 0.1), "large": torch.full((4,), 1.0)}
    assert ravel(prune_update(delta, 0.5)).tolist() == [0.0] * 4 + [1.0] * 4
    assert [int((v != 0).sum()) for v in prune_update(delta, 0.5, True).values()] == [2, 2]


@pytest.mark.slow
def test_beyond_the_limit_of_quantile() -> None:
    vector = torch.arange(2**24 + 2, dtype=torch.float64)
    pruned = prune_update({"w": vector}, 0.5)["w"]
    assert int((pruned != 0).sum()) == 2**23 + 1


def test_nan_counts_as_the_largest() -> None:
    pruned = prune_update({"w": torch.tensor([math.nan, 1.0, 2.0, 3.0])}, 0.5)["w"]
    assert pruned.isnan().tolist() == [True, False, False, False]
    assert pruned[1:].tolist() == [0.0, 0.0, 3.0]
