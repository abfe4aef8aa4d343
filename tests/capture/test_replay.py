"""A captured training explains the update, or the reason why not is named."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from trained import Loop, network, pixels, sgd

from flwr_leakage.capture import Limits, capture, check_replay


def check(limits=None, sent=lambda state: state, **settings):
    loop = Loop(**settings)
    received = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with capture(limits) as recorder:
        loop.run()
    return check_replay(recorder.training(), received, sent(dict(loop.model.state_dict())))


def noise(model):
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter))


EXPLAINED = {
    "sgd": {},
    "momentum, weight decay, Nesterov": {
        "optimizer": lambda p: sgd(p, momentum=0.9, weight_decay=0.01, nesterov=True)
    },
    "Adam": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01)},
    "AdamW": {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01)},
    "epochs, with a small last mini-batch": {"epochs": 2, "batch_size": 5},
    "accumulated gradients": {"accumulate": 3},
    "a step with a closure": {"closure": True},
    "dropout": {"model": network(dropout=0.5)},
    "BatchNorm": {"model": network(batch_norm=True)},
    "mixed precision": {"precision": torch.bfloat16},
    "a loss module": {"loss": lambda m, z, y: nn.CrossEntropyLoss(label_smoothing=0.1)(z, y)},
    "a loss of functions": {"loss": lambda m, z, y: F.nll_loss(F.log_softmax(z, 1), y)},
    "a proximal term": {
        "loss": lambda m, z, y: F.cross_entropy(z, y) + sum((p**2).sum() for p in m.parameters())
    },
    "clipped gradients": {"on_gradients": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01)},
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_training_is_explained(name):
    settings = EXPLAINED[name]
    if "model" in settings:  # a fresh one
        model = settings["model"]
        settings = {**settings, "model": nn.Sequential(*model)}
    found = check(**settings)
    assert found.explains, found.sentence()
    assert found.residual < 1e-5
    assert "explains the update" in found.sentence()


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"before": lambda m: nn.init.normal_(m[-1].weight)}, "6.weight was not the server's"),
        (
            {"after": lambda m: nn.init.normal_(m[-1].weight)},
            "after the last step of the optimizer",
        ),
        ({"on_gradients": noise}, "not by a common factor: noise"),
        (
            {"sent": lambda s: {k: v + 0.1 * torch.randn_like(v) for k, v in s.items()}},
            "of its norm after training",
        ),
    ],
)
def test_what_the_training_does_not_explain_is_named(settings, cause):
    found = check(**settings)
    assert not found.explains
    assert found.residual > 0.01
    assert cause in found.sentence()
    assert "no evidence of safety" in found.sentence()


def test_a_parameter_that_was_written_to_and_not_changed_is_no_cause():
    def touch(model):
        with torch.no_grad():
            model[-1].weight.mul_(1.0)

    found = check(before=lambda m: nn.init.normal_(m[-1].weight), after=touch)
    assert found.causes == ("6.weight was not the server's before training",)


def test_an_update_that_was_clipped_after_training_is_named_with_its_factor():
    start = network().state_dict()
    found = check(sent=lambda s: {k: start[k] + 0.25 * (v - start[k]) for k, v in s.items()})
    assert "scaled by 0.25 after training (clipping)" in found.sentence()


def test_masks_that_a_gpu_draws_are_repeated_and_its_generator_is_left_alone(monkeypatch):
    """A GPU's generator is another one than the CPU's, and it is played by one of the CPU here."""
    gpu = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [gpu.get_state()])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: gpu.set_state(states[0]))

    class Dropout(nn.Module):
        def forward(self, inputs):
            return inputs * (torch.rand(inputs.shape, generator=gpu) > 0.5)

    loop = Loop(model=nn.Sequential(*network(), Dropout()))
    received = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with capture() as recorder:
        loop.run()
    after = gpu.get_state()
    found = check_replay(recorder.training(), received, dict(loop.model.state_dict()))
    assert found.residual < 1e-6
    assert torch.equal(gpu.get_state(), after)


def test_each_layer_has_its_residual():
    found = check(before=lambda m: nn.init.zeros_(m[-1].bias))
    assert found.by_entry["6.bias"] > 1e-3
    assert set(found.by_entry) == set(dict(network().named_parameters()))


def test_beyond_the_limit_steps_are_counted_and_the_first_ones_checked():
    found = check(limits=Limits(max_samples=5))
    assert (found.steps, found.num_steps) == (2, 3)
    assert found.explains
    assert "first 2 of 3 steps" in found.sentence()


def test_noise_is_named_though_not_all_steps_were_kept():
    found = check(limits=Limits(max_samples=5), on_gradients=noise)
    assert "noise" in found.sentence()


def test_what_happened_beyond_the_kept_steps_is_not_taken_for_explained():
    found = check(limits=Limits(max_samples=5), after=lambda m: nn.init.zeros_(m[-1].bias))
    assert not found.explains
    assert "outside of the optimizer" in found.sentence()


def test_nothing_of_the_app_changes_by_a_replay():
    loop = Loop(model=network(batch_norm=True, dropout=0.5))
    received = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with capture() as recorder:
        loop.run()
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    gradients = [p.grad.clone() for p in loop.model.parameters()]
    state = torch.get_rng_state()
    assert check_replay(recorder.training(), received, before).explains
    assert all(torch.equal(v, before[n]) for n, v in loop.model.state_dict().items())
    after = [p.grad for p in loop.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(gradients, after, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_samples_that_were_overwritten_are_not_replayed():
    images = pixels()
    found = check(images=images, after=lambda m: images.zero_())
    assert found.residual is None
    assert "changed in place" in found.sentence()


def test_parts_that_are_called_on_their_own_are_found():
    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
            self.decoder = nn.Linear(2, 36)

    torch.manual_seed(0)
    model = Autoencoder()
    received = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters())
    images = pixels()
    with capture() as recorder:
        F.mse_loss(model.decoder(model.encoder(images)), images.flatten(1)).backward()
        optimizer.step()
    found = check_replay(recorder.training(), received, model.state_dict())
    assert found.explains
    assert len(found.by_entry) == 4
