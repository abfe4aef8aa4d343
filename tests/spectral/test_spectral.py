import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_leakage.operators import (
    AngularJacobian,
    Budget,
    BudgetExhausted,
    FunctionJacobian,
    Meter,
)
from flwr_leakage.randomness import sign_rows
from flwr_leakage.spectral import (
    Lanczos,
    LargestEigenvalue,
    choose_smallest_eigenvalue,
    dense_spectrum,
    gram_spectrum,
    inverse_sum,
    largest_eigenvalue,
    random_start,
    smallest_eigenvalue,
    solve_damped,
    spectral_sum,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(*spectra: list[float], rows: int = 40, dtype=torch.float64, seed: int = 0):
    """An operator whose AᵀA has the given eigenvalues, one list for each block, and its A."""
    matrices = []
    for index, spectrum in enumerate(spectra):
        g = generator(seed + index)
        n = len(spectrum)
        left = torch.linalg.qr(torch.randn(rows, n, generator=g, dtype=torch.float64)).Q
        right = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
        root = torch.tensor(spectrum, dtype=torch.float64).sqrt()
        matrices.append(left * root @ right.T)
    stack = torch.stack(matrices)
    narrow = stack.to(dtype)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (narrow @ x[..., None])[..., 0]

    point = torch.zeros(len(spectra), len(spectra[0]), dtype=dtype)
    return FunctionJacobian(function, point), stack


GEOMETRIC = [10.0 ** (-k / 4) for k in range(24)]
FLAT = [1.0 + 0.5 * k / 24 for k in range(24)]


def test_largest_eigenvalues_of_two_operators_at_once():
    operator, _ = with_spectrum(GEOMETRIC, FLAT)
    found = largest_eigenvalue(operator, random_start(operator, generator()), 1e-6)
    assert bool(found.estimate.converged.all())
    torch.testing.assert_close(
        found.estimate.value, torch.tensor([1.0, max(FLAT)]).double(), rtol=1e-5, atol=0
    )
    residual = operator.gram(found.vectors) - found.estimate.value[:, None] * found.vectors
    assert float(residual.norm(dim=1).max()) < 1e-2


def test_a_neighbour_of_the_largest_eigenvalue_does_not_pass_for_it():
    # The start has almost nothing along the first eigenvector: it looks converged to 0.9 first.
    operator, dense = with_spectrum([1.0, 0.9, *[0.3 * 0.8**k for k in range(30)]], rows=64)
    right = torch.linalg.svd(dense[0]).Vh
    weights = torch.ones(32, dtype=torch.float64)
    weights[0] = 1e-3
    found = largest_eigenvalue(operator, (weights @ right)[None], 1e-3).estimate
    assert abs(float(found.value) - 1.0) < 1e-3


def test_too_few_steps_are_not_converged():
    operator, _ = with_spectrum(FLAT)
    found = largest_eigenvalue(operator, random_start(operator, generator()), 1e-9, max_steps=4)
    assert not bool(found.estimate.converged.any())
    assert float(found.estimate.value) <= max(FLAT)


def test_lanczos_reproduces_the_whole_spectrum_in_n_steps():
    operator, _ = with_spectrum(GEOMETRIC)
    process = Lanczos(operator, random_start(operator, generator()))
    for _ in range(24):
        process.step()
    expected = torch.tensor(sorted(GEOMETRIC), dtype=torch.float64)
    torch.testing.assert_close(process.ritz()[0][0], expected, rtol=1e-6, atol=1e-14)
    basis = process.basis[0]
    torch.testing.assert_close(basis @ basis.T, torch.eye(24).double(), rtol=0, atol=1e-12)


def test_lanczos_survives_an_exhausted_krylov_space():
    operator, _ = with_spectrum([2.0, 2.0, 2.0, 1.0, 1.0, 1.0], FLAT[:6])
    found = largest_eigenvalue(operator, random_start(operator, generator()), 1e-8)
    torch.testing.assert_close(found.estimate.value, torch.tensor([2.0, FLAT[5]]).double())
    low = smallest_eigenvalue(operator, generator(), 1e-8)
    torch.testing.assert_close(low.estimate.value, torch.tensor([1.0, 1.0]).double())


def part_of(stack, block):
    """The operator of one block of a stack of matrices."""
    return FunctionJacobian(lambda x: x @ stack[block].T, torch.zeros(1, stack.shape[2]).double())


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_has_the_results_that_it_has_alone(block):
    """One converges in a few steps, the other needs all: each is read where it converged."""
    together, stack = with_spectrum(GEOMETRIC, FLAT)
    alone = part_of(stack, block)
    rows = slice(block, block + 1)
    start = torch.randn(2, 24, generator=generator(1), dtype=torch.float64)
    rhs = torch.randn(2, 40, generator=generator(2), dtype=torch.float64)
    for whole, single in (
        (
            largest_eigenvalue(together, start, 1e-2).estimate,
            largest_eigenvalue(alone, start[rows], 1e-2).estimate,
        ),
        (
            smallest_eigenvalue(together, [generator(0), generator(1)], 1e-1).estimate,
            smallest_eigenvalue(alone, [generator(block)], 1e-1).estimate,
        ),
        (
            spectral_sum(together, lambda x, top: x / top, [generator(0), generator(1)]).estimate,
            spectral_sum(alone, lambda x, top: x / top, [generator(block)]).estimate,
        ),
    ):
        torch.testing.assert_close(whole.value[rows], single.value, rtol=1e-9, atol=0)
        assert bool(whole.converged[block]) == bool(single.converged)
    whole = solve_damped(together, rhs, (1e-1, 1e-2), 1e-2)
    single = solve_damped(alone, rhs[rows], (1e-1, 1e-2), 1e-2)
    for field in ("norms", "lower_bounds", "solutions", "residual"):
        found, expected = getattr(whole, field)[rows], getattr(single, field)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_an_answer_does_not_depend_on_earlier_questions():
    operator, _ = with_spectrum(GEOMETRIC, FLAT)
    start = random_start(operator, generator())
    asked = LargestEigenvalue(operator, start)
    for tolerance, limit in ((1e-1, 20), (1e-9, 3), (1e-6, 24), (1e-1, 20), (0.0, 5)):
        first = operator.products
        found = asked(tolerance, limit)
        assert found.estimate.products == operator.products - first
        fresh = largest_eigenvalue(operator, start, tolerance, limit)
        torch.testing.assert_close(found.estimate.value, fresh.estimate.value, rtol=0, atol=0)
        torch.testing.assert_close(found.vectors, fresh.vectors, rtol=0, atol=1e-12)
        assert torch.equal(found.estimate.converged, fresh.estimate.converged)
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        asked(1e-2, 0)


def test_a_step_beyond_the_budget_leaves_the_process_as_it_was():
    operator, dense = with_spectrum(GEOMETRIC)
    limited = FunctionJacobian(lambda x: x @ dense[0].T, operator.point, Meter(Budget(7)))
    process = Lanczos(limited, random_start(operator, generator()))
    with pytest.raises(BudgetExhausted):
        for _ in range(9):
            process.step()
    assert process.num_steps == 3 and process.basis.shape[1] == 3


def test_smallest_eigenvalue_where_it_is_resolvable():
    operator, _ = with_spectrum(GEOMETRIC)
    found = smallest_eigenvalue(operator, generator()).estimate
    assert bool(found.converged.all())
    assert abs(float(found.value) / GEOMETRIC[-1] - 1) < 1e-2


def test_an_unresolved_smallest_eigenvalue_is_an_upper_bound_and_no_number():
    # A cluster far below hides behind a well-separated spectrum; 30 steps cannot reach it.
    spectrum = [1.0 / (k + 1) for k in range(150)] + [1e-9] * 2
    operator, _ = with_spectrum(spectrum, rows=200)
    found = smallest_eigenvalue(operator, generator(), max_steps=30).estimate
    assert not bool(found.converged.any())
    assert float(found.value) >= 1e-9


def test_dense_routes_give_the_whole_spectrum():
    operator, _ = with_spectrum(GEOMETRIC, FLAT)
    expected = torch.tensor([GEOMETRIC, sorted(FLAT, reverse=True)], dtype=torch.float64)
    torch.testing.assert_close(dense_spectrum(operator), expected)
    torch.testing.assert_close(gram_spectrum(operator), expected, rtol=1e-6, atol=1e-12)


def test_gram_route_refuses_float32():
    operator, _ = with_spectrum(FLAT, dtype=torch.float32)
    with pytest.raises(ValueError, match="float64"):
        gram_spectrum(operator)


def test_dense_svd_resolves_what_a_gram_matrix_cannot():
    spectrum = [10.0**-k for k in range(18)]
    operator, _ = with_spectrum(spectrum)
    found = choose_smallest_eigenvalue(operator, generator(), tolerance=1e-4)
    assert found.method == "dense SVD in float64" and bool(found.converged.all())
    assert abs(float(found.value) / 1e-17 - 1) < 1e-4


@pytest.mark.parametrize(
    ("memory", "limit", "method"),
    [
        (2**30, 10, "dense SVD"),
        (4_000, 10, "Lanczos; too little memory"),
        (2**30, 10**6, "dense SVD"),
    ],
)
def test_the_chooser_says_what_it_picked(memory, limit, method):
    spectrum = [10.0 ** (-12 * k / 40) for k in range(40)]
    operator, _ = with_spectrum(spectrum)
    found = choose_smallest_eigenvalue(
        operator, generator(), max_steps=min(limit, 300), memory_bytes=memory
    )
    assert found.method.startswith(method)
    assert bool(found.converged.all()) == method.startswith("dense")
    if not bool(found.converged.all()):
        assert float(found.value) >= spectrum[-1]


def test_the_chooser_falls_back_on_the_gram_matrix_where_the_dense_one_does_not_fit():
    spectrum = [10.0 ** (-9 * k / 40) for k in range(40)]
    operator, _ = with_spectrum(spectrum, rows=4000)
    found = choose_smallest_eigenvalue(operator, generator(), max_steps=10, memory_bytes=100_000)
    assert found.method == "dense Gram matrix in float64" and bool(found.converged.all())
    assert abs(float(found.value) / spectrum[-1] - 1) < 1e-2


def test_a_rank_deficient_operator_has_no_smallest_number():
    operator, _ = with_spectrum([*FLAT[:10], 0.0, 0.0])
    found = choose_smallest_eigenvalue(operator, generator())
    assert not bool(found.converged.any())
    assert float(found.value) < 1e-20


def damped_reference(dense, rhs, damping):
    n = dense.shape[2]
    gram = dense.transpose(1, 2) @ dense + damping[:, None, None] * torch.eye(n).double()
    projected = (dense.transpose(1, 2) @ rhs[..., None])[..., 0]
    return torch.linalg.solve(gram, projected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lsqr_solves_for_several_dampings_at_once(dtype):
    operator, dense = with_spectrum(GEOMETRIC, FLAT, dtype=dtype)
    rhs = torch.randn(2, 40, generator=generator(3), dtype=torch.float64)
    solved = solve_damped(operator, rhs.to(dtype), (1e-1, 1e-3), tolerance=1e-8)
    assert bool(solved.converged.all())
    tops = torch.tensor([1.0, max(FLAT)]).double()
    for index, relative in enumerate((1e-1, 1e-3)):
        expected = damped_reference(dense, rhs, relative * tops)
        torch.testing.assert_close(
            solved.solutions[:, index].double(), expected, rtol=1e-3, atol=1e-3
        )
        torch.testing.assert_close(solved.norms[:, index], expected.norm(dim=1), rtol=1e-4, atol=0)


def test_unconverged_lsqr_is_a_lower_bound_and_says_so():
    operator, dense = with_spectrum([1.0 / (k + 1) ** 3 for k in range(100)], rows=120)
    rhs = torch.randn(1, 120, generator=generator(), dtype=torch.float64)
    solved = solve_damped(operator, rhs, (1e-9,), tolerance=1e-6, max_steps=5)
    exact = damped_reference(dense, rhs, torch.tensor([1e-9]).double()).norm()
    assert not bool(solved.converged.any())
    assert float(solved.lower_bounds) < float(exact)
    assert float(solved.lower_bounds) == pytest.approx(float(solved.solutions.norm()))


@pytest.mark.parametrize("damping", [1e-2, 1e-3])
def test_lsqr_extrapolates_the_norm(damping):
    """Nearer than the last iterate at every number of steps but where both are exact."""
    operator, dense = with_spectrum([1.0 / (k + 1) for k in range(100)], rows=120)
    rhs = torch.randn(1, 120, generator=generator(), dtype=torch.float64)
    exact = float(damped_reference(dense, rhs, torch.tensor([damping]).double()).norm())
    given = torch.ones(1).double()
    for steps in (8, 12, 16, 24, 32):
        solved = solve_damped(operator, rhs, (damping,), 0.0, steps, largest=given)
        plain = abs(float(solved.lower_bounds) / exact - 1)
        assert abs(float(solved.norms) / exact - 1) < max(0.7 * plain, 1e-6)


def test_long_gradients_in_single_precision_keep_their_digits():
    # As of a network of 8 million parameters, only a small part of δ being in J's range.
    scales = torch.tensor([[1.0], [0.5], [0.2]])
    operator = FunctionJacobian(
        lambda x: (x[:, :, None] * scales).expand(1, 3, 2_700_000).flatten(1), torch.zeros(1, 3)
    )
    delta = torch.randn(1, 8_100_000, generator=generator())
    sums = delta.double().view(3, -1).sum(1)
    diagonal = scales[:, 0].double()
    eigenvalues = 2_700_000 * diagonal**2
    exact = (diagonal * sums / (eigenvalues + 0.01 * eigenvalues[0])).norm()
    found = solve_damped(operator, delta, (0.01,), 1e-6, 3).norms
    assert float(found) == pytest.approx(float(exact), rel=1e-5)
    angular = AngularJacobian(operator, delta)
    image = angular.matvec(torch.eye(3)[:1]).double()
    direction = delta.double() / delta.double().norm()
    along = direction[0, :2_700_000].sum()
    expected = (2_700_000 - along**2).sqrt() / delta.double().norm()
    assert float(image.norm()) == pytest.approx(float(expected), rel=1e-5)


def test_lsqr_of_zero_is_zero():
    operator, _ = with_spectrum(FLAT)
    solved = solve_damped(operator, torch.zeros(1, 40).double(), (1e-3,))
    assert float(solved.norms) == 0 and bool(solved.converged.all())


def test_quadrature_estimates_a_trace_with_its_error():
    operator, _ = with_spectrum([1.0 / (k + 1) for k in range(100)], rows=120)
    trace = spectral_sum(operator, lambda x, top: 1 / (x + 1e-2 * top), generator(), 20)
    exact = sum(1 / (1 / (k + 1) + 1e-2) for k in range(100))
    assert abs(float(trace.estimate.value) / exact - 1) < 0.05
    assert abs(float(trace.estimate.value) - exact) < 4 * float(trace.standard_error)
    assert abs(float(trace.largest) - 1) < 1e-3


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=12),
    st.integers(0, 10_000),
)
def test_estimates_bracket_the_spectrum(spectrum, seed):
    operator, _ = with_spectrum(spectrum, seed=seed)
    top = largest_eigenvalue(operator, random_start(operator, generator(seed)), 1e-4).estimate
    assert float(top.value) <= max(spectrum) * (1 + 1e-9)
    low = smallest_eigenvalue(operator, generator(seed)).estimate
    assert float(low.value) >= min(spectrum) * (1 - 1e-6)
    if bool(low.converged.all()):
        assert float(low.value) == pytest.approx(min(spectrum), rel=1e-2)


