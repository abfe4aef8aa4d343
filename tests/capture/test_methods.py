"""Losses, turns and exchanges of methods of their own are replayed, and named."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trained import Loop, network, pixels, sgd

from flwr_leakage.capture import Limits, capture, check_replay, facts_of
from flwr_leakage.capture.facts import OWN_TERM, SEVERAL_LABELS, WEIGHTED
from flwr_leakage.capture.order import in_order
from flwr_leakage.capture.samples import private_samples
from flwr_leakage.capture.sent import SENDS, multiple_of

IMAGES, LABELS = (pixels() - 0.5) / 0.5, torch.arange(12) % 3


def steps(model, optimizer, loss, count=3):
    """Steps of four images each; ``loss`` is called before the model is."""
    for images, labels in list(zip(IMAGES.split(4), LABELS.split(4), strict=True))[:count]:
        optimizer.zero_grad()
        loss(model, images, labels).backward()
        optimizer.step()


def trained(train, model=None, limits=None):
    model = model or network()
    received = {name: value.clone() for name, value in model.state_dict().items()}
    with capture(limits) as recorder:
        train(model)
    return recorder.training(), received, dict(model.state_dict())


def proximal(model):
    center = [p.detach().clone() for p in model.parameters()]

    def loss(model, images, labels):
        term = 0.0
        for own, other in zip(model.parameters(), center, strict=True):
            term += torch.square((own - other).norm(2))
        return F.cross_entropy(model(images), labels) + 0.5 * term

    steps(model, sgd(model.parameters()), loss)


def proximal_to_a_copy(model):
    center = copy.deepcopy(list(model.parameters()))

    def loss(model, images, labels):
        pairs = zip(model.parameters(), center, strict=True)
        term = sum(((own - other) ** 2).sum() for own, other in pairs)
        return term + F.cross_entropy(model(images), labels)

    steps(model, sgd(model.parameters()), loss)


def proximal_in_place(model):
    """The sum begins as a tensor, and grows in place."""
    center = [p.detach() + 1 for p in model.parameters()]

    def loss(model, images, labels):
        term, total = torch.tensor(0.0), F.cross_entropy(model(images), labels)
        for own, other in zip(model.parameters(), center, strict=True):
            term += ((own - other) ** 2).sum()
        total += 0.5 * term
        return total.add_(term, alpha=0.1)

    steps(model, sgd(model.parameters()), loss)


class Drift(nn.Module):
    """A loss that takes the model, or a part of it, as FL4Health's FedProx does."""

    def forward(self, model, center):
        pairs = zip(model.parameters(), center, strict=True)
        return sum(((own - other) ** 2).sum() for own, other in pairs)


def drifting(model, own):
    center = [p.detach() + 1 for p in own.parameters()]
    drift, optimizer = Drift(), sgd(model.parameters())
    steps(model, optimizer, lambda m, x, y: F.cross_entropy(m(x), y) + drift(own, center))


def proximal_by_the_model(model):
    drifting(model, model)


def proximal_by_a_layer(model):
    drifting(model, model[-1])


def proximal_by_another_holder(model):
    """The parameters come with a module that nobody calls."""
    drifting(model, nn.Sequential(*model))


def accumulated(model):
    """The term of the second half is computed after the first half's backward."""
    optimizer = sgd(model.parameters())
    for images, labels in zip(IMAGES.split(6), LABELS.split(6), strict=True):
        term = sum((p**2).sum() for p in model.parameters())
        (F.cross_entropy(model(images), labels) + term).backward()
    optimizer.step()


def in_a_closure(model):
    optimizer = sgd(model.parameters())

    def closure():
        optimizer.zero_grad()
        term = sum((p**2).sum() for p in model.parameters())
        loss = F.cross_entropy(model(IMAGES), LABELS) + term
        loss.backward()
        return loss

    optimizer.step(closure)


