import pytest
import torch
from torch.func import grad_and_value, vmap

from flwr_leakage.attacks import LBFGS, Adam
from flwr_leakage.attacks.optimizers.base import FirstValues


def quadratics(rows, size, condition):
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(rows, size, size, generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(factors)
    spectrum = torch.logspace(0, torch.tensor(condition).log10().item(), size, dtype=torch.float64)
    matrices = q @ torch.diag(spectrum) @ q.transpose(1, 2)
    minima = torch.randn(rows, size, generator=generator, dtype=torch.float64)

    def value(point, matrix, minimum):
        return 0.5 * (point - minimum) @ matrix @ (point - minimum)

    def evaluate(points, chosen):
        gradients, values = vmap(grad_and_value(value))(points, matrices[chosen], minima[chosen])
        return values, gradients

    return evaluate, minima


def rosenbrocks(rows):
    offsets = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)

    def value(point, offset):
        return (offset - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2

    def evaluate(points, chosen):
        gradients, values = vmap(grad_and_value(value))(points, offsets[chosen])
        return values, gradients

    return evaluate, torch.stack([offsets, offsets**2], dim=1)


def test_lbfgs_finds_the_minima_of_ill_conditioned_quadratics():
    evaluate, minima = quadratics(rows=5, size=12, condition=1e4)
    found = LBFGS(iterations=200, tolerance=1e-18)(evaluate, torch.zeros_like(minima))
    torch.testing.assert_close(found.points, minima, atol=1e-6, rtol=0)


def test_lbfgs_climbs_out_of_rosenbrocks_valley_and_drops_finished_rows():
    evaluate, minima = rosenbrocks(4)
    asked = []

    def counting(points, rows):
        asked.append(len(rows))
        return evaluate(points, rows)

    start = torch.tensor([[-1.2, 1.0]], dtype=torch.float64).repeat(4, 1)
    found = LBFGS(iterations=200, tolerance=1e-20)(counting, start)
    torch.testing.assert_close(found.points, minima, atol=1e-8, rtol=0)
    assert asked == sorted(asked, reverse=True)
    assert sum(asked) == int(found.evaluations.sum())
    assert len(set(found.evaluations.tolist())) > 1  # rows finish on their own


def test_lbfgs_accepts_only_steps_that_descend():
    evaluate, _ = rosenbrocks(3)
    best = []
    LBFGS(iterations=60)(
        evaluate,
        torch.tensor([[-1.2, 1.0]], dtype=torch.float64).repeat(3, 1),
        report=lambda iteration, values: best.append(values.clone()),
    )
    assert bool((torch.stack(best).diff(dim=0) <= 0).all())


@pytest.mark.parametrize(
    "optimizer",
    [
        LBFGS(iterations=30),
        Adam(iterations=40),
        Adam(iterations=40, sign="soft", decay="cosine"),
    ],
)
def test_rows_do_not_touch_each_other(optimizer):
    evaluate, _ = rosenbrocks(3)
    start = torch.tensor([[-1.2, 1.0], [0.0, 0.0], [2.0, -1.0]], dtype=torch.float64)
    together = optimizer(evaluate, start)
    for row in range(3):
        alone = optimizer(
            lambda points, rows, row=row: evaluate(points, rows + row), start[row : row + 1]
        )
        torch.testing.assert_close(together.points[row], alone.points[0])
        assert together.evaluations[row] == alone.evaluations[0]


def test_lbfgs_stops_at_a_wall_of_nan_without_losing_its_best_point():
    def evaluate(points, rows):
        values = 10 + points[:, 0]
        gradients = torch.zeros_like(points)
        gradients[:, 0] = 1.0
        return torch.where(values < 9.0, torch.nan, values), gradients

    found = LBFGS(iterations=50)(evaluate, torch.zeros(2, 3, dtype=torch.float64))
    assert bool(torch.isfinite(found.values).all())
    assert bool((found.values <= 9.2).all())


def test_a_start_without_a_finite_value_is_reported_as_such():
    def evaluate(points, rows):
        return points.sum(dim=1) * torch.nan, points * torch.nan

    for optimizer in (LBFGS(iterations=3), Adam(iterations=3)):
        assert torch.isinf(optimizer(evaluate, torch.ones(2, 3)).values).all()


def test_adam_matches_torch_adam():
    evaluate, minima = quadratics(rows=1, size=6, condition=10)
    rows = torch.zeros(1, dtype=torch.int64)
    point = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.Adam([point], lr=0.05)
    for _ in range(25):
        point.grad = evaluate(point.detach(), rows)[1]
        reference.step()
    found = Adam(iterations=25, learning_rate=0.05)(evaluate, torch.zeros_like(minima))
    torch.testing.assert_close(found.points, point.detach())


def test_adam_decays_and_projects():
    adam = Adam(iterations=8, learning_rate=1.0, decay="step")
    rates = [adam.rate(step) for step in range(8)]
    assert rates == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])
    assert Adam(iterations=8, decay="cosine").rate(8) == pytest.approx(0)
    evaluate, minima = quadratics(rows=2, size=3, condition=1.0)
    found = Adam(iterations=200, sign="hard", decay="step")(
        evaluate, torch.zeros_like(minima), lambda points: points.clamp(-0.1, 0.1)
    )
    torch.testing.assert_close(found.points, minima.clamp(-0.1, 0.1), atol=2e-3, rtol=0)


def test_first_values_are_those_of_the_start():
    evaluate, minima = quadratics(rows=3, size=4, condition=10)
    first = FirstValues(evaluate, 3)
    start = torch.zeros_like(minima)
    found = LBFGS(iterations=20)(first, start)
    assert first.values == evaluate(start, torch.arange(3))[0].tolist()
    assert all(value > float(best) for value, best in zip(first.values, found.values, strict=True))


def test_settings_are_checked(unchecked):
    with pytest.raises(ValueError, match="learning_rate"):
        Adam(learning_rate=0.0)
    with pytest.raises(ValueError, match="iterations"):
        Adam(iterations=0)
    with pytest.raises(ValueError, match="history"):
        LBFGS(history=0)
