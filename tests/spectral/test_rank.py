"""The numerical rank against matrices of a known one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.operators import LinearOperator
from flwr_leakage.spectral import numerical_rank, rows_needed


class Dense(LinearOperator):
    """S maps given as matrices (S, P, N)."""

    def __init__(self, matrices):
        super().__init__(len(matrices), matrices.shape[2], matrices.shape[1], matrices)
        self.matrices = matrices

    def _matvec(self, vectors):
        return torch.einsum("spn,sn->sp", self.matrices, vectors)

    def _rmatvec(self, vectors):
        return torch.einsum("spn,sp->sn", self.matrices, vectors)


def matrix(outputs, inputs, spectrum, seed):
    draw = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64)).Q
        for size in (outputs, inputs)
    )
    values = torch.tensor(spectrum, dtype=torch.float64)
    return left[:, : len(values)] @ (values[:, None] * right[: len(values)])


@settings(deadline=None, max_examples=25)
@given(
    inputs=st.integers(2, 60),
    outputs=st.integers(2, 200),
    share=st.floats(0, 1),
    decay=st.floats(1e-6, 1),
    seed=st.integers(0, 99),
)
def test_the_rank_is_found_between_large_and_tiny_singular_values(
    inputs, outputs, share, decay, seed
):
    size = min(inputs, outputs)
    rank = round(share * (size - 1)) + 1
    spectrum = torch.logspace(0, torch.tensor(decay).log10().item(), rank).tolist()
    spectrum += [1e-13] * (size - rank)
    operator = Dense(matrix(outputs, inputs, spectrum, seed)[None])
    found = numerical_rank(operator, torch.Generator().manual_seed(seed), 1e-9, 10_000)
    assert int(found.rank) == rank and bool(found.resolved)
    assert float(found.most_unseen) < 1e-9 < float(found.least_seen)
    assert operator.products <= rows_needed(inputs, outputs)


def test_few_rows_bound_the_rank_from_below_and_find_a_low_one():
    high, low = matrix(100, 80, [1.0] * 80, 1), matrix(100, 80, [1.0] * 5, 2)
    found = numerical_rank(
        Dense(torch.stack([high, low])), torch.Generator().manual_seed(0), 1e-8, 20
    )
    assert found.rank.tolist() == [20, 5]
    assert found.resolved.tolist() == [False, True]


def test_a_low_rank_takes_few_products():
    operator = Dense(matrix(300, 200, [1.0] * 5, 2)[None])
    assert int(numerical_rank(operator, torch.Generator(), 1e-8, 1000).rank) == 5
    assert operator.products == 32


def test_a_map_of_zeros_sees_nothing():
    found = numerical_rank(Dense(torch.zeros(1, 7, 3).double()), torch.Generator(), 1e-8, 100)
    assert int(found.rank) == 0 and bool(found.resolved)


def test_what_is_refused():
    with pytest.raises(ValueError, match="float64"):
        numerical_rank(Dense(torch.zeros(1, 3, 3)), torch.Generator(), 1e-8, 9)
    with pytest.raises(ValueError, match="tolerance"):
        numerical_rank(Dense(torch.zeros(1, 3, 3).double()), torch.Generator(), 0.0, 9)
