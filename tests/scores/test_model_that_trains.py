"""The model that is scored is the model that trains, or the caller is told."""

import copy

import numpy as np
import pytest
import torch
from layers import (
    Assigning,
    Attention,
    Branching,
    OldStyle,
    OnceDifferentiable,
    Recurrent,
    with_activation,
)
from scored import small_network
from torch import nn
from torch.nn import functional as F

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.scores import GradientNorm, InversionInfluence, LambdaMax, Lipschitz, score
from flwr_leakage.scores.one_call import ScoreWarning

SCORES = {
    "norm": GradientNorm(precision="float64"),
    "lambda_max": LambdaMax(1e-6, precision="float64"),
}
INFLUENCE = {"i2f": InversionInfluence((1e-2,), 1e-6, precision="float64")}


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    return torch.rand(3, 1, 6, 6, generator=generator), torch.tensor([0, 3, 1])


def norms(network, inputs, targets, parameters, loss=F.cross_entropy):
    """‖g‖ of each sample by autograd."""
    found = []
    for x, y in zip(inputs, targets, strict=True):
        parts = torch.autograd.grad(loss(network(x[None]), y[None]), parameters)
        found.append(float(torch.cat([part.reshape(-1) for part in parts]).norm()))
    return found


def test_batch_norm_is_scored_in_the_mode_that_the_model_is_in(data):
    network = small_network(batch_norm=True)
    training = score(network.train(), *data, SCORES)
    given = score(network, *data, SCORES, batch_norm="batch")
    resting = score(network.eval(), *data, SCORES)
    assert training["lambda_max"].values == given["lambda_max"].values
    assert training["lambda_max"].values != resting["lambda_max"].values
    assert "statistics of its whole batch" in training.notes[0] and not resting.notes
    network[1].train()
    network = nn.Sequential(network, nn.Unflatten(1, (4, 1)), nn.BatchNorm1d(4).eval())
    with pytest.raises(ValueError, match="1 of 2 in train mode"):
        score(network, *data, SCORES)


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_in_train_mode_is_told_beside_every_number(data, functional):
    class Dropping(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5, self.training)

    drop = Dropping() if functional else nn.Dropout(0.5)
    network = nn.Sequential(small_network()[:3], drop, nn.Linear(27, 4)).train()
    state = torch.get_rng_state()
    with pytest.warns(ScoreWarning, match="draws random numbers while it trains"):
        found = score(network, *data, SCORES)
    assert torch.equal(state, torch.get_rng_state())
    for result in found.values():
        assert None not in result.values
        assert all("were switched off" in note for note in result.notes)
    assert "were switched off" in str(found).splitlines()[0]
    resting = score(network.eval(), *data, SCORES)
    assert not resting["norm"].notes and resting["norm"].values == found["norm"].values


def test_another_function_in_train_mode_is_told(data):
    class Scaled(nn.Module):
        def forward(self, x):
            return 2 * x if self.training else x

    network = nn.Sequential(small_network(), Scaled()).train()
    with pytest.warns(ScoreWarning, match="something else in train mode"):
        score(network, *data, SCORES)


def test_a_plain_model_in_train_mode_warns_of_nothing(data, recwarn):
    found = score(small_network().train(), *data, SCORES)
    assert not found.notes and not [w for w in recwarn if w.category is ScoreWarning]


def test_frozen_parameters_do_not_count(data):
    network = small_network().double()
    network[0].requires_grad_(False)
    found = score(network, *data, SCORES)
    expected = norms(network, data[0].double(), data[1], list(network[3].parameters()))
    assert found["norm"].values == pytest.approx(expected, rel=1e-9)
    whole = small_network().double()
    listed = score(whole, *data, SCORES, trained=whole[3].parameters())
    for name, result in found.items():
        assert listed[name].values == pytest.approx(result.values, rel=1e-12)
        assert score(whole, *data, SCORES)[name].values != listed[name].values
    with pytest.raises(ValueError, match="got 2 that are not"):
        score(whole, *data, SCORES, trained=network[3].parameters())
    with pytest.raises(ValueError, match="must have a parameter that is trained"):
        score(network.requires_grad_(False), *data, SCORES)


def test_noise_on_what_is_frozen_hides_nothing(data):
    network = small_network()
    network[0].requires_grad_(False)
    change = {name: torch.zeros_like(value) for name, value in network.named_parameters()}
    change["0.weight"] += 1.0
    found = score(network, *data, INFLUENCE, perturbation=change)["i2f"]
    assert all("δ = 0" in note for note in found.notes)


