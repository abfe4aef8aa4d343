"""Capturing changes nothing, leaves nothing behind, and says what it could not see."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from trained import Loop, network, pixels, sgd

from flwr_leakage.capture import Glance, Limits, capture


def hooks():
    return (
        len(modules._global_forward_hooks),
        len(modules._global_forward_pre_hooks),
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
        len(_get_current_function_mode_stack()),
    )


@pytest.mark.parametrize("closure", [False, True])
def test_a_training_is_the_same_to_the_last_bit(closure):
    settings = {"closure": closure, "epochs": 2, "optimizer": lambda p: sgd(p, momentum=0.9)}
    plain = Loop(model=network(batch_norm=True, dropout=0.5), **settings).run().state_dict()
    state = torch.get_rng_state()
    with capture():
        seen = Loop(model=network(batch_norm=True, dropout=0.5), **settings).run().state_dict()
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


def test_no_hook_is_left_after_an_error():
    before = hooks()
    with pytest.raises(ZeroDivisionError), capture():
        F.cross_entropy(network()(pixels()), torch.zeros(12, dtype=torch.int64))
        raise ZeroDivisionError
    assert hooks() == before


def test_a_failed_forward_does_not_end_the_capture():
    model = network()
    with capture() as recorder:
        with pytest.raises(RuntimeError):
            model(torch.zeros(1, 2, 3, 3))
        Loop(model=model).run()
    assert recorder.training().num_steps == 3
    assert not recorder.training().problem


def test_a_failure_of_the_capture_is_no_failure_of_the_training(monkeypatch):
    def fail(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("flwr_leakage.capture.recorder.copy_root", fail)
    plain = Loop().run().state_dict()
    with capture() as recorder:
        seen = Loop().run().state_dict()
    assert recorder.training().problem == "out of luck"
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


def test_another_thread_is_not_captured():
    other = threading.Thread(target=Loop().run)
    with capture() as recorder:
        other.start()
        other.join()
    assert recorder.training().num_steps == 0


def test_two_threads_are_captured_each_on_its_own():
    found = {}

    def train(batch_size):
        with capture() as recorder:
            Loop(batch_size=batch_size).run()
        found[batch_size] = recorder.training()

    threads = [threading.Thread(target=train, args=(size,)) for size in (3, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {size: training.num_steps for size, training in found.items()} == {3: 4, 6: 2}
    assert not any(training.problem for training in found.values())


def test_evaluation_is_not_taken_for_training():
    model = network()
    with capture() as recorder:
        with torch.no_grad():
            model(pixels(5))
        Loop(model=model).run()
        with torch.no_grad():
            model(pixels(5))
    assert recorder.training().batch_sizes == (4, 4, 4)


def test_a_mode_of_the_users_own_stays_where_it_was():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    before = _get_current_function_mode_stack()
    with capture() as recorder, Mode():
        Loop().run()
        assert len(_get_current_function_mode_stack()) == len(before) + 1
    assert _get_current_function_mode_stack() == before
    assert "torch function mode" in recorder.training().problem


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (lambda model: None, "no step of a torch.optim.Optimizer"),
        (
            lambda model: Loop(
                model=model, closure=True, optimizer=lambda p: torch.optim.LBFGS(p)
            ).run(),
            "LBFGS",
        ),
    ],
)
def test_what_cannot_be_captured_is_said(train, words):
    with capture() as recorder:
        train(network())
    assert words in recorder.training().problem


def test_two_optimizers_are_refused_in_words():
    with capture() as recorder:
        model = network()
        first, second = sgd(model[0].parameters()), sgd(model[-1].parameters())
        F.cross_entropy(model(pixels()), torch.zeros(12, dtype=torch.int64)).backward()
        first.step()
        second.step()
    assert recorder.training().problem == "two optimizers take steps"


def test_no_tensor_is_printed():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    with capture() as recorder:
        Loop(model=model).run()
    training = recorder.training()
    assert "tensor(" not in repr(training.steps[0].backwards[0])


@pytest.mark.parametrize(("copies", "closure"), [(False, False), (False, True), (True, False)])
def test_what_is_changed_after_the_first_step_is_seen(copies, closure):
    def captured(change):
        optimizers, calls = [], []

        def make(parameters):
            optimizers.append(sgd(parameters, momentum=0.9))
            return optimizers[0]

        def at_the_second_step(model):
            calls.append(model)
            if len(calls) == 2:
                change(model, optimizers[0].param_groups[0])

        with capture(Limits(max_samples=1), copies=copies) as recorder:
            Loop(optimizer=make, on_gradients=at_the_second_step, closure=closure).run()
        seen = recorder.training()
        assert seen.num_steps == 3
        changed = seen.changed_outside or seen.changed_at_end or seen.unclear_within
        assert seen.unclear_within == (closure and changed)  # the optimizer may have done it
        return changed, seen.settings_changed

    def shift(model, group):
        with torch.no_grad():
            model[0].bias.add_(1)

    assert captured(lambda model, group: None) == (False, False)
    assert captured(shift) == (True, False)
    assert captured(lambda model, group: group.update(lr=0.05)) == (False, True)


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
    with capture(Limits(max_samples=1), copies=False) as recorder:
        Loop(model=Unfreezing(stays), closure=closure, epochs=2).run()
    seen = recorder.training()
    assert seen.num_steps == 6
    assert not (seen.changed_outside or seen.changed_at_end or seen.unclear_within)


@pytest.mark.parametrize(
    ("closure", "words"),
    [(False, "changed by something else than the optimizer"), (True, "could not be told")],
)
def test_a_look_accuses_nobody_of_what_a_closure_may_have_done(closure, words):
    def shift(model):
        calls.append(model)
        if len(calls) == 2:
            with torch.no_grad():
                model[0].bias.add_(1)

    calls, looks = [], Glance(network().state_dict(), lambda _: [])
    with capture(Limits(max_samples=1), copies=False, begins=looks.begin) as recorder:
        Loop(on_gradients=shift, closure=closure).run()
    (found,) = looks.causes(recorder.training(), lambda _: [])
    assert words in found


class Feeling(nn.Module):
    """Says which hooks the modules that it calls would feel."""

    def __init__(self, fails=False):
        super().__init__()
        self.inner, self.fails, self.felt = nn.Linear(36, 3), fails, None

    def forward(self, images):
        self.felt = hooks()[:2]
        if self.fails:
            raise ZeroDivisionError
        return self.inner(images.flatten(1))


@pytest.mark.parametrize("copies", [True, False])
def test_what_a_model_calls_feels_no_hook(copies):
    model, before = Feeling(), hooks()
    with capture(Limits(max_samples=1), copies=copies) as recorder:
        Loop(model=model).run()
    assert model.felt == before[:2]
    assert not model._forward_hooks and hooks() == before
    assert recorder.training().num_steps == 3 and not recorder.training().problem


def test_a_call_that_fails_raises_its_own_error_and_keeps_no_hook():
    model, before = Feeling(fails=True), hooks()
    with capture() as recorder:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(pixels())
        model.fails = False
        Loop(model=model).run()
    assert recorder.training().num_steps == 3 and not recorder.training().problem
    assert not model._forward_hooks and hooks() == before


@pytest.mark.parametrize("copies", [True, False])
def test_an_optimizer_that_comes_after_the_first_step_is_refused_in_words(copies):
    with capture(Limits(max_samples=1), copies=copies) as recorder:
        model = network()
        Loop(model=model).run()
        Loop(model=model).run()
    assert recorder.training().problem == "two optimizers take steps"


@pytest.mark.parametrize("copies", [True, False])
def test_settings_that_cannot_be_compared_count_as_changed(copies):
    made = []

    def make(parameters):
        made.append(sgd(parameters))
        made[0].param_groups[0]["weights"] = torch.zeros(2)
        return made[0]

    def change(model):
        made[0].param_groups[0]["weights"] = torch.zeros(2)

    with capture(Limits(max_samples=1), copies=copies) as recorder:
        Loop(optimizer=make, on_gradients=change).run()
    assert recorder.training().settings_changed and not recorder.training().problem


def test_a_model_is_shown_before_its_first_call_and_once():
    shown, model = [], network()
    before = [p.detach().clone() for p in model.parameters()]
    with capture(begins=lambda m: shown.append([p.detach().clone() for p in m.parameters()])):
        Loop(model=model).run()
    (seen,) = shown
    assert all(map(torch.equal, seen, before))
