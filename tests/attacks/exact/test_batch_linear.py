from dataclasses import replace

import pytest
import torch
from attacked import observe
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob, ExactBatch
from flwr_leakage.attacks.exact.batch_layer import pose_layers
from flwr_leakage.attacks.exact.batch_linear import complete, recover_batch
from flwr_leakage.attacks.exact.batch_search import BatchSearch, SearchSettings
from flwr_leakage.attacks.problem import pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
QUICK = SearchSettings(max_seconds=5)


def mlp(*widths, seed=0):
    torch.manual_seed(seed)
    layers, inputs = [nn.Flatten()], 64
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 4))


class SmallCnn(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.one, self.two = nn.Linear(128, 60), nn.Linear(60, 4)

    def features(self, x):
        return F.max_pool2d(F.relu(self.conv(x)), 2).reshape(len(x), -1)

    def forward(self, x):
        return self.two(F.relu(self.one(self.features(x))))


class Head(nn.Module):
    """Logits near each other, so that two samples of one label have nearly one error."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(512, 10)
        with torch.no_grad():
            self.head.weight.mul_(0.03)

    def features(self, x):
        return F.relu(self.conv(x)).flatten(1)

    def forward(self, x):
        return self.head(self.features(x))


class Residual(nn.Module):
    """The second layer's inputs go around it, too."""

    def __init__(self, joined):
        super().__init__()
        torch.manual_seed(1)
        self.joined = joined
        self.one, self.two = nn.Linear(64, 120), nn.Linear(120, 120)
        self.head = nn.Linear(240 if joined else 120, 4)

    def forward(self, x):
        features = F.relu(self.one(x.flatten(1)))
        block = F.relu(self.two(features))
        return self.head(torch.cat([features, block], 1) if self.joined else features + block)


class Bypass(SmallCnn):
    def forward(self, x):
        features = self.features(x)
        return self.two(F.relu(self.one(features))) + features[:, :4]


def batch(size, seed=5):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(size, *SPEC.shape, generator=generator)
    labels = torch.randint(4, (size,), generator=generator)
    return Batch(SPEC.normalize(pixels), labels)


def attack(network, truth, schedule=None):
    gradient_map = GradientMap(network.eval())
    observation = observe(gradient_map, truth, schedule or LocalSchedule(0.1, 1, len(truth)))
    (found,) = ExactBatch(QUICK)(AttackJob(gradient_map, SPEC, [observation], ThreatModel()))
    return found


def errors_of(guesses, truth):
    """Relative errors of the guesses, and which sample each is."""
    distances = torch.cdist(guesses.flatten(1).double(), truth.flatten(1).double())
    nearest = distances.argmin(1)
    return distances.amin(1) / truth.flatten(1).norm(dim=1)[nearest], nearest


@pytest.mark.parametrize(
    ("widths", "size", "schedule"),
    [
        ((120, 60), 6, None),
        ((150,), 8, None),  # two layers
        ((120, 60), 6, LocalSchedule(0.01, 1, 6)),
        ((120, 60), 6, LocalSchedule(0.0002, 1, 6)),  # an error of 3e-4, but 1e-4 of white
        ((120, 60), 4, LocalSchedule(0.1, 5, 4)),
        ((120, 60), 4, LocalSchedule(0.1, 3, 4, momentum=0.9)),
    ],
    ids=["three layers", "two layers", "small learning rate", "smaller", "five steps", "momentum"],
)
def test_all_images_of_a_batch_are_found_and_proven(widths, size, schedule):
    truth = batch(size)
    found = attack(mlp(*widths), truth, schedule)
    assert found.error == ""
    errors, nearest = errors_of(found.batch.inputs, truth.inputs)
    assert sorted(nearest.tolist()) == list(range(size))
    assert errors.max() < 1e-3
    assert torch.equal(found.batch.targets, truth.targets[nearest])
    assert found.stats["verdicts"] == ("proven",) * size
    # What the attacker expects of its own error is right.
    assert errors.max() < 3 * max(found.stats["relative_errors"]) + 1e-5


class OwnInput(nn.Module):
    """It scales and flattens its images in its own way."""

    def __init__(self):
        super().__init__()
        self.layers = mlp(120, 60)[1:]

    def forward(self, x):
        return self.layers((x.permute(0, 2, 3, 1).flip(1).flatten(1) - 0.3) / 0.7)


@pytest.mark.parametrize("schedule", [None, LocalSchedule(0.1, 5, 6)])
def test_images_are_found_whatever_the_network_does_with_them_first(schedule):
    truth = batch(6)
    found = attack(OwnInput(), truth, schedule)
    errors, nearest = errors_of(found.batch.inputs, truth.inputs)
    assert sorted(nearest.tolist()) == list(range(6))
    assert errors.max() < 1e-3
    assert found.stats["verdicts"] == ("proven",) * 6


def test_black_pixels_tell_images_apart_that_the_network_scales_itself():
    truth = batch(4)
    black = torch.rand(truth.inputs.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    truth = Batch(torch.where(black, SPEC.normalize(torch.zeros(())), truth.inputs), truth.targets)
    network = OwnInput()
    network.layers = nn.Sequential(network.layers[0], nn.Sigmoid(), nn.Linear(120, 4))
    found = attack(network, truth)
    assert errors_of(found.batch.inputs, truth.inputs)[0].max() < 1e-3


def pose_batch(network, truth):
    gradient_map = GradientMap(network.double().eval())
    truth = Batch(truth.inputs.double(), truth.targets)
    observation = observe(gradient_map, truth, LocalSchedule(1.0, 1, len(truth)))
    problem = pose(gradient_map, SPEC, observation, ThreatModel())
    generator = torch.Generator().manual_seed(0)
    layers, _ = pose_layers(problem, generator)
    return layers, generator


def test_one_sample_that_is_found_sets_off_the_peeling_of_its_neighbours(monkeypatch):
    """Units that two samples activate each, in a chain, show the next one after every sample."""
    truth, network = batch(12), mlp(71)
    generator = torch.Generator().manual_seed(3)
    active = torch.rand(71, 12, generator=generator) < 0.6
    active[:11] = torch.eye(12).bool()[:11] | torch.eye(12).bool()[1:]
    outputs = (0.5 + torch.rand(71, 12, generator=generator)) * torch.where(active, 1.0, -1.0)
    with torch.no_grad():
        network[1].weight.copy_(outputs @ torch.linalg.pinv(truth.inputs.flatten(1).T))
        network[1].bias.zero_()
    layers, generator = pose_batch(network, truth)
    dual = torch.linalg.lstsq(layers[0].factor.right.T, truth.inputs[0].flatten().double()[:, None])
    search = BatchSearch(layers[0], layers[1], SearchSettings(starts=3), generator)
    given = dual.solution[:, 0]
    monkeypatch.setattr(search, "_propose", lambda source: search._judge(source, None, given))
    assert len(search.run()) == 12
    assert search.accepted["peeling"] >= 3


def test_masks_tell_columns_where_no_unit_shows_a_sample_without_others():
    """Inputs hold shares of other samples until all columns are found, but masks are right."""
    truth, network = batch(16, seed=0), mlp(200).double()
    with torch.no_grad():
        network[1].weight.normal_(0, 0.5)
        network[3].weight.mul_(2)
        labels = truth.targets.clone()
        labels[:4] = network(truth.inputs.double()).argmax(1)[:4]  # these have the least errors
    truth = Batch(truth.inputs.double(), labels)
    layers, generator = pose_batch(network, truth)
    search = BatchSearch(layers[0], layers[1], QUICK, generator)
    found = search.run()
    assert len(found) == 16
    assert max(sample.misfit for sample in found) < 1e-8
    assert search.accepted["masks"] >= 5
    result = attack(network, truth)
    assert result.stats["verdicts"] == ("proven",) * 16
    assert errors_of(result.batch.inputs, truth.inputs)[0].max() < 1e-5


def test_what_is_nearly_right_is_not_taken():
    """It would spoil what is left, and with it all samples that are found later."""
    truth = batch(12)
    layers, generator = pose_batch(mlp(71), truth)
    right = layers[0].factor.right.T
    duals = torch.linalg.lstsq(right, truth.inputs[:2].flatten(1).double().T).solution
    nearly = 0.98 * duals[:, 0] + 0.02 * duals[:, 1]
    checked = layers[0].check(nearly)
    assert checked.misfit < 0.25
    assert checked.scale_error < 0.05
    search = BatchSearch(layers[0], None, QUICK, generator)
    assert not search._judge("given", None, nearly)
    assert search._judge("given", None, duals[:, 0])


def test_a_unit_that_rounding_switched_at_the_client_takes_no_proof_away():
    """Black pixels tell each image to 1e-14, the client's pass is told to 1e-7 only."""
    truth, network = batch(6), mlp(120, 60).double().eval()
    black = torch.rand(truth.inputs.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    images = truth.inputs.where(~black, SPEC.normalize(torch.zeros(()))).double()
    with torch.no_grad():  # one unit of the second layer is at rounding of single precision
        network[3].bias[0] -= network[:4](images[:1])[0, 0] - 5e-8
    gradient_map = GradientMap(network)
    schedule = LocalSchedule(1.0, 1, 6)
    observation = observe(gradient_map, Batch(images, truth.targets), schedule)
    params = {name: value.clone() for name, value in observation.params.items()}
    params["3.bias"][0] -= 1e-7  # where the server computes it, on the other side
    observation = replace(observation, params=params)
    (found,) = ExactBatch(QUICK)(AttackJob(gradient_map, SPEC, [observation], ThreatModel()))
    assert found.stats["verdicts"] == ("proven",) * 6
    assert errors_of(found.batch.inputs, images)[0].max() < 1e-5


def test_units_of_one_sample_are_peeled_where_the_next_layer_tells_masks_too():
    truth, network = batch(12), mlp(71, 60)
    generator = torch.Generator().manual_seed(3)
    active = torch.rand(71, 12, generator=generator) < 0.6
    active[:3] = torch.eye(12).bool()[:3]
    outputs = (0.5 + torch.rand(71, 12, generator=generator)) * torch.where(active, 1.0, -1.0)
    with torch.no_grad():
        network[1].weight.copy_(outputs @ torch.linalg.pinv(truth.inputs.flatten(1).T))
        network[1].bias.zero_()
    layers, generator = pose_batch(network, truth)
    assert layers[0].factor.rank == layers[1].factor.rank
    search = BatchSearch(layers[0], layers[1], SearchSettings(starts=1), generator)
    search.run()
    assert search.accepted["peeling"] >= 3


@pytest.mark.parametrize("unit", [1, 4, 7, 8])
def test_a_wrong_sign_of_a_unit_is_found_by_what_the_gradient_explains(unit):
    """A unit near zero, one of ten in the second layer, changes much of a sample's errors."""
    truth, network = batch(5), mlp(120, 10)
    image = truth.inputs[0].flatten().double()
    with torch.no_grad():
        network[3].bias[unit] -= network[:4](truth.inputs[:1])[0, unit] - 1e-6
    layers, generator = pose_batch(network, truth)
    first = layers[0]
    dual = torch.linalg.lstsq(first.factor.right.T, image[:, None]).solution[:, 0]
    right = first.check(dual, int(truth.targets[0]))
    moved = [dual + 1e-5 * dual.norm() * torch.randn(5, generator=generator) for _ in range(8)]
    found = [first.check(each, right.label) for each in moved]
    wrong = max(found, key=lambda candidate: candidate.misfit)
    assert wrong.misfit > 0.25
    assert right.is_exact
    spread = float((wrong.inputs - image).square().mean().sqrt())
    point = first.explained(wrong.inputs, wrong.label, spread, generator)
    assert (point - wrong.inputs).norm() < 15 * spread * len(image) ** 0.5
    outputs = first.matrix @ point + first.offset
    errors = first.errors(outputs[None], truth.targets[:1], point[None])[0]
    left = first.factor.left
    assert (errors - left @ (left.T @ errors)).norm() < 1e-4 * errors.norm()
    search = BatchSearch(first, None, QUICK, generator)
    assert search._judge("given", None, wrong.dual)


def test_black_pixels_make_images_sparse_whatever_the_activation():
    truth = batch(6)
    pixels = SPEC.denormalize(truth.inputs) - 0.5
    truth = Batch(SPEC.normalize(pixels.clamp_min(0)), truth.targets)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 60), nn.Tanh(), nn.Linear(60, 4))
    found = attack(network, truth)
    errors, nearest = errors_of(found.batch.inputs, truth.inputs)
    assert sorted(nearest.tolist()) == list(range(6))
    assert errors.max() < 1e-3
    assert found.stats["accepted"].keys() <= {"inputs", "last"}


def test_features_of_a_cnn_are_found_and_are_called_no_images():
    truth, network = batch(6), SmallCnn()
    found = attack(network, truth, LocalSchedule(1.0, 1, 6))
    assert found.batch is None
    assert "one takes features" in found.error and "no images" in found.error
    features = found.stats["features"]
    errors, nearest = errors_of(features.inputs, network.features(truth.inputs).detach())
    assert sorted(nearest.tolist()) == list(range(6))
    assert errors.max() < 1e-3
    assert torch.equal(features.labels, truth.targets[nearest])
    assert features.proven == 6


@pytest.mark.parametrize("joined", [False, True], ids=["added", "joined"])
def test_a_layer_tells_its_inputs_where_other_paths_lead_around_it(joined):
    truth = batch(12)
    found = attack(Residual(joined), truth)
    errors, nearest = errors_of(found.batch.inputs, truth.inputs)
    assert sorted(nearest.tolist()) == list(range(12))
    assert errors.max() < 1e-3
    assert found.stats["verdicts"] == ("proven",) * 12


def test_zeros_of_a_rough_sample_are_not_told_by_features_that_are_dead_in_all():
    """Noise of the rough sample hides its own zeros behind the exact ones of all samples."""
    network, spec = Head(), replace(SPEC, num_classes=10)
    with torch.no_grad():
        network.conv.bias[2:] = -10.0
    truth = replace(batch(4), targets=torch.arange(4))
    gradient_map = GradientMap(network.eval())
    observed = observe(gradient_map, truth, LocalSchedule(0.1, 1, 4))
    problem = pose(gradient_map, spec, observed, ThreatModel()).to(torch.float64)
    generator = torch.Generator().manual_seed(0)
    (layer,), _ = pose_layers(problem, generator)
    features = network.features(truth.inputs).double().detach()
    assert layer.right.shape[1] == int(features.any(0).sum()) < 512
    duals = torch.linalg.lstsq(layer.factor.right.T, features.T).solution.T
    rough = duals[0] + 1e-3 * duals[1:].sum(0)
    search = BatchSearch(layer, None, QUICK, generator)
    search.found = [search.layer.check(dual) for dual in duals[1:]]
    search._rest = replace(search._remainder(), lift=rough[None])
    found = layer.check(search._last_by_zeros())
    assert (found.inputs - features[0]).norm() < 1e-4 * features[0].norm()


def test_samples_whose_errors_are_nearly_dependent_are_read_off_their_zeros():
    network, spec = Head(), replace(SPEC, num_classes=10)
    truth = replace(batch(6), targets=torch.tensor([0, 0, 1, 1, 2, 2]))
    gradient_map = GradientMap(network.eval())
    observation = observe(gradient_map, truth, LocalSchedule(0.1, 1, 6))
    (found,) = ExactBatch(QUICK)(AttackJob(gradient_map, spec, [observation], ThreatModel()))
    features = found.stats["features"]
    errors, nearest = errors_of(features.inputs, network.features(truth.inputs).detach())
    dependent = torch.linalg.svdvals(features.errors)
    assert dependent[-1] < 0.01 * dependent[0]
    assert sorted(nearest.tolist()) == list(range(6)) and float(errors.max()) < 1e-4
    assert features.proven == 6


def test_clients_whose_mean_is_seen_are_one_batch():
    gradient_map, truth = GradientMap(mlp(120, 60)), batch(6)
    schedule = LocalSchedule(1.0, 1, 6)
    observation = replace(observe(gradient_map, truth, schedule), members=(2, 4))
    (found,) = ExactBatch(QUICK)(
        AttackJob(gradient_map, SPEC, [observation], ThreatModel(view="aggregate"))
    )
    assert found.stats["proven"] == 6
    assert errors_of(found.batch.inputs, truth.inputs)[0].max() < 1e-4


def test_a_batch_has_its_size_where_samples_are_missing():
    truth, gradient_map = batch(6), GradientMap(mlp(120, 60))
    observation = observe(gradient_map, truth, LocalSchedule(1.0, 1, 6))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    whole = recover_batch(problem, QUICK, torch.Generator().manual_seed(0))
    part = replace(whole, inputs=whole.inputs[:4], labels=whole.labels[:4])
    completed = complete(problem, part)
    assert len(completed) == 6
    assert sorted(completed.targets.tolist()) == sorted(truth.targets.tolist())
    missing = whole.inputs[4:].reshape(2, *SPEC.shape)
    mean = completed.inputs[4]
    # A weighted mean of the two that are left.
    assert (mean - missing.mean(0)).norm() < (missing[0] - missing[1]).norm()


@pytest.mark.parametrize("strength", [1e-3, 1e-2])
def test_nothing_is_proven_of_a_gradient_that_is_not_the_networks(strength):
    """Errors of other samples in the rows of the gradient's own span pass no replay."""
    gradient_map, truth = GradientMap(mlp(120, 60)), batch(5)
    observation = observe(gradient_map, truth, LocalSchedule(1.0, 1, 5))
    delta = dict(observation.update.delta)
    for name, value in delta.items():
        torch.manual_seed(1)
        if name != "1.bias":
            mixing = torch.randn(value.shape[-1], value.shape[-1]) / value.shape[-1] ** 0.5
            delta[name] = value + strength * value @ mixing
    observation = replace(observation, update=replace(observation.update, delta=delta))
    (found,) = ExactBatch(SearchSettings(starts=100, max_seconds=2))(
        AttackJob(gradient_map, SPEC, [observation], ThreatModel())
    )
    assert found.stats.get("proven", 0) == 0


@pytest.mark.parametrize(
    ("network", "size", "schedule", "reason"),
    [
        (Bypass(), 4, None, "one: other paths lead around it"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), 6, None, "rank 3, below the 6 samples"),
        (
            nn.Sequential(
                nn.Flatten(), nn.Linear(64, 60, bias=False), nn.Linear(60, 4, bias=False)
            ),
            4,
            None,
            "1: it has no bias",
        ),
        (SmallCnn(), 4, LocalSchedule(0.1, 3, 4), "features move between 3 local steps"),
        (
            mlp(120, 60),
            4,
            LocalSchedule(0.1, 2, 4, weight_decay=0.1),
            "weight decay adds the weights",
        ),
        (nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten()), 2, None, "no linear layer"),
    ],
    ids=["bypass", "head", "no bias", "steps", "weight decay", "no linear layer"],
)
def test_what_does_not_apply_is_refused_in_words(network, size, schedule, reason):
    found = attack(network, batch(size), schedule)
    assert found.batch is None
    assert reason in found.error


