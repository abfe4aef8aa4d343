"""Class counts of whole clients: many steps, Adam, several epochs, with an error of their own."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import pose
from flwr_leakage.attacks.labels.rehearsed import (
    METHODS,
    Shift,
    rehearse,
    rehearsed_steps,
    share_right,
)
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import subtract
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, ThreatModel, Update

SPEC = InputSpec((1, 6, 6), 4, (0.5,), (0.5,))
COUNTS = torch.tensor([60, 24, 0, 12])


def network(bias=True):
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 4, bias=bias)
    return nn.Sequential(*layers)


def problem_of(optimizer="SGD", rate=0.1, epochs=1, batch_size=16, bias=True, seed=1):
    """What a server sees of a client whose images have a bright stripe by their class."""
    stream = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(4), COUNTS)
    images = torch.randn(len(labels), 1, 6, 6, generator=stream)
    images[torch.arange(len(labels)), 0, labels] += 1.0
    model = network(bias)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    steps = getattr(torch.optim, optimizer)(model.parameters(), rate)
    taken = 0
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=stream).split(batch_size):
            steps.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            steps.step()
            taken += 1
    delta = {k: v.detach() for k, v in subtract(model.state_dict(), before).items()}
    update = Update(delta, {}, LocalSchedule(rate, taken, batch_size), len(labels))
    seen = Observation(1, 0, before, {}, update)
    return pose(GradientMap(network(bias)), SPEC, seen, ThreatModel())


CASES = {
    "one step": {"batch_size": 96},
    "an epoch of SGD": {},
    "five epochs of SGD": {"epochs": 5},
    "an epoch of Adam": {"optimizer": "Adam", "rate": 1e-3},
    "five epochs of Adam": {"optimizer": "Adam", "rate": 1e-3, "epochs": 5},
    "no bias": {"bias": False, "epochs": 5},
}


@pytest.mark.parametrize("case", CASES)
def test_the_counts_of_a_client_come_out_of_its_update(case):
    problem = problem_of(**CASES[case])
    found = rehearse(problem, CASES[case].get("optimizer", "SGD")).estimate(problem)
    assert int(found.counts.sum()) == 96
    blind = share_right(torch.full((4,), 24), COUNTS)
    assert share_right(found.counts, COUNTS) > blind + 0.1
    assert 0 < found.least_right <= found.expected_right <= 1
    assert found.expected_right > found.uniform_right


def test_labels_of_one_step_are_nearly_all_right_and_said_to_be():
    problem = problem_of(batch_size=96)
    found = rehearse(problem).estimate(problem)
    assert share_right(found.counts, COUNTS) > 0.97 and found.expected_right > 0.9


def test_the_same_seed_gives_the_same_estimate_and_leaves_the_global_stream_alone():
    problem = problem_of()
    state = torch.get_rng_state()
    one, two = (rehearse(problem, seed=3).estimate(problem) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.counts, two.counts) and one.expected_right == two.expected_right


def test_clients_that_train_alike_share_rehearsals():
    first, second = problem_of(seed=1), problem_of(seed=2)
    shared = rehearse(first).estimate(second)
    assert torch.equal(shared.counts, rehearse(second).estimate(second).counts)


def test_the_sum_of_bias_gradients_is_exact_where_the_mean_softmax_is_known():
    mean, frequencies = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    rate, steps = 0.1, 7
    moved = Shift(mean, mean, torch.zeros(3), -rate * steps * (mean - frequencies))
    found = METHODS["sum of bias gradients"](moved, 1 / (rate * steps))
    torch.testing.assert_close(found, frequencies)


def test_logits_that_shift_by_the_log_of_the_prior_tell_it():
    prior = torch.tensor([0.7, 0.2, 0.1])
    flat = torch.full((3,), 1 / 3)
    shift = Shift(flat, prior, prior.log(), prior.log())
    for name in ("shift of the bias", "shift of the logits", "answers after training"):
        torch.testing.assert_close(METHODS[name](shift, 1.0), prior)


def test_what_cannot_be_repeated_is_refused():
    problem = problem_of()
    with pytest.raises(ValueError, match="that a rehearsal repeats, SGD, Adam, AdamW"):
        rehearse(problem, "LBFGS")
    with pytest.raises(ValueError, match="take more than the CPU seconds"):
        rehearse(problem, max_seconds=1e-6)
    with pytest.raises(ValueError, match="draws must be at least 1"):
        rehearse(problem, draws=0)


def test_neighbouring_sizes_share_the_steps_of_a_rehearsal():
    assert [rehearsed_steps(n) for n in (1, 5, 8)] == [1, 5, 8]
    assert rehearsed_steps(157) == rehearsed_steps(160)
    assert all(abs(rehearsed_steps(n) / n - 1) < 0.12 for n in range(9, 250))


def with_noise(problem, std):
    stream = torch.Generator().manual_seed(7)
    noisy = {
        name: value + std * torch.randn(value.shape, generator=stream)
        for name, value in problem.gradient.items()
    }
    return replace(problem, gradient=noisy)


def test_noise_on_an_update_lowers_what_its_counts_are_expected_to_have_right():
    problem = problem_of(batch_size=96)
    rehearsals = rehearse(problem)
    plain = rehearsals.estimate(problem)
    noisy = rehearsals.estimate(with_noise(problem, 0.1))
    assert noisy.least_right < noisy.expected_right < plain.expected_right - 0.05
    assert share_right(noisy.counts, COUNTS) >= noisy.least_right


def test_noise_that_is_larger_than_the_counts_leaves_nothing_to_say():
    problem = problem_of(batch_size=96)
    with pytest.raises(ValueError, match="hides the class counts"):
        rehearse(problem).estimate(with_noise(problem, 3.0))


def test_zeros_in_the_last_layer_are_no_noise():
    problem = problem_of(batch_size=96)
    name = "3.weight"
    pruned = problem.gradient[name].clone()
    pruned[pruned.abs() < pruned.abs().median()] = 0
    pruned = replace(problem, gradient={**problem.gradient, name: pruned})
    rehearsals = rehearse(problem)
    assert rehearsals.estimate(pruned).expected_right == rehearsals.estimate(problem).expected_right


def test_noise_on_more_steps_than_are_kept_is_refused():
    problem = problem_of(epochs=20)
    with pytest.raises(ValueError, match="rehearsals of more than 100 steps"):
        rehearse(problem, draws=1).estimate(with_noise(problem, 1.0))
