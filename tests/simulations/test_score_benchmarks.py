"""What the tables of the scores stand on: references that agree, and honest comparisons."""

from dataclasses import replace

import pytest
import torch

from flwr_leakage.records import Batch
from simulations.benchmarks import scores_budget, scores_procedures
from simulations.benchmarks.scores_procedures import (
    Entry,
    Found,
    estimate,
    find_references,
    ours,
    run_to,
    theirs,
)
from simulations.benchmarks.scores_setup import operator_of
from simulations.benchmarks.scores_sizes import compare_smallest

DIGITS = Entry("LeNet", 28, 2, dense=2, dampings=(1e-2,), descent=300)


@pytest.fixture(scope="module")
def references():
    return find_references(DIGITS, None)


def test_dense_and_krylov_references_agree(references):
    found = find_references(replace(DIGITS, dense=0), None)
    assert found.pop("λmin") == ()
    for quantity, values in found.items():
        assert values == pytest.approx(references[quantity], rel=1e-6)


@pytest.mark.parametrize("quantity", ["λmax", "ang_max", 1e-2])
def test_ours_takes_the_batch_and_theirs_its_first_sample(quantity, references):
    exact = references[quantity]
    mine = ours(DIGITS, None, quantity)
    rival = theirs(DIGITS, None, quantity, quantity == "λmax", references["λmax"])
    assert (len(mine.values), len(rival.values)) == (2, 1)
    assert mine.error(exact) < 1e-3
    assert rival.error(exact) < 2e-2
    assert rival.complete == (quantity != 1e-2)


def test_a_shortened_procedure_counts_and_tells_its_full_length(references):
    rival = theirs(DIGITS, None, 1e-2, False, references["λmax"])
    assert rival.products == 4001
    assert "300 of 2,000 steps" in rival.procedure


@pytest.mark.parametrize("start", ["Jg", "last layer"])
def test_the_run_to_an_error_is_the_cheapest(start, references):
    exact = references["λmax"]
    found = run_to(DIGITS, None, "λmax", 1e-4, exact, start)
    operator = operator_of(*DIGITS.prepare(None), torch.float32)
    steps = (found.products - 1) // 2
    assert estimate(operator, "λmax", start, steps).error(exact) <= 1e-4
    assert estimate(operator, "λmax", start, steps - 1).error(exact) > 1e-4
    assert (found.shares > 0) == (start == "last layer")


def test_an_error_below_rounding_is_never_reached(references, monkeypatch):
    monkeypatch.setattr(scores_procedures, "MOST_STEPS", 16)
    assert run_to(DIGITS, None, "λmax", 0.0, references["λmax"]) is None


def test_errors_are_the_worst_of_the_samples_with_a_reference():
    assert Found("", (1.0, 2.2, 9.0), 1, 0.0).error((1.0, 2.0)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("theirs_found", "told"),
    [
        (-1.0, "no reference; negative"),
        (1.0, "no reference"),
        (6.0, "no reference; ≥ 3 × the value"),
    ],
)
def test_without_a_reference_only_what_our_bound_proves_is_told(theirs_found, told):
    rival = Found("", (theirs_found,), 4000, 0.0)
    assert compare_smallest(rival, Found("", (2.0,), 200, 0.0, complete=False), ()) == (told, None)


def test_products_are_compared_only_where_ours_is_nearer():
    rival = Found("", (1.1,), 4000, 0.0)
    right = Found("", (1.0,), 784, 0.0)
    assert compare_smallest(rival, right, (1.0,)) == ("1.1 × the value", right)
    assert compare_smallest(rival, replace(right, values=(2.0,)), (1.0,))[1] is None
    assert compare_smallest(rival, replace(right, complete=False), (1.0,))[1] is None


def test_a_client_of_the_budget_table_pays_in_advance_and_saves():
    draw = torch.Generator().manual_seed(0)
    data = Batch(torch.randn(6, 3, 32, 32, generator=draw), torch.arange(6))
    client = scores_budget.Client("LeNet", data)
    client.run(scores_budget.PLANS["counted"], 2)
    assert [len(scores_budget.scored(note)) for note in client.notes] == [1, 0]
    assert not torch.equal(client.states[0]["fc.weight"], client.states[1]["fc.weight"])
    cells = scores_budget.reach(client, [0])
    assert cells[0].endswith("×") and " of 1, ranking " in cells[1]
