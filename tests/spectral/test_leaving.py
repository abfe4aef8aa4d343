"""Blocks that are done leave: a batch takes as many products as its blocks alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import make_exposure

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ConvNet
from flwr_leakage.operators import Budget, FunctionJacobian, Meter, SampleJacobian
from flwr_leakage.records import Batch, LocalSchedule
from flwr_leakage.scores import (
    LAVP,
    InfluenceKrylovBound,
    InversionInfluence,
    JacobianNorm,
    LambdaMax,
    LayerShares,
    NonlinearBound,
    SingularInfluence,
    score,
)
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.spectral import (
    LargestEigenvalue,
    choose_smallest_eigenvalue,
    largest_eigenvalue,
    solve_damped,
    spectral_sum,
)

SIZE = 12


def matrices(count):
    """Blocks of very different spectra, so that they finish at different steps."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for block in range(count):
        left, right = (
            torch.linalg.qr(torch.randn(n, SIZE, generator=generator).double())[0]
            for n in (2 * SIZE, SIZE)
        )
        decay = (1.0, 0.8, 0.3, 0.05)[block % 4]
        found.append(left @ torch.diag(decay ** torch.arange(SIZE).double()) @ right)
    return torch.stack(found)


def operator_of(stack, limit=None):
    point = torch.zeros(len(stack), SIZE).double()
    meter = Meter(Budget(products=limit))
    return FunctionJacobian(lambda x: torch.einsum("spn,sn->sp", stack, x), point, meter)


def draws(blocks):
    return [torch.Generator().manual_seed(int(block)) for block in blocks]


def starts(blocks):
    return torch.stack([torch.randn(SIZE, generator=g).double() for g in draws(blocks)])


def sides(blocks):
    return torch.stack([torch.randn(2 * SIZE, generator=g).double() for g in draws(blocks)])