def built_within(model):
    """Another network is drawn while the tape runs, and losses are added up."""
    network()
    total = torch.zeros(())
    optimizer = sgd(model.parameters())
    for images, labels in zip(IMAGES.split(4), LABELS.split(4), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total = total + loss


def in_turns(model):
    optimizer = sgd(model.parameters(), momentum=0.5)
    for head in (True, False):
        model[:-1].requires_grad_(not head)
        model[-1].requires_grad_(head)
        steps(model, optimizer, lambda m, x, y: F.cross_entropy(m(x), y))


def another_model_after(model):
    steps(model, sgd(model.parameters()), lambda m, x, y: F.cross_entropy(m(x), y))
    own = copy.deepcopy(model)
    steps(own, sgd(own.parameters()), lambda m, x, y: F.cross_entropy(m(x), y))


def in_tandem(model, second=False, alike=True):
    """A step of the model and one of a personal model alternate, as in FL4Health's Ditto."""
    own = copy.deepcopy(model)
    nets = [own, model] if second else [model, own]
    if not alike:
        own.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
    center = [p.detach().clone() for p in model.parameters()]
    optimizers = [sgd(net.parameters()) for net in nets]
    for images, labels in zip(IMAGES.split(4), LABELS.split(4), strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [F.cross_entropy(net(images), labels) for net in nets]
        pairs = zip(own.parameters(), center, strict=True)
        losses[nets.index(own)] += sum(((p - other) ** 2).sum() for p, other in pairs)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()


def by_a_schedule(model):
    """A scheduler hides the optimizer's ``step`` behind a function of its own."""
    optimizer = sgd(model.parameters(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for _ in range(3):
        steps(model, optimizer, lambda m, x, y: F.cross_entropy(m(x), y), count=1)
        scheduler.step()


def clipped_by_value(model):
    Loop(model=model, on_gradients=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)).run()


EXPLAINED = (
    proximal, proximal_to_a_copy, proximal_in_place, proximal_by_the_model, proximal_by_a_layer,
    accumulated, in_a_closure, built_within, in_turns, another_model_after, in_tandem,
    by_a_schedule, clipped_by_value,
)  # fmt: skip


@pytest.mark.parametrize("train", EXPLAINED, ids=lambda train: train.__name__)
def test_a_method_is_explained(train):
    found = check_replay(*trained(train))
    assert found.explains, found.sentence()
    assert found.residual < 1e-6


@pytest.mark.parametrize("train", EXPLAINED, ids=lambda train: train.__name__)
def test_a_replay_leaves_the_model_as_it_is(train):
    model = network()
    training, received, sent = trained(train, model)
    end = {name: value.clone() for name, value in sent.items()}
    check_replay(training, received, end)
    assert all(torch.equal(value, end[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("train", EXPLAINED, ids=lambda train: train.__name__)
def test_a_method_is_trained_the_same_to_the_last_bit(train):
    model = network()
    train(model)
    _, _, seen = trained(train)
    assert all(torch.equal(value, seen[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("train", [proximal, proximal_by_the_model])
def test_a_term_in_the_parameters_is_told_and_the_inputs_are_seen(train):
    training, _, _ = trained(train)
    facts = facts_of(training, 12, reported=12)
    assert (facts.loss, facts.shape, facts.num_classes) == (OWN_TERM, (1, 6, 6), 3)
    assert facts.travelling(as_trained=True).loss == OWN_TERM


def test_a_loss_that_takes_a_model_nobody_called_is_not_replayed():
    training, received, sent = trained(proximal_by_another_holder)
    found = check_replay(training, received, sent)
    assert found.residual is None and "takes a model that is in no module" in found.problem


def test_a_personal_model_that_is_trained_in_tandem_is_told():
    training, received, sent = trained(in_tandem)
    assert "another model was trained besides" in check_replay(training, received, sent).sentence()


@pytest.mark.parametrize("alike", [True, False])
def test_the_second_of_two_trained_models_is_not_taken_for_the_first(alike):
    training, received, sent = trained(lambda model: in_tandem(model, second=True, alike=alike))
    found = check_replay(training, received, sent)
    assert found.residual is None and "the model of the second" in found.problem


@pytest.mark.parametrize("by_outputs", [True, False])
def test_a_second_optimizer_of_what_a_loss_used_is_refused(by_outputs):
    def train(model):
        teacher = copy.deepcopy(model)
        optimizers = [sgd(model.parameters()), sgd(teacher.parameters())]
        for _ in range(2):
            logits, others = model(IMAGES), teacher(IMAGES)
            loss = F.mse_loss(logits, others)
            if not by_outputs:
                gap = model[-1].weight - teacher[-1].weight
                loss = F.cross_entropy(logits, LABELS) + gap.square().sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()

    assert trained(train)[0].problem == "two optimizers take steps"


def test_a_training_that_diverged_is_told_so():
    training, received, sent = trained(proximal)
    broken = {**received, "0.weight": received["0.weight"] * float("nan")}
    for way, pair in (("received", (broken, sent)), ("sent", (received, broken))):
        found = check_replay(training, *pair)
        assert found.problem == f"0.weight was {way} with entries that are NaN or infinite"


def test_turns_are_the_reason_that_no_schedule_says_them():
    training, _, _ = trained(in_turns)
    assert "trained in turns" in facts_of(training, 12).unscheduled


def test_mixed_labels_are_told_and_not_blamed_on_the_inputs():
    def train(model):
        def loss(model, images, labels):
            mixed = 0.7 * images + 0.3 * images.flip(0)
            logits = model(mixed)
            mixture = 0.7 * F.cross_entropy(logits, labels)
            return mixture + 0.3 * F.cross_entropy(logits, labels.flip(0))

        steps(model, sgd(model.parameters()), loss)

    facts = facts_of(trained(train)[0], 12)
    assert (facts.loss, facts.shape, facts.unscheduled) == (SEVERAL_LABELS, (1, 6, 6), "")


class Hiding(nn.Module):
    """Keeps what a loss takes besides the output."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, images):
        """Logits."""
        logits = self.net(images)
        self.hidden = logits.square().mean()
        return logits


@pytest.mark.parametrize("by_torch", [True, False])
def test_a_training_without_an_optimizer_of_torch_is_told_so_whatever_else_is_not_seen(by_torch):
    def train(model):
        optimizer = sgd(model.parameters())
        (F.cross_entropy(model(IMAGES), LABELS) + model.hidden).backward()
        if by_torch:
            optimizer.step()

    why = "a part of the loss was computed" if by_torch else "no step of a torch.optim.Optimizer"
    assert why in trained(train, Hiding())[0].problem


@pytest.mark.parametrize(("count", "why"), [(3, "report len(loader.dataset)"), (6, "later epoch")])
def test_a_number_of_mini_batches_that_is_reported_as_samples_is_named(count, why):
    training, _, _ = trained(
        lambda model: steps(
            model, sgd(model.parameters()), lambda m, x, y: F.cross_entropy(m(x), y)
        )
    )
    with pytest.raises(ValueError, match=re.escape(why)):
        private_samples(training, count)
    assert len(private_samples(training, 12)) == 12


def test_class_weights_are_told_and_leave_the_schedule():
    def train(model):
        weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        steps(model, sgd(model.parameters()), lambda m, x, y: weighted(m(x), y))

    training, _, _ = trained(train)
    facts = facts_of(training, 12)
    assert (facts.loss, facts.unscheduled) == (WEIGHTED, "")


def test_clipping_by_value_is_named():
    training, _, _ = trained(clipped_by_value)
    assert "clipped by value" in facts_of(training, 12).unscheduled


def test_the_same_change_after_every_step_is_a_control_variate_and_other_changes_are_none():
    def corrected(model, change, count=3):
        optimizer = sgd(model.parameters())
        for images, labels in [*zip(IMAGES.split(2), LABELS.split(2), strict=True)][:count]:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            for place, parameter in enumerate(model.parameters()):
                parameter.data.add_(change(place, parameter), alpha=-0.1)

    draws = torch.Generator().manual_seed(0)
    fixed = [torch.randn(p.shape, generator=draws) for p in network().parameters()]
    training, received, end = trained(lambda m: corrected(m, lambda place, p: fixed[place]))
    found = check_replay(training, received, end)
    assert found.explains and "control variates" in found.sentence()
    assert "control variates" in facts_of(training, 6).unscheduled
    for change, count in ((lambda place, p: torch.randn_like(p), 3), (lambda i, p: fixed[i], 1)):
        found = check_replay(*trained(lambda m, c=change, n=count: corrected(m, c, n)))
        assert not found.explains and found.residual > 0.1
        assert "something else than the optimizer" in found.sentence() or (
            "after the last step of the optimizer" in found.sentence()
        )
    few = trained(lambda m: corrected(m, lambda place, p: fixed[place], 6), limits=Limits(5))
    assert check_replay(*few).residual < 1e-5  # of the steps that were kept


def by_place(state):
    return {str(place): value for place, value in enumerate(state)}


@pytest.mark.parametrize("name", SENDS)
def test_a_multiple_of_the_update_is_named(name):
    training, received, end = trained(
        lambda m: Loop(model=m, optimizer=lambda p: sgd(p, momentum=0.9)).run()
    )
    factor = multiple_of(name, 0.1, 0.9, 3)
    update = by_place([factor * (end[key] - received[key]) for key in end])
    found = check_replay(training, by_place(received.values()), update)
    assert found.explains and found.sends == name
    assert f"the client sends {name} and not its parameters" in found.sentence()


def test_another_multiple_is_no_method():
    training, received, end = trained(lambda m: Loop(model=m).run())
    found = check_replay(training, received, {k: 5.5 * (end[k] - received[k]) for k in end})
    assert found.explains and found.sends == "another multiple of its update"
    facts = facts_of(training, 12).sending(found.sends)
    assert "no method that is known here" in facts.unscheduled


def test_arrays_without_names_are_those_of_their_values():
    training, received, end = trained(lambda m: Loop(model=m).run(), network(batch_norm=True))
    keep = [name for name in end if not name.startswith("1.")]
    sent, arrays = by_place(end[name] for name in keep), by_place(received[name] for name in keep)
    found = check_replay(training, arrays, sent)
    assert found.explains and set(found.by_entry) == {str(place) for place in range(6)}
    assert "1.weight, 1.bias stay with the client" in found.sentence()
    body = by_place(list(end.values())[:2])  # a part of what was received is sent
    found = check_replay(training, by_place(received.values()), body)
    assert found.explains and set(found.by_entry) == {"0", "1"}
    extra = {**by_place(received.values()), "11": torch.zeros(3), "12": torch.zeros(4)}
    found = check_replay(training, extra, by_place(end.values()))
    assert found.explains and "2 of 13 received arrays are none of the model's" in found.sentence()


OWN = {
    "conv.weight": (4, 1, 3, 3), "conv.bias": (4,), "bn.weight": (4,), "bn.bias": (4,),
    "bn.running_mean": (4,), "bn.running_var": (4,), "bn.num_batches_tracked": (),
    "fc.weight": (3, 4), "fc.bias": (3,),
}  # fmt: skip
TRAINED = [name for name in OWN if "running" not in name and "num" not in name]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (list(OWN), list(OWN)),
        (TRAINED, TRAINED),
        ([*TRAINED, "fc.bias", "fc.bias"], TRAINED),
        ([name for name in OWN if "bn" not in name],) * 2,
        (["conv.weight", "conv.bias"],) * 2,
        (["fc.weight", "fc.bias"],) * 2,
        (["conv.weight", "fc.weight"],) * 2,
        (["bn.bias", "fc.weight"], []),  # several tensors have its shape
        ([], []),
    ],
)
def test_a_part_is_told_from_order_and_shapes_or_not_at_all(names, found):
    assert in_order([OWN[name] for name in names], OWN, TRAINED) == found


def test_a_part_that_comes_back_as_received_is_personal_and_not_noise():
    """Of pFedPara: what is trained and kept is told of, and the rest is explained."""
    training, received, sent = trained(
        lambda model: steps(
            model, sgd(model.parameters()), lambda m, x, y: F.cross_entropy(m(x), y)
        )
    )
    own = [name for name in received if name.startswith(next(reversed(received)).split(".")[0])]
    back = {**sent, **{name: received[name] for name in own}}
    check = check_replay(training, received, back)
    assert check.residual < 1e-6 and set(check.personal) == set(own)
    assert "were trained, and sent back as received" in check.sentence()
    nothing = check_replay(training, received, received)
    assert not nothing.explains and not nothing.personal