PLATEAU = [1.0] + [1e-2] * 10 + [10.0 ** (-4 - k / 20) for k in range(60)]


def test_both_rules_bracket_a_sum_at_every_number_of_steps():
    operator, dense = with_spectrum(PLATEAU, rows=80)
    eigenvalues, vectors = torch.linalg.eigh(dense[0].T @ dense[0])
    signs = sign_rows((1, len(PLATEAU)), generator(7)).double()
    measure = (vectors.T @ signs[0]) ** 2
    for damping in (1e-2, 1e-4, 1e-6):
        for order in (0, 1):
            exact = (measure * eigenvalues**order / (eigenvalues + damping) ** 2).sum()
            for steps in (2, 5, 10, 20, 40, 70):
                found = spectral_sum(
                    operator,
                    lambda x, top, damping=damping: 1 / (x + damping) ** 2,
                    generator(7),
                    1,
                    steps,
                    0.0,
                    order,
                )
                assert found.lower <= exact * (1 + 1e-9) and exact <= found.upper * (1 + 1e-9)


@pytest.mark.parametrize("damping", [1e-4, 1e-5])
def test_a_sum_that_rests_on_a_plateau_is_not_finished(damping):
    operator, dense = with_spectrum(PLATEAU, rows=80)
    eigenvalues, vectors = torch.linalg.eigh(dense[0].T @ dense[0])
    signs = sign_rows((1, len(PLATEAU)), generator(7)).double()
    exact = ((vectors.T @ signs[0]) ** 2 * eigenvalues / (eigenvalues + damping) ** 2).sum()

    def function(nodes, top):
        return 1 / (nodes + damping * top) ** 2

    found = spectral_sum(operator, function, generator(7), 1, 70, 0.02, order=1)
    assert bool(found.estimate.converged)
    assert float(found.estimate.value) == pytest.approx(float(exact), rel=0.02)
    stopped = spectral_sum(operator, function, generator(7), 1, 4, 0.02, order=1).estimate
    assert not bool(stopped.converged) and float(stopped.value) <= float(exact)


def test_lsqr_s_error_reaches_to_an_upper_bound():
    operator, dense = with_spectrum(PLATEAU, rows=80)
    rhs = torch.randn(1, 80, generator=generator(2), dtype=torch.float64)
    for damping in (1e-3, 1e-5):
        exact = float(
            damped_reference(dense, rhs, torch.tensor([damping], dtype=torch.float64)).norm()
        )
        for steps in (3, 8, 20, 50):
            solved = solve_damped(operator, rhs, (damping,), 0.0, steps, torch.ones(1).double())
            low, error = float(solved.lower_bounds), float(solved.residual)
            assert low <= exact * (1 + 1e-9) and exact <= low * (1 + error) * (1 + 1e-9)
            assert low * (1 - 1e-9) <= float(solved.norms) <= low * (1 + error) * (1 + 1e-9)


def test_the_sum_of_inverses_is_right_or_a_lower_bound():
    operator, _ = with_spectrum([1.0, 1e-3, 1e-6], [1.0, 1e-3, 1e-30])
    found = inverse_sum(operator)
    assert found.converged.tolist() == [True, False]
    assert float(found.value[0]) == pytest.approx(1e6 + 1e3 + 1, rel=1e-6)
    assert 1e3 < float(found.value[1]) < 1e30
