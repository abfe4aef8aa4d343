import math

import pytest
import torch

from flwr_leakage.models import LeNet, initialize
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec
from simulations.papers.i2f import records
from simulations.papers.i2f.attack import attack_of
from simulations.papers.i2f.directions import right_singular_vectors
from simulations.papers.i2f.influence import Influence
from simulations.papers.i2f.pruning import pruned
from simulations.papers.i2f.records import attack_rows, gaussian

SPEC = InputSpec((1, 12, 12), 10)


@pytest.fixture(scope="module")
def setting():
    """A small LeNet, two images, and J of each as a dense matrix (P, N)."""
    network = LeNet(SPEC.shape, 10, channels=2, num_convolutions=1)
    network = initialize(network, "uniform", make_generator(0)).eval()
    inputs = torch.rand(2, *SPEC.shape, generator=make_generator(1))
    influence = Influence(network, Batch(inputs, torch.tensor([3, 7])))
    return network, Batch(inputs, torch.tensor([3, 7])), influence, influence.operator.to_dense()


def test_influences_equal_those_of_the_dense_jacobian(setting):
    _, _, influence, dense = setting
    deltas = gaussian(influence, (1e-2,), 0, 0)["0.01"]
    found = influence(deltas, (0.1, 1.0), undamped=True)
    for row, matrix in enumerate(dense):
        gram, projected = matrix.T @ matrix, matrix.T @ deltas[row]
        top = torch.linalg.eigvalsh(gram)[-1]
        assert float(found.nominal[row]) == pytest.approx(float(projected.norm()))
        assert float(found.lower_bound[row]) == pytest.approx(float(projected.norm() / top), 1e-2)
        for place, damping in enumerate((0.1, 1.0)):
            eye = damping * torch.eye(len(gram))
            solved = torch.linalg.solve(gram + eye, projected).norm()
            assert float(found.damped[row, place]) == pytest.approx(float(solved), 2e-2)
    assert bool((found.undamped >= found.lower_bound).all())


def test_noise_has_the_variance_that_is_asked_for(setting):
    _, _, influence, _ = setting
    deltas = gaussian(influence, (1e-4, 1e-2), 5, 100)
    assert float(deltas["0.01"].var()) == pytest.approx(1e-2, rel=0.15)
    assert torch.allclose(deltas["0.01"], 10 * deltas["0.0001"])
    assert torch.equal(gaussian(influence, (1e-2,), 5, 100)["0.01"], deltas["0.01"])


def test_right_singular_vectors_are_those_of_the_dense_jacobian(setting):
    _, _, influence, dense = setting
    vectors = right_singular_vectors(influence.operator, 10, make_generator(0))
    for rank in (0, 9):
        found = vectors(rank)
        for row, matrix in enumerate(dense):
            left, values, _ = torch.linalg.svd(matrix, full_matrices=False)
            assert float((left[:, rank] @ found[row]).abs()) == pytest.approx(1, abs=1e-3)
            assert float((matrix.T @ found[row]).norm()) == pytest.approx(float(values[rank]), 1e-3)


def test_pruning_drops_the_smallest_entries_of_each_sample():
    gradients = torch.tensor([[1.0, -2.0, 3.0, -4.0], [4.0, 0.5, 1.0, 2.0]])
    deltas = pruned(gradients, 0.5)
    assert torch.equal(gradients + deltas, torch.tensor([[0, 0, 3.0, -4.0], [4.0, 0, 0, 2.0]]))


def test_a_row_is_of_its_own_image_and_perturbation(setting):
    network, batch, influence, _ = setting
    zero = torch.zeros_like(influence.gradients)
    deltas = {"none": zero, "much": zero + 10.0}
    given = (network, batch, SPEC, influence, deltas, "L-BFGS", 30, 0, 40)
    rows = attack_rows(*given)
    assert [(row["perturbation"], row["image"]) for row in rows] == [
        ("none", 40),
        ("none", 41),
        ("much", 40),
        ("much", 41),
    ]
    assert all(row["label"] == label for row, label in zip(rows, [3, 7] * 2, strict=True))
    assert 3 * max(row["rmse"] for row in rows[:2]) < min(row["rmse"] for row in rows[2:])
    assert rows[0]["root"] == 12 and rows[0]["i_lb"] == 0
    assert all(math.isfinite(row["ssim"]) for row in rows)


def test_an_unknown_attack_is_named():
    with pytest.raises(ValueError, match=r"preset must be one of .*'gauss_newton'.*got 'dgl'"):
        attack_of("dgl", 3)


def test_a_missing_reconstruction_has_no_scores(setting, monkeypatch):
    network, batch, influence, _ = setting
    real = records.inputs_of

    def first_missing(*given):
        inputs = real(*given).clone()
        inputs[0] = torch.nan
        return inputs

    monkeypatch.setattr(records, "inputs_of", first_missing)
    deltas = {"none": torch.zeros_like(influence.gradients)}
    rows = attack_rows(network, batch, SPEC, influence, deltas, "L-BFGS", 1, 0, 40)
    assert rows[0]["ssim"] is None and rows[0]["rmse"] is None
    assert rows[1]["ssim"] is not None and rows[1]["rmse"] is not None
