"""Repeat a captured training that begins from given parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flwr_leakage.capture.names import NamedTensor
from flwr_leakage.capture.tape import Backward, play
from flwr_leakage.capture.training import CapturedTraining, copy_optimizer, copy_root, rate_of
from flwr_leakage.params import Params


def replay(
    training: CapturedTraining, names: Mapping[str, NamedTensor], start: Mapping[str, Tensor]
) -> Params:
    """Return the model's parameters and buffers after the captured steps from given start values.

    Copies of the modules and of the optimizer, of whatever class, take the captured steps on the
    captured batches: with the same learning rates, order, dropout masks (by the random generator's
    state) and mixed precision. If something changed the gradients before a step in the training,
    the replay's gradients are clipped or scaled to the norm that the changed ones had. The live
    modules are not touched.

    Args:
        training: the captured training.
        names: the parameters and buffers to return, as ``name_tensors`` finds them.
        start: the values to begin with, keyed as ``names``. Missing ones begin with the values
            before the captured training.

    Returns:
        The values after the steps, keyed as ``names``.

    Raises:
        ValueError: a tensor was changed after it was used, or the loss uses a trained parameter or
            model that belongs to no captured module.
    """
    memo: dict[int, Any] = {}
    modules = [copy_root(root.copy, memo) for root in training.roots]
    for module in modules:
        # Opacus adds hooks for per-sample gradients to a model, which a replay does not need.
        if callable(disable := getattr(module, "disable_hooks", None)):
            disable()
    if training.optimizer is None:
        raise ValueError("no optimizer was captured")
    optimizer = copy_optimizer(training.optimizer, memo)
    translated: dict[int, Any] = {}
    for root, module in zip(training.roots, modules, strict=True):
        # Submodules are mapped to their copies, too, as a loss may take one as an argument.
        parts = dict(module.named_modules())
        found = [(n, live) for n, live in root.live.named_modules() if n in parts]
        translated.update((id(live), parts[name]) for name, live in found)
        pairs = zip(root.live.parameters(), module.parameters(), strict=True)
        translated.update((id(live), ours) for live, ours in pairs)

    def translate(thing: Any) -> Any:
        if (
            isinstance(thing, nn.Module)
            and id(thing) not in translated
            and any(id(p) in training.held for p in thing.parameters())
        ):
            raise ValueError("the loss takes a model that is in no module that was called")
        if isinstance(thing, Tensor) and id(thing) not in translated:
            if id(thing) in training.held:
                raise ValueError("the loss has a parameter that is in no module that was called")
            # A tensor without a copy is a constant, such as the server's parameters in FedProx.
            return thing.detach()
        return translated.get(id(thing), thing)

    states = [module.state_dict(keep_vars=True) for module in modules]
    ours = {name: states[named.root][named.own_name] for name, named in names.items()}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        with torch.no_grad():
            for name, value in start.items():
                if name in ours:
                    ours[name].copy_(value)
        parameters = [p for module in modules for p in module.parameters()]
        names_of = {id(ours): key for key, ours in translated.items()}
        rate: float | None = None
        of_gradients = training.correction is not None and training.correction.of_gradients
        for step in training.steps:
            if rate is not None and not of_gradients:
                _correct(training, translated, rate)
            rate = rate_of(step.options)
            for group, options in zip(optimizer.param_groups, step.options, strict=True):
                group.update(options)
            optimizer.zero_grad()
            for backward in step.backwards:
                for parameter in parameters:
                    parameter.requires_grad_(names_of[id(parameter)] not in backward.frozen)
                _backward(backward, translate)
            if of_gradients:
                _correct(training, translated, -1.0)
            elif step.rescaled_to is not None:
                _rewrite(parameters, step.rescaled_to, step.clipped_to)
            optimizer.step()
        if training.complete and rate is not None and not of_gradients:
            _correct(training, translated, rate)
    return {name: value.detach() for name, value in ours.items()}


def _backward(backward: Backward, translate: Any) -> None:
    results = play(backward.entries, translate)
    loss = results[backward.loss.entry][backward.loss.leaf]
    loss.backward(None if backward.gradient is None else backward.gradient.get())


def _correct(training: CapturedTraining, translated: Mapping[int, Any], rate: float) -> None:
    """Add the training's correction to the copied parameters, or to their gradients.

    A replay calls this after each step if the correction is of parameters, and before it if it is
    of gradients. ``translated`` are the copied parameters by the ids of the live ones. ``rate`` is
    the factor of ``training.correction.per_rate``: the step's learning rate for parameters, −1 for
    gradients.
    """
    if (correction := training.correction) is not None:
        with torch.no_grad():
            for key, change in correction.per_rate.items():
                if (ours := translated.get(key)) is not None:
                    ours = ours.grad if correction.of_gradients else ours
                    if ours is not None:
                        ours.add_(change, alpha=rate)


_CLOSE = 1e-3
"""The relative difference up to which the norm of the replay's clipped gradients counts as the norm
that the gradients had in the training. If it differs more, the gradients are scaled instead."""


def _rewrite(parameters: list[nn.Parameter], norm: float, largest: float | None) -> None:
    """Clip all gradients to ±``largest``; if their norm is not ``norm`` then, scale them to it
    instead.

    ``norm`` is the Euclidean norm of all gradients together that the captured training had.
    ``largest`` is the bound of clipping by value, ``None`` if there was no such clipping.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    with torch.no_grad():
        if largest is not None:
            clipped = [gradient.clamp(-largest, largest) for gradient in gradients]
            if abs(float(_norm(clipped)) - norm) <= _CLOSE * norm:
                for gradient, value in zip(gradients, clipped, strict=True):
                    gradient.copy_(value)
                return
        own = _norm(gradients)
        for gradient in gradients:
            gradient.mul_(norm / own)


def _norm(gradients: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
