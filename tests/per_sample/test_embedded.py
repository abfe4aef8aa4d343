"""Scores of texts, in the embeddings of their tokens."""

import pytest
import texts
import torch
from torch import nn

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch
from flwr_leakage.scores import GradientNorm, InfluenceLowerBound, LambdaMax, score


def test_embeddings_give_the_logits_and_the_gradient_of_their_tokens():
    model, _, _, batch = texts.case(3, 8, seed=100, shortest=4)
    gradient_map = GradientMap(model)
    params = gradient_map.params
    embedded = Batch(model.embed(params, batch.inputs), batch.targets)
    assert torch.allclose(model(embedded.inputs), model(batch.inputs), atol=1e-6)
    by_ids, by_vectors = gradient_map(params, batch), gradient_map(params, embedded)
    assert not by_vectors.pop("tokens.weight").any() and by_ids.pop("tokens.weight").any()
    for name, value in by_vectors.items():
        assert torch.allclose(value, by_ids[name], atol=1e-6), name


def test_lambda_max_is_that_of_the_dense_jacobian():
    model, _, _, batch = texts.case(2, 6, seed=101, width=8, depth=1, heads=2)
    found = score(model, batch.inputs, batch.targets, {"a": LambdaMax(tolerance=1e-4)})["a"]
    gradient_map = GradientMap(model.double())
    params = gradient_map.params
    vectors = model.embed(params, batch.inputs)

    def flat(x, targets):
        gradient = gradient_map(params, Batch(x, targets))
        return torch.cat([value.flatten() for value in gradient.values()])

    for sample in range(2):
        targets = batch.targets[[sample]]
        dense = torch.func.jacfwd(lambda x: flat(x, targets))(vectors[[sample]])  # noqa: B023
        largest = torch.linalg.matrix_norm(dense.flatten(1), 2) ** 2
        assert found.values[sample] == pytest.approx(float(largest), rel=1e-3)


def test_the_influence_and_its_bound_are_numbers():
    model, _, _, batch = texts.case(2, 6, seed=102, width=16, depth=1)
    scores = {"norm": GradientNorm(), "bound": InfluenceLowerBound()}
    found = score(model, batch.inputs, batch.targets, scores, noise_std=1e-3)
    assert all(value and value > 0 for each in found.values() for value in each.values)


def test_a_model_that_takes_no_embeddings_says_so():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 2))
    ids = torch.tensor([[1, 2, 3]])
    found = score(model, ids, torch.tensor([1]), {"norm": GradientNorm()})["norm"]
    assert "a model does that itself if it has a method embed(params, ids)" in found.error