def test_a_seed_gives_the_same_result():
    gradient_map, truth = GradientMap(mlp(120, 60)), batch(5)
    observation = observe(gradient_map, truth, LocalSchedule(1.0, 1, 5))
    problem = pose(gradient_map, SPEC, observation, ThreatModel()).to(torch.float64)
    first, second = (
        recover_batch(problem, QUICK, torch.Generator().manual_seed(7)) for _ in range(2)
    )
    assert torch.equal(first.labels, second.labels)
    torch.testing.assert_close(first.inputs, second.inputs, atol=1e-5, rtol=0)


def test_more_samples_than_were_reported_are_told_of():
    truth, gradient_map = batch(4), GradientMap(mlp(60))
    observation = observe(gradient_map, truth, LocalSchedule(0.1, 1, 4))
    said = replace(observation, update=replace(observation.update, num_examples=2))
    short = ExactBatch(SearchSettings(max_seconds=1))
    (found,) = short(AttackJob(gradient_map, SPEC, [said], ThreatModel()))
    told = found.error or found.stats["stage"]
    assert "1 shows 4 samples, num_examples says 2: it may be too small" in told
    assert "stage" not in attack(mlp(60), truth).stats


def test_a_loss_that_weighs_classes_is_refused():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0, 4.0]))
    gradient_map = GradientMap(mlp(60), loss)
    observation = observe(gradient_map, batch(3), LocalSchedule(0.1, 1, 3))
    (found,) = ExactBatch(QUICK)(AttackJob(gradient_map, SPEC, [observation], ThreatModel()))
    assert found.batch is None
    assert "it weighs them by their classes" in found.error


@pytest.mark.parametrize("noise", [1e-9, 1e-8])
def test_errors_of_features_are_as_large_as_the_attacker_expects(noise):
    """Noise reaches features by their dual, by the gradient's own rows and by the bias."""
    network, spec = Head(), replace(SPEC, num_classes=10)
    gradient_map = GradientMap(network.double().eval())
    images, labels = batch(6).inputs.double(), torch.tensor([0, 0, 1, 1, 2, 2])
    observation = observe(gradient_map, Batch(images, labels), LocalSchedule(1.0, 1, 6))
    generator = torch.Generator().manual_seed(1)
    delta = observation.update.delta
    delta = {k: v + noise * torch.randn(v.shape, generator=generator) for k, v in delta.items()}
    observation = replace(observation, update=replace(observation.update, delta=delta))
    (found,) = ExactBatch(QUICK)(AttackJob(gradient_map, spec, [observation], ThreatModel()))
    features = found.stats["features"]
    known = network.features(images).detach()
    errors = torch.cdist(features.inputs, known).amin(1) / features.inputs.norm(dim=1)
    assert len(errors) == 6
    assert ((errors / features.relative_errors).log2().abs() < 1).all()
