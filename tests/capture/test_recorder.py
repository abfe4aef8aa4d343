"""Capturing changes nothing, leaves nothing behind, and says what it could not see."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from trained import CHANGES, Loop, at_the_second_step, network, pixels, sgd

from flwr_leakage.capture import Limits, capture, check_replay


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
        assert isinstance(_get_current_function_mode_stack()[-1], Mode)
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


@pytest.mark.parametrize(("change", "seen"), CHANGES)
def test_what_is_changed_after_the_kept_steps_is_seen(change, seen):
    with capture(Limits(max_samples=1)) as recorder:
        Loop(**at_the_second_step(change)).run()
    training = recorder.training()
    assert training.num_steps == 3
    changed = training.changed_outside or training.changed_at_end
    assert (changed, training.settings_changed) == seen


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


def test_what_a_model_calls_feels_no_hook():
    model, before = Feeling(), hooks()
    with capture(Limits(max_samples=1)) as recorder:
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


def test_an_optimizer_that_comes_after_the_first_step_is_refused_in_words():
    with capture(Limits(max_samples=1)) as recorder:
        model = network()
        Loop(model=model).run()
        Loop(model=model).run()
    assert recorder.training().problem == "two optimizers take steps"


def test_settings_that_cannot_be_compared_count_as_changed():
    made = []

    def make(parameters):
        made.append(sgd(parameters))
        made[0].param_groups[0]["weights"] = torch.zeros(2)
        return made[0]

    def change(model):
        made[0].param_groups[0]["weights"] = torch.zeros(2)

    with capture(Limits(max_samples=1)) as recorder:
        Loop(optimizer=make, on_gradients=change).run()
    assert recorder.training().settings_changed and not recorder.training().problem


def test_a_module_that_takes_no_hook_is_seen_all_the_same():
    model = torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
    before = hooks()
    with capture(Limits(max_samples=1)) as recorder:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.zeros(1, 2, 3, 3))
        Loop(model=model).run()
    assert recorder.training().num_steps == 3 and not recorder.training().problem
    assert hooks() == before


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(36, 36)
        self.head = nn.Linear(36, 3)

    def forward(self, images, deeper=2):
        flat = self.inner(images.flatten(1))
        return self(flat, deeper - 1) if deeper else self.head(flat)


def test_only_the_outermost_call_of_a_model_that_calls_itself_counts():
    model = Recursive()
    received = {name: value.clone() for name, value in model.state_dict().items()}
    with capture() as recorder:
        Loop(model=model).run()
    assert recorder.training().batch_sizes == (4, 4, 4)
    assert check_replay(recorder.training(), received, model.state_dict()).residual == 0.0


def test_a_function_may_be_traced_while_it_looks():
    with capture() as recorder:
        traced = torch.jit.trace(lambda values: values * 2, torch.ones(2))
        assert torch.equal(traced(torch.ones(2)), torch.full((2,), 2.0))
        Loop().run()
    assert not recorder.training().problem


def test_before_a_compiled_function_no_window_is_open():
    original, open_windows = torch.compile, len(_get_current_function_mode_stack())
    with capture() as recorder:
        assert len(_get_current_function_mode_stack()) == open_windows + 1
        torch.compile(lambda values: values, backend="eager")
        assert len(_get_current_function_mode_stack()) == open_windows
        Loop().run()
        assert len(_get_current_function_mode_stack()) == open_windows
    assert torch.compile is original
    assert recorder.training().num_steps == 3 and not recorder.training().problem
