"""An answer against the truth: numbers, and pictures in the truth's order."""

import torch

from flwr_leakage.audit import Truth
from flwr_leakage.audit.evaluate import evaluate
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import Batch, InputSpec, Reconstruction

SPEC = InputSpec((1, 2, 2), 2, mean=(0.5,), std=(0.5,))
PIXELS = torch.tensor([0.0, 0.25, 1.0]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
PRIVATE = Batch(SPEC.normalize(PIXELS), torch.tensor([0, 1, 0]))
TRUTH = Truth(PRIVATE, PRIVATE)


def _shown(outcome):
    return [(p.sample, p.role, round(float(p.pixels.mean()), 3)) for p in outcome.pictures]


def test_originals_stand_beside_what_was_matched_to_them():
    answer = Reconstruction(PRIVATE[[2, 0]], 0.0)
    outcome = evaluate(answer, TRUTH, Evaluator(), SPEC)
    assert _shown(outcome) == [
        (0, "original", 0.0),
        (0, "reconstruction", 0.0),
        (1, "original", 0.25),
        (2, "original", 1.0),
        (2, "reconstruction", 1.0),
    ]
    mse = next(m for m in outcome.measurements if m.name == "mse")
    assert mse.values == (0.0, None, 0.0)


def test_without_a_truth_reconstructions_are_shown_in_the_attackers_order():
    answer = Reconstruction(PRIVATE[[2, 0]], 0.0)
    for outcome in (evaluate(answer, None, Evaluator(), SPEC), evaluate(answer, TRUTH, None, SPEC)):
        assert _shown(outcome) == [(0, "reconstruction", 1.0), (1, "reconstruction", 0.0)]
        assert outcome.measurements == ()


def test_no_answer_shows_nothing_of_its_own():
    nothing = Reconstruction(None, float("nan"), error="no")
    assert _shown(evaluate(nothing, None, None, SPEC)) == []
    roles = {role for _, role, _ in _shown(evaluate(nothing, TRUTH, Evaluator(), SPEC))}
    assert roles == {"original"}
