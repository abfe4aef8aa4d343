"""What a captured training tells, and where an audit assumes something else."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trained import Loop, network, pixels, sgd

from flwr_leakage.capture import Limits, TrainingFacts, capture, differences, facts_of
from flwr_leakage.capture import facts as facts_module
from flwr_leakage.capture.exposure import read_round
from flwr_leakage.capture.facts import UNCOUNTED, UNTOLD
from flwr_leakage.capture.inputs import infer_spec
from flwr_leakage.conventions import PUBLIC, public_normalization, public_statistics
from flwr_leakage.gradient_map import local_update
from flwr_leakage.losses import NextToken
from flwr_leakage.models import TextTransformer
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, LocalSchedule

SPEC = InputSpec((1, 6, 6), 3, (0.5,), (0.5,))


def captured(num_examples=12, **settings):
    loop = Loop(**settings)
    received = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with capture() as recorder:
        loop.run()
    return recorder.training(), received, num_examples


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ((0.5,), (0.5,)),
        ((0.0,), (1.0,)),
        ((0.1307,), (0.3081,)),
        ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ],
)
def test_the_normalisation_is_read_off_8_bit_images(mean, std):
    spec = InputSpec((len(mean), 6, 6), 3, mean, std)
    images = pixels(6 * len(mean)).reshape(6, len(mean), 6, 6)
    found = infer_spec(Batch(spec.normalize(images), torch.zeros(6)), 3)
    assert found.mean == pytest.approx(mean, abs=1e-4)
    assert found.std == pytest.approx(std, abs=1e-4)


@pytest.mark.parametrize(
    "levels",
    [
        (0, 28, 57, 85, 113, 142, 170, 198, 227, 255),  # no two are neighbours
        (0, 64, 128, 191, 255),  # nearly multiples of 63.75
        (0, 3, 100, 254),  # no white
    ],
)
def test_the_normalisation_is_read_off_few_levels(levels):
    spec = InputSpec((1, 6, 6), 3, (0.1307,), (0.3081,))
    images = torch.tensor(levels).repeat(36)[:36].reshape(1, 1, 6, 6) / 255
    found = infer_spec(Batch(spec.normalize(images), torch.zeros(1)), 3)
    assert found.mean == pytest.approx(spec.mean, abs=1e-4)
    assert found.std == pytest.approx(spec.std, abs=1e-4)


@pytest.mark.parametrize("levels", [(0, 255), (0, 85, 170, 255)])
def test_levels_of_several_grids_span_the_box(levels):
    images = torch.tensor(levels).repeat(36)[:36].reshape(1, 1, 6, 6) / 255
    found = infer_spec(Batch(images, torch.zeros(1)), 3)
    assert found.mean == (0.0,) and found.std == (1.0,)


def test_a_normalisation_that_cannot_be_known_is_not_told():
    training, _, _ = captured(images=torch.rand(12, 1, 6, 6))
    facts = facts_of(training, 12)
    assert facts.shape == (1, 6, 6)
    assert (facts.normalization, facts.mean) == ("", ())
    assert facts.spec() == InputSpec((1, 6, 6), 3, known=False)


@pytest.mark.parametrize("darkest", [0, 3, 41])
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_normalisation_is_told_by_its_name_whatever_the_darkest_pixel(name, darkest):
    channels = max(len(PUBLIC[name][0]), 1)
    mean, std = public_statistics(name, channels)
    levels = torch.randint(darkest, 250, (4, channels, 6, 6), generator=make_generator(1))
    images = InputSpec((channels, 6, 6), 3, mean, std).normalize(levels.float() / 255)
    assert public_normalization(images) == name
    shifted = images + 0.3 / 255 * (1 / min(std))
    assert public_normalization(shifted) == ""


def test_of_half_precision_no_normalisation_is_told_that_it_cannot_tell_apart():
    assert public_normalization(pixels().half()) == "0 to 1"
    assert public_normalization(pixels().bfloat16()) == ""


def test_what_was_read_off_the_samples_travels_only_where_they_are_sent_as_trained():
    training, _, count = captured()
    facts = facts_of(training, count, reported=count)
    assert facts.travelling(as_trained=True) == facts
    told = facts.travelling(as_trained=False)
    settings = TrainingFacts("SGD", 0.1, unscheduled=UNTOLD)
    assert told == settings
    with pytest.raises(ValueError, match="it tells neither its steps nor its inputs"):
        told.spec()
    given = facts_of(training, count, reported=count, spec=SPEC).travelling(as_trained=False)
    assert given.spec() == SPEC  # the owner says it


def test_an_owner_tells_that_the_inputs_are_a_table_or_the_shape_alone():
    training, _, count = captured()
    for given in (InputSpec.table(36, 3), InputSpec((1, 6, 6), 3, known=False)):
        facts = facts_of(training, count, reported=count, spec=given)
        assert TrainingFacts.from_dict(json.loads(json.dumps(facts.to_dict()))).spec() == given


def test_steps_travel_where_the_app_reports_the_number_of_samples_that_they_follow_from():
    training, _, count = captured()
    for reported in (0, count - 1, 5):
        told = facts_of(training, count, reported=reported).travelling(as_trained=True)
        assert (told.num_steps, told.batch_size, told.unscheduled) == (0, 0, UNCOUNTED)
    clipped, _, _ = captured(on_gradients=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    assert facts_of(clipped, count, reported=count).rewritten == 1
    assert facts_of(clipped, count, reported=count).travelling(as_trained=True).rewritten == 0


def test_samples_of_several_shapes_tell_none():
    with capture() as recorder:
        model = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 3))
        optimizer = sgd(model.parameters())
        for size in (6, 7):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.zeros(2, 1, size, size)), torch.tensor([0, 1])).backward()
            optimizer.step()
    assert facts_of(recorder.training(), 4).shape == ()


def test_facts_travel_as_text():
    training, _, count = captured(model=network(batch_norm=True, dropout=0.1))
    facts = facts_of(training, count)
    assert TrainingFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    assert facts.batch_norm == "batch"
    assert facts.randomness
    assert facts.spec() == SPEC


def test_facts_of_a_hostile_client_are_refused():
    training, _, count = captured()
    content = facts_of(training, count).to_dict()
    for name, value in [
        ("learning_rate", "0.1"),
        ("num_steps", -1),
        ("shape", [1] * 1000),
        ("sends", "x"),
    ]:
        with pytest.raises(ValueError):
            TrainingFacts.from_dict({**content, name: value})


def test_a_client_that_does_what_is_assumed_differs_nowhere():
    training, _, count = captured()
    facts = facts_of(training, count)
    assert differences(facts, LocalSchedule(0.1, 3, 4), SPEC, "running") == ()
    assert facts.schedule() == LocalSchedule(0.1, 3, 4)


def test_a_client_of_fewer_samples_than_a_batch_takes_them_in_one_step():
    facts = TrainingFacts("SGD", 0.1, num_steps=1, batch_size=1, counted=True)
    assumed = LocalSchedule(0.1, 1, 4), SPEC, "running"
    assert differences(facts, *assumed, num_examples=1) == differences(facts, *assumed) == ()
    assert differences(facts, *assumed, num_examples=4) == ("batch size 1, assumed 4",)
    larger = replace(facts, batch_size=8)
    assert differences(larger, *assumed) == differences(larger, *assumed, num_examples=8)
    assert differences(larger, *assumed) == ("batch size 8, assumed 4",)


MISTAKES = [
    ({"schedule": LocalSchedule(0.01, 3, 4)}, {}, "learning rate 0.1, assumed 0.01"),
    ({"schedule": LocalSchedule(0.1, 1, 4)}, {}, "steps 3, assumed 1"),
    ({"schedule": LocalSchedule(0.1, 10, 4)}, {}, "steps 3, assumed 10"),
    ({}, {"optimizer": lambda p: sgd(p, momentum=0.9)}, "momentum 0.9, assumed 0"),
    ({}, {"model": network(batch_norm=True)}, "BatchNorm in mode batch, assumed running"),
    ({"spec": InputSpec((1, 6, 6), 3)}, {}, "normalisation by mean (0.5,) and std (0.5,)"),
    ({}, {"optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}, "optimizer Adam, assumed SGD"),
    ({}, {"model": network(dropout=0.5)}, "dropout"),
    ({}, {"precision": torch.bfloat16}, "mixed precision (bfloat16)"),
    ({}, {"accumulate": 3}, "accumulated"),
]


@pytest.mark.parametrize(("assumed", "settings", "words"), MISTAKES)
def test_what_an_audit_assumes_wrongly_is_named(assumed, settings, words):
    training, _, count = captured(**settings)
    assumed = {
        "schedule": LocalSchedule(0.1, 3, 4),
        "spec": SPEC,
        "batch_norm": "running",
    } | assumed
    found = differences(facts_of(training, count), **assumed)
    assert words in "; ".join(found)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_round_that_is_read_off_a_training_explains_its_update(batch_norm):
    training, received, count = captured(
        model=network(batch_norm=batch_norm), optimizer=lambda p: sgd(p, momentum=0.9), epochs=2
    )
    read = read_round(training, received, count)
    assert read.spec == SPEC
    assert len(read.private) == 12
    delta = local_update(read.gradient_map, read.params, read.private, read.schedule, read.buffers)
    for name, value in read.raw.delta.items():
        torch.testing.assert_close(delta[name], value, rtol=1e-4, atol=1e-6)


def test_a_loss_of_the_apps_own_is_replayed_from_its_tape():
    def loss(model, logits, labels):
        return F.nll_loss(F.log_softmax(logits, 1), labels, reduction="sum") / 4

    training, received, count = captured(loss=loss)
    read = read_round(training, received, count)
    delta = local_update(read.gradient_map, read.params, read.private, read.schedule)
    for name, value in read.raw.delta.items():
        torch.testing.assert_close(delta[name], value, rtol=1e-4, atol=1e-6)


def _flat(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _masked(logits, ids):
    labels = ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100)
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels)


@pytest.mark.parametrize("loss", [_flat, _masked, NextToken(0)])
def test_a_loss_that_shifts_the_tokens_is_replayed_with_the_texts_as_targets(loss):
    torch.manual_seed(0)
    model = TextTransformer((6,), 20, 20, causal=True, width=16)
    received = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(20, (3, 6))
    ids[0, 4:] = 0
    with capture() as recorder:
        optimizer = sgd(model.parameters())
        loss(model(ids), ids).backward()
        optimizer.step()
    read = read_round(recorder.training(), received, 3, InputSpec.text(20, 6, padding=0))
    assert torch.equal(read.private.inputs, ids) and torch.equal(read.private.targets, ids)
    delta = local_update(read.gradient_map, read.params, read.private, read.schedule)
    for name, value in read.raw.delta.items():
        torch.testing.assert_close(delta[name], value, rtol=1e-4, atol=1e-6)
    other = torch.randint(20, (2, 6))
    logits = model(other)
    torch.testing.assert_close(read.gradient_map.loss(logits, other), loss(logits, other))


def test_a_loss_of_other_tokens_is_no_shift_of_the_inputs():
    model = TextTransformer((6,), 20, 20, causal=True, width=16)
    received, ids = dict(model.state_dict()), torch.arange(18).reshape(3, 6)
    with capture() as recorder:
        optimizer = sgd(model.parameters())
        _flat(model(ids), ids + 1).backward()
        optimizer.step()
    with pytest.raises(ValueError, match="uses 0 tensors of the batch's size as targets"):
        read_round(recorder.training(), received, 3, InputSpec.text(20, 6, padding=0))


def test_a_loss_with_class_weights_is_no_second_call_of_the_model():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    training, received, count = captured(
        loss=lambda model, logits, labels: weighted(logits, labels)
    )
    assert training.batch_sizes == (4, 4, 4)
    read = read_round(training, received, count)
    delta = local_update(read.gradient_map, read.params, read.private, read.schedule)
    for name, value in read.raw.delta.items():
        torch.testing.assert_close(delta[name], value, rtol=1e-4, atol=1e-6)


def test_a_later_epoch_in_another_order_is_refused():
    images = (pixels() - 0.5) / 0.5
    with capture() as recorder:
        model = network()
        optimizer = sgd(model.parameters())
        for order in (torch.arange(12), torch.arange(11, -1, -1)):
            optimizer.zero_grad()
            F.cross_entropy(model(images[order]), order % 3).backward()
            optimizer.step()
    with pytest.raises(ValueError, match="another order"):
        read_round(recorder.training(), dict(network().state_dict()), 12)


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_samples"):
        Limits(max_samples=0)


def test_the_step_is_told_from_which_gradients_were_changed():
    def from_the_second_step_on(model):
        calls.append(model)
        if len(calls) > 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    calls, adam = [], (lambda p: torch.optim.Adam(p))
    training, _, count = captured(optimizer=adam, on_gradients=from_the_second_step_on)
    facts = facts_of(training, count)
    assert facts.rewritten == 2
    assert facts_of(captured(optimizer=adam)[0], count).rewritten == 0


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (F.cross_entropy, "cross_entropy"),
        (lambda x, y: F.cross_entropy(input=x, target=y), "cross_entropy"),
        (nn.CrossEntropyLoss(), "cross_entropy"),
        (lambda x, y: F.nll_loss(x.log_softmax(1), y), "cross_entropy"),
        (lambda x, y: F.cross_entropy(x, y, torch.ones(3)), "cross_entropy"),
        (F.nll_loss, "a loss of the app's own"),  # plain if the model returns log-probabilities
        (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), facts_module.SMOOTHED),
        (nn.CrossEntropyLoss(label_smoothing=0.2), facts_module.SMOOTHED),
        (nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])), facts_module.WEIGHTED),
        (lambda x, y: F.cross_entropy(x, y, torch.arange(3) + 1.0), facts_module.WEIGHTED),
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), facts_module.UNLIKE),
        (lambda x, y: focal(x, y), facts_module.UNLIKE),
    ],
)
def test_the_kind_of_the_loss_is_told_however_it_is_spelled(loss, name):
    model = network()
    with capture() as recorder:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loss(model(pixels()), torch.arange(12) % 3).backward()
        optimizer.step()
    assert facts_of(recorder.training(), 12).loss == name


def focal(logits, targets):
    """The focal loss of Lin et al. 2017 with γ = 2."""
    chosen = logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    return -((1 - chosen.exp()) ** 2 * chosen).mean()


@pytest.mark.parametrize(
    "loss", [facts_module.SMOOTHED, facts_module.WEIGHTED, facts_module.UNLIKE]
)
def test_another_loss_than_the_cross_entropy_is_a_difference(loss):
    facts = TrainingFacts("SGD", 0.1, num_steps=1, batch_size=4, counted=True, loss=loss)
    facts = replace(facts, label_smoothing=0.1 if loss == facts_module.SMOOTHED else 0.0)
    assumed = LocalSchedule(0.1, 1, 4), SPEC, "running"
    assert differences(facts, *assumed) == (f"{loss}, assumed the mean cross-entropy",)
    known = differences(facts, *assumed, label_smoothing=0.1)
    assert (known == ()) == (loss == facts_module.SMOOTHED)
    with pytest.raises(ValueError, match="label_smoothing must lie in"):
        TrainingFacts.from_dict({**json.loads(json.dumps(asdict(facts))), "label_smoothing": 1.5})
    assert facts.travelling(as_trained=True).loss == loss
    withheld = facts.travelling(as_trained=False)
    assert not withheld.loss and not withheld.label_smoothing
    # The operator gave a loss of their own, with which the client's word cannot be compared.
    assert differences(facts, *assumed, has_own_loss=True) == ()
    # Losses under mixed precision are scaled.
    assert "cross-entropy" not in str(differences(replace(facts, precision="float16"), *assumed))
    parts, _, count = captured(accumulate=2, batch_size=2)  # each loss is halved
    assert facts_of(parts, count).loss == facts_module.OWN_LOSS
    unknown = replace(facts, loss=facts_module.OWN_LOSS)
    assert differences(unknown, *assumed) == ()
