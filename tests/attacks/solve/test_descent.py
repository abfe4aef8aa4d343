"""The loop and its two searches, on objectives whose minima are known."""

import pytest
import torch

from flwr_leakage.attacks.solve.descent import Damping, Posed, Shortening, descend

GOAL = torch.tensor([3.0, -1.0]).double()
CURVATURE = torch.tensor([1.0, 4.0]).double()


def bowl(steps, stretch=1.0, value=lambda point: float((CURVATURE * (point - GOAL) ** 2).sum())):
    """Poses steps that are too long by a factor, and counts the points that were tried."""
    tried = []

    def cost(point):
        tried.append(point)
        return value(point)

    def pose(at):
        if at.steps == steps:
            return None
        slope = CURVATURE * (at.point - GOAL)

        def solve(damping):
            return -stretch * slope / (CURVATURE * (1 + damping)), 7

        return Posed(at.point, value(at.point), slope, solve, cost)

    return pose, tried


@pytest.mark.parametrize("search", [Shortening(), Damping(1e-6)])
def test_a_step_on_a_quadratic_ends_in_its_minimum(search):
    pose, _ = bowl(1)
    end = descend(pose, torch.zeros(2).double(), search)
    torch.testing.assert_close(end.point, GOAL, atol=1e-4, rtol=0)
    assert (end.steps, end.iterations, end.length) == (1, 7, 1.0)
    assert end.fall == pytest.approx(13.0)


def test_a_step_is_as_short_as_it_must_be_or_the_best_of_its_lengths():
    start = torch.zeros(2).double()
    pose, tried = bowl(1, stretch=4.0)  # lengths 4, 1.6, 0.64, 0.256 of the way
    first = descend(pose, start, Shortening(4, 0.4))
    assert (first.length, len(tried)) == (0.4, 2)
    pose, tried = bowl(1, stretch=4.0)
    best = descend(pose, start, Shortening(4, 0.4, is_best=True))
    assert (best.length, len(tried)) == (pytest.approx(0.16), 4)
    assert best.value < first.value


@pytest.mark.parametrize("search", [Shortening(trials=3), Damping(trials=3)])
def test_where_nothing_is_lower_the_point_stays(search):
    pose, tried = bowl(1, value=lambda point: -float(point.sum() == 0))
    end = descend(pose, torch.zeros(2).double(), search)
    assert torch.equal(end.point, torch.zeros(2).double())
    assert not end.has_moved
    assert len(tried) == 3


def test_damping_falls_while_steps_keep_their_promise_and_grows_where_they_do_not():
    pose, _ = bowl(2)
    assert descend(pose, torch.zeros(2).double(), Damping(1e-3)).damping == pytest.approx(1e-5)
    pose, tried = bowl(1, stretch=4.0)
    end = descend(pose, torch.zeros(2).double(), Damping(0.1))
    assert end.has_moved
    assert len(tried) > 1