METHODS = {
    "largest": lambda op, blocks: largest_eigenvalue(op, starts(blocks), 1e-6).estimate.value,
    "smallest": lambda op, blocks: choose_smallest_eigenvalue(op, draws(blocks)).value,
    "smallest by Lanczos": lambda op, blocks: (
        choose_smallest_eigenvalue(op, draws(blocks), 1e-2, 60, max_dense_inputs=4).value
    ),
    "damped": lambda op, blocks: solve_damped(op, sides(blocks), (1e-1, 1e-2), 1e-3).norms,
    "trace": lambda op, blocks: (
        spectral_sum(
            op, lambda x, top: 1 / (x + 1e-2 * top), draws(blocks), 2, 60, 1e-3, 1
        ).estimate.value
    ),
}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=6, deadline=None)
@given(chosen=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
def test_a_batch_takes_the_products_of_its_blocks_alone(method, chosen):
    stack, blocks = matrices(8), sorted(chosen)
    together = operator_of(stack[blocks])
    values = METHODS[method](together, blocks)
    alone = 0
    for place, block in enumerate(blocks):
        operator = operator_of(stack[[block]])
        value = METHODS[method](operator, [block])
        torch.testing.assert_close(values[[place]], value, rtol=1e-9, atol=1e-12)
        alone += operator.meter.products
    assert together.meter.products == alone


def test_a_question_to_a_process_whose_blocks_have_parted_is_answered_as_a_first_one():
    stack = matrices(8)
    start = starts(range(8))
    asked = LargestEigenvalue(operator_of(stack), start)
    for tolerance, limit in ((1e-1, 12), (1e-10, 5), (1e-4, 12), (1e-1, 12), (1e-8, 12)):
        found = asked(tolerance, limit)
        fresh = largest_eigenvalue(operator_of(stack), start, tolerance, limit)
        torch.testing.assert_close(found.estimate.value, fresh.estimate.value)
        torch.testing.assert_close(found.vectors, fresh.vectors, rtol=0, atol=1e-9)
        assert torch.equal(found.estimate.converged, fresh.estimate.converged)


def test_narrow_operators_are_rows_of_the_whole_one():
    torch.manual_seed(0)
    network = ConvNet((1, 6, 6), 4, 3, [1, 2], [1, 2], [], use_batch_norm=False).double()
    gradient_map = GradientMap(network)
    batch = Batch(torch.rand(6, 1, 6, 6).double(), torch.arange(6) % 4)
    whole = SampleJacobian(gradient_map, gradient_map.params, batch)
    dense = whole.to_dense()
    before = whole.meter.products
    rows = torch.arange(6)
    operator = whole
    for keep in ([0, 1, 2, 4, 5], [0, 2, 3], [1, 2], [1]):
        operator, rows = operator.narrow(torch.tensor(keep)), rows[keep]
        inputs, outputs = torch.rand(len(rows), 36).double(), torch.rand_like(dense[rows, :, 0])
        expected = torch.einsum("spn,sn->sp", dense[rows], inputs)
        torch.testing.assert_close(operator.matvec(inputs), expected)
        expected = torch.einsum("spn,sp->sn", dense[rows], outputs)
        torch.testing.assert_close(operator.rmatvec(outputs), expected)
        with pytest.raises(ValueError, match=rf"shape \({len(rows)}, 36\)"):
            operator.matvec(torch.rand(7, 36).double())
    assert whole.meter.products - before == 2 * (5 + 3 + 2 + 1)
    assert whole.products == 36 + 2 * 4


SCORES = {
    "lambda_max": LambdaMax(),
    "i2f": InversionInfluence((1e-3,), expected="always"),
    "krylov": InfluenceKrylovBound(),
    "lavp": LAVP(("angular_max", "lambda_max")),
    "norm": JacobianNorm(),
    "singular": SingularInfluence(smallest=False),
    "shares": LayerShares(num_probes=2),
    "nonlinear": NonlinearBound(num_draws=1),
}


@pytest.fixture(scope="module")
def relu():
    torch.manual_seed(0)
    network = ConvNet((1, 8, 8), 4, 4, [1, 2], [1, 2], [], use_batch_norm=False)
    scales = torch.tensor([0.01, 0.3, 1.0, 3.0, 10.0])[:, None, None, None]
    return network, torch.rand(5, 1, 8, 8) * scales, torch.arange(5) % 4


@pytest.mark.parametrize("name", SCORES)
def test_a_score_of_a_relu_network_takes_the_products_of_its_samples_alone(relu, name):
    network, inputs, targets = relu
    gradient_map, batch = GradientMap(network), Batch(inputs, targets)
    exposure = make_exposure(gradient_map, batch, LocalSchedule(1.0, 1, len(batch)), 1e-3)
    scores = {name: SCORES[name]}
    whole = compute_scores(scores, gradient_map, exposure)[name]
    alone = [
        compute_scores(scores, gradient_map, exposure, samples=[index])[name].products
        for index in range(len(batch))
    ]
    assert whole.products == sum(alone) and not whole.error
    assert name in ("krylov", "norm", "shares") or len(set(alone)) > 1


@settings(max_examples=12, deadline=None)
@given(limit=st.integers(0, 900), order=st.permutations(sorted(SCORES)))
def test_a_budget_of_products_is_never_exceeded(relu, limit, order):
    counted = []
    real = FunctionJacobian._matvec, FunctionJacobian._rmatvec

    def counting(product):
        def count(self, vectors):
            counted.append(int((vectors != 0).any(1).sum()))
            return product(self, vectors)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name, product in zip(("_matvec", "_rmatvec"), real, strict=True):
            patch.setattr(FunctionJacobian, name, counting(product))
        scores = {name: SCORES[name] for name in order[:3]}
        found = score(*relu, scores, noise_std=1e-3, budget=Budget(products=limit))
    assert sum(result.products for result in found.values()) <= limit
    # Beside them there is the one product of the check of second derivatives.
    assert sum(counted) <= limit + 1
    for result in found.values():
        assert not result.error or "budget" in result.error