def test_tied_parameters_count_once_and_with_both_uses(data):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(36, 36), nn.Linear(36, 36)
            self.second.weight = self.first.weight
            self.last = nn.Linear(36, 4)

        def forward(self, x):
            hidden = self.second(self.first(x.flatten(1)).sigmoid()).sigmoid()
            return self.last(hidden)

    network = Tied().double()
    found = score(network, *data, {"norm": SCORES["norm"]})["norm"]
    expected = norms(network, data[0].double(), data[1], list(network.parameters()))
    assert found.values == pytest.approx(expected, rel=1e-9)
    network.first.weight.requires_grad_(False)
    found = score(network, *data, {"norm": SCORES["norm"]})["norm"]
    rest = [value for value in network.parameters() if value.requires_grad]
    assert found.values == pytest.approx(norms(network, data[0].double(), data[1], rest), rel=1e-9)


LOSSES = {
    "mean": (F.cross_entropy, [1 / 3] * 3),
    "module": (nn.CrossEntropyLoss(label_smoothing=0.1), [1 / 3] * 3),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), [1.0] * 3),
    "half of the sum": (lambda z, y: F.cross_entropy(z, y, reduction="sum") / 2, [1.0] * 3),
    "class weights": (nn.CrossEntropyLoss(torch.tensor([1.0, 2, 1, 5])), [1 / 8, 5 / 8, 2 / 8]),
    "squares": (lambda z, y: ((z - F.one_hot(y, 4)) ** 2).mean(), [1 / 3] * 3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_samples_share_of_noise_follows_the_losss_own_reduction(data, name):
    loss, weights = LOSSES[name]
    found = score(small_network(), *data, INFLUENCE, loss=loss, noise_std=1e-3)
    for index, weight in enumerate(weights):
        x, y = data[0][index : index + 1], data[1][index : index + 1]
        # The same noise on the gradient of this sample alone, as the seed draws it.
        alone = score(small_network(), x, y, INFLUENCE, loss=loss, noise_std=1e-3 / weight)
        factor = 0.5 if name == "half of the sum" else 1.0
        assert found["i2f"].values[index] == pytest.approx(
            alone["i2f"].values[0] / factor * factor**2 / factor, rel=1e-3
        )
    assert "its weight in the update" in found.notes[0]
    if len(set(weights)) == 1:
        assert f"w = {weights[0]:.4g} " in found.notes[0]


def test_losses_that_are_none_of_samples_are_refused(data):
    with pytest.raises(ValueError, match=r"scalar tensor, got shape \(3,\).*reduction='mean'"):
        score(small_network(), *data, loss=nn.CrossEntropyLoss(reduction="none"))

    def coupled(logits, targets):
        return F.cross_entropy(logits - logits.mean(0), targets)

    found = score(small_network(), *data, {"norm": GradientNorm()}, loss=coupled)
    assert "couples them" in found["norm"].error


def test_a_wrong_second_derivative_is_an_error_where_it_matters_only(data):
    scores = {**SCORES, "lipschitz": Lipschitz(num_draws=2)}
    found = score(with_activation(OnceDifferentiable.apply), *data, scores)
    right = score(with_activation(torch.sigmoid), *data, scores)
    assert "not that of its gradient" in found["lambda_max"].error
    assert found["lambda_max"].values == (None,) * 3
    for name in ("norm", "lipschitz"):
        assert found[name].values == pytest.approx(right[name].values, rel=1e-6)


@pytest.mark.parametrize("kind", ["scaled_dot_product", "multihead", "encoder"])
def test_attention_is_scored(data, kind):
    network = Attention(kind).double().eval()
    found = score(network, *data, SCORES)
    parameters = [value for name, value in network.named_parameters() if used(kind, name)]
    expected = norms(network, data[0].double(), data[1], parameters)
    assert found["norm"].values == pytest.approx(expected, rel=1e-9)
    assert found["lambda_max"].values == pytest.approx(largest(network, data), rel=1e-4)
    assert not found.notes


def used(kind, name):
    part = {"scaled_dot_product": "project", "multihead": "heads", "encoder": "encoder"}[kind]
    return name.startswith((part, "last"))


def largest(network, data):
    """λmax of each sample's dense J, from differences of autograd's gradients."""
    step, units = 1e-5, torch.eye(36, dtype=torch.float64)
    found = []
    for x, y in zip(*data, strict=True):

        def gradient(flat, y=y):
            loss = F.cross_entropy(network(flat.reshape(1, 1, 6, 6)), y[None])
            parts = torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)
            return torch.cat([part.reshape(-1) for part in parts])

        flat = x.double().flatten()
        rows = [gradient(flat + step * u) - gradient(flat - step * u) for u in units]
        found.append(float(torch.linalg.matrix_norm(torch.stack(rows) / (2 * step), 2)) ** 2)
    return found


