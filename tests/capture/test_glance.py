"""A glance at a training sees its start, settings, steps and end by the optimizer alone."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from trained import CHANGES, Loop, at_the_second_step, network, sgd

from flwr_leakage.capture import Glance, Limits, TrainingFacts, capture, facts_of

NAMES = [name for name, _ in network().named_parameters()]


def none_differ(tensors):
    return []


def glance(names=NAMES, not_received=none_differ, **settings):
    with Glance(names, not_received) as seen:
        Loop(**settings).run()
    return seen


def hooks():
    return len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_what_is_changed_after_the_first_step_is_seen(change, expected, closure):
    changed, set_anew = expected
    seen = glance(closure=closure, **at_the_second_step(change))
    words = "could not be told" if closure else "changed by something else than the optimizer"
    assert [words in cause for cause in seen.causes(none_differ)] == [True] * changed
    facts = seen.facts(TrainingFacts("SGD", 0.1))
    assert facts.num_steps == 3
    assert bool(facts.unscheduled) == set_anew


class Unfreezing(nn.Module):
    """Its second layer has a gradient from the second step on, or in the second one only."""

    def __init__(self, stays):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(36, 3), nn.Linear(36, 3)
        self.stays, self.calls = stays, 0

    def forward(self, images):
        self.calls += 1
        flat = images.flatten(1)
        used = self.calls == 2 or (self.stays and self.calls > 2)
        return self.first(flat) + (self.second(flat) if used else 0)


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("closure", [True, False])
def test_a_parameter_that_is_trained_in_some_steps_is_changed_by_nobody_else(stays, closure):
    seen = glance(["a", "b", "c", "d"], model=Unfreezing(stays), closure=closure, epochs=2)
    assert not seen.causes(none_differ)
    assert seen.facts(TrainingFacts("SGD", 0.1)).num_steps == 6


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_it_tells_the_facts_that_a_capture_tells(optimizer):
    def loop():
        return Loop(
            model=network(batch_norm=True, dropout=0.2), epochs=2,
            optimizer=lambda p: getattr(torch.optim, optimizer)(p, lr=0.01, weight_decay=0.1),
        )  # fmt: skip

    with capture() as recorder:
        loop().run()
    told = facts_of(recorder.training(), 12)
    known = replace(told, learning_rate=1.0, weight_decay=0.0, num_steps=1, optimizer="")
    names = [name for name, _ in loop().model.named_parameters()]
    with Glance(names, none_differ) as seen:
        loop().run()
    assert seen.facts(known) == replace(told, repeated=True)
    assert seen.writes == recorder.training().writes == 0


@pytest.mark.parametrize("names", [NAMES, NAMES[1:]])
def test_what_is_set_after_the_last_step_is_of_no_step(names):
    made = []

    def make(parameters):
        made.append(sgd(parameters))
        return made[0]

    def run():
        made.clear()
        Loop(optimizer=make, after=lambda model: made[0].param_groups[0].update(lr=0.05)).run()

    with Glance(names, none_differ) as seen:
        run()
    facts = seen.facts(TrainingFacts("Adam", 1.0))  # told of other parameters, too
    assert (facts.optimizer, facts.num_steps, facts.unscheduled) == ("SGD", 3, "")
    with capture(Limits(max_samples=1)) as recorder:
        run()
    assert not recorder.training().settings_changed


def test_no_facts_are_told_where_no_step_was_seen():
    with Glance(NAMES, none_differ) as seen:
        pass
    with pytest.raises(ValueError, match="no step"):
        seen.facts(TrainingFacts("SGD", 0.1))


def test_gradients_that_an_earlier_round_left_are_none_of_a_closures_step():
    model = network()
    clip = {"on_gradients": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3)}
    assert [glance(model=model, closure=True, **clip).writes for _ in range(2)] == [-1, -1]


def test_start_and_end_are_compared_by_name():
    def differing(tensors):
        return [name for name, value in tensors.items() if value.shape == (8,)]

    seen = glance(not_received=differing)
    start, end = seen.causes(differing)
    assert start == "3.bias was not the server's before training"
    assert "changed after training" in end
    assert glance(["", *NAMES[1:]]).causes(lambda tensors: list(tensors))[0].startswith(NAMES[1])


def test_clipping_shows_in_the_writes_to_the_gradients():
    clipped = glance(on_gradients=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3))
    assert clipped.writes > glance().writes


@pytest.mark.parametrize(
    ("names", "loop", "words"),
    [
        (NAMES[1:], Loop(), "other parameters than when it was replayed"),
        (NAMES, Loop(optimizer=lambda p: sgd([{"params": [x]} for x in p])), None),
        (NAMES, None, "no step of a torch.optim.Optimizer was seen in this thread"),
    ],
)
def test_what_it_cannot_see_is_said(names, loop, words):
    with Glance(names, none_differ) as seen:
        if loop is not None:
            loop.run()
    assert [words in cause for cause in seen.causes(none_differ)] == [True] * (words is not None)


def test_two_optimizers_and_other_threads():
    with Glance(NAMES, none_differ) as seen:
        other = threading.Thread(target=Loop().run)
        other.start()
        other.join()
        assert "in this thread" in seen.causes(none_differ)[0]
        model = network()
        Loop(model=model).run()
        Loop(model=model).run()
    assert seen.causes(none_differ) == ("two optimizers take steps",)


def test_a_look_that_fails_leaves_the_training_alone():
    def broken(tensors):
        raise ZeroDivisionError("no memory")

    before = hooks()
    seen = glance(not_received=broken)
    assert seen.causes(none_differ) == ("no memory",)
    with pytest.raises(RuntimeError, match="loop"), Glance(NAMES, none_differ):
        raise RuntimeError("in the loop")
    assert hooks() == before