@pytest.mark.parametrize(
    "network",
    [
        lambda: Recurrent(nn.GRU),
        lambda: Recurrent(nn.LSTM),
        Branching,
        Assigning,
        lambda: with_activation(OldStyle.apply),
    ],
    ids=["GRU", "LSTM", "branch", "assign", "old function"],
)
def test_what_vmap_refuses_is_scored_one_by_one_and_told(data, network):
    network = network().double().eval()
    found = score(network, *data, SCORES, noise_std=1e-3)
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        expected = largest(network, data)
        gradients = norms(network, data[0].double(), data[1], list(network.parameters()))
    assert found["norm"].values == pytest.approx(gradients, rel=1e-9)
    assert found["lambda_max"].values == pytest.approx(expected, rel=1e-4)
    assert any("one by one, which is slower" in note for note in found.notes)


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.network, self.wrap = small_network(), wrap

    def forward(self, x):
        return self.wrap(self.network(x))


class ModelOutput(dict):
    """As of transformers: a dictionary with attributes."""

    def __getattr__(self, name):
        return self[name]


def test_outputs_with_logits_are_taken(data):
    plain = score(small_network(), *data, SCORES)
    for wrap in (
        lambda z: (z,),
        lambda z: {"logits": z, "hidden": 2 * z},
        lambda z: ModelOutput(logits=z, hidden=2 * z),
        lambda z: {"out": z},
    ):
        assert score(Wrapped(wrap), *data, SCORES)["norm"].values == plain["norm"].values
    with pytest.raises(ValueError, match=r"logits \(B, K\).*got a tuple of .*; wrap it"):
        score(Wrapped(lambda z: (z, 2 * z)), *data, SCORES)


def test_arrays_and_lists_are_taken(data):
    inputs, targets = data
    plain = score(small_network(), *data, SCORES)["lambda_max"].values
    for x, y in (
        (inputs.numpy(), targets.numpy()),
        (inputs.numpy().astype(np.float64), targets.numpy().astype(np.int32)),
        (inputs.tolist(), targets.tolist()),
        (list(inputs), list(targets)),
        ([image.numpy() for image in inputs], tuple(targets.tolist())),
        (inputs.double(), targets.to(torch.uint8)),
    ):
        found = score(small_network(), x, y, SCORES)["lambda_max"].values
        assert found == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"pixels": torch.ones(3, 1, 6, 6)}, "inputs must be a tensor.* got a dict.*embeddings"),
        ("images", "inputs must be a tensor.* got a str"),
        (None, "inputs must be a tensor.* got None"),
        ([torch.ones(1, 6, 6), torch.ones(1, 5, 5)], "inputs must be a tensor.* got a list"),
        ([[1.0, 2.0], [3.0]], "inputs must be a tensor.* got a list"),
        ([["a"]], "inputs must be a tensor.* got a list"),
    ],
)
def test_other_inputs_are_refused_in_words(inputs, text):
    with pytest.raises(ValueError, match=text):
        score(small_network(), inputs, [0, 3, 1])


def test_nothing_of_the_model_or_of_torch_changes(data):
    network = Attention("encoder").train()
    before = copy.deepcopy(network.state_dict())
    fast = torch.backends.mha.get_fastpath_enabled()
    score(network, *data, SCORES)
    torch.testing.assert_close(network.state_dict(), before)
    assert network.training and network.encoder.training
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.mkldnn.enabled


def test_local_training_leaves_frozen_parameters_alone(data):
    from flwr_leakage.gradient_map import local_update
    from flwr_leakage.records import Batch, LocalSchedule

    network = small_network()
    network[0].requires_grad_(False)
    gradient_map = GradientMap(network)
    schedule = LocalSchedule(0.1, 2, 3, momentum=0.9, weight_decay=0.1)
    change = local_update(gradient_map, gradient_map.params, Batch(*data), schedule)
    assert not change["0.weight"].any() and change["3.weight"].any()
