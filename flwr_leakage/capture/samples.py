"""Read samples, loss and schedule off a captured training, for scores and attacks."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from flwr_leakage.capture.names import NamedTensor
from flwr_leakage.capture.tape import Autocast, Backward, Constant, Entry, Value, play
from flwr_leakage.capture.training import CapturedTraining, sgd_settings
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import Loss
from flwr_leakage.records import Batch, LocalSchedule
from flwr_leakage.schedules import no_sgd

CPU = torch.device("cpu")
"""The device to which captured tensors are copied for scores and attacks, wherever the client
trained."""


@dataclass(frozen=True)
class TapedLoss:
    """A function of logits and targets that repeats the loss of a captured training."""

    entries: tuple[Entry, ...]
    loss: Value

    @property
    def tail(self) -> tuple[Entry, ...]:
        """Return the recorded calls, without the two entries that stand for logits and targets."""
        return self.entries[2:]

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, a scalar, of logits and targets with the shapes of the captured ones."""
        given = {Value(0, 0): logits, Value(1, 0): targets}
        value: Tensor = play(self.entries, lambda thing: thing, given)[self.loss.entry][
            self.loss.leaf
        ]
        return value


@dataclass(frozen=True)
class ShiftedLoss:
    """A captured loss of the next token, as a function of the logits and the texts' token ids.

    Attributes:
        loss: the captured loss, a function of logits and of the targets that the app made from the
            texts.
        is_flat: whether the app's targets have the shape (B (T − 1),), and not (B, T − 1), for B
            texts of T tokens.
        replaced: (token id, value): the app puts the value, which the loss ignores, in the place of
            this token id, mostly the padding's; ``None`` if no id is replaced.
    """

    loss: Loss
    is_flat: bool
    replaced: tuple[int, int] | None = None

    def __call__(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the loss, a scalar, of logits (B, T, V) and of the token ids (B, T) of B texts.

        There are T tokens in a text, and V token ids.
        """
        targets = ids[:, 1:]
        if self.replaced is not None:
            targets = targets.masked_fill(targets == self.replaced[0], self.replaced[1])
        return self.loss(logits, targets.flatten() if self.is_flat else targets)


@dataclass(frozen=True)
class LossCall:
    """One call of the model, and the loss that is computed from its output.

    Attributes:
        root: the index of the called module among ``CapturedTraining.roots``.
        batch: the inputs and targets; texts are their own targets if the loss is of the next token.
        num_outputs: the number K of logits if the model returns (B, K); 0 otherwise.
        loss: the loss, a function of logits and targets that returns a scalar.
    """

    root: int
    batch: Batch
    num_outputs: int
    loss: Loss


def read_loss_call(training: CapturedTraining, backward: Backward) -> LossCall:
    """Return the inputs, the targets and the loss of a recorded ``loss(model(inputs), targets)``.

    ``backward`` is the call of ``backward`` on the loss, with all recorded calls before it.

    Raises:
        ValueError: the loss has another form; the message says which.
    """
    roots = {id(root.live): index for index, root in enumerate(training.roots)}
    number, call, inputs = _one_call(
        (number, entry)
        for number, entry in enumerate(backward.entries)
        if id(entry.function) in roots and _is_trained(training, entry)
    )
    if has_parameter_term(training, backward):
        raise ValueError("the loss has a term in the parameters, such as FedProx's")
    if number != 0:
        raise ValueError("the model was called with what another module returned")
    tail = backward.entries[1:]
    if not tail:
        raise ValueError("the model computes its loss itself")
    leaves = [leaf for entry in tail for leaf in entry.inputs()]
    if any(isinstance(leaf, Constant) and leaf.tensor is inputs for leaf in leaves):
        raise ValueError("the loss takes the inputs beside the model's output, as MOON's does")
    outputs = {leaf for leaf in leaves if isinstance(leaf, Value) and leaf.entry == 0}
    if len(outputs) != 1:
        raise ValueError("the loss uses several outputs of the model")
    shifted = _shifted(inputs, leaves)
    if shifted is not None:
        taped = _taped(tail, outputs.pop(), shifted[0], backward.loss)
        loss = ShiftedLoss(taped, shifted[0].tensor.ndim == 1, shifted[1])
        return LossCall(roots[id(call.function)], Batch(inputs, inputs).to(CPU), 0, loss)
    found = {
        id(leaf.tensor): leaf
        for leaf in leaves
        if isinstance(leaf, Constant) and leaf.tensor.shape[:1] == inputs.shape[:1]
    }
    if len(found) != 1:
        raise ValueError(f"the loss uses {len(found)} tensors of the batch's size as targets")
    (targets,) = found.values()
    batch = Batch(inputs, targets.get()).to(CPU)
    shape = call.shapes.get(next(iter(outputs)).leaf, ())
    num_outputs = shape[1] if len(shape) == 2 else 0
    own = _plain(tail) or _taped(tail, outputs.pop(), targets, backward.loss)
    return LossCall(roots[id(call.function)], batch, num_outputs, own)


def _shifted(
    inputs: Tensor, leaves: Iterable[object]
) -> tuple[Constant, tuple[int, int] | None] | None:
    """Return the loss's argument that has the next token of each position of the inputs (B, T).

    The second entry of the result is (token id, value) if the app replaced this id by the value in
    the targets, else ``None``. The result is ``None`` if no argument holds the next tokens.
    ``leaves`` are the arguments of the recorded calls of the loss.
    """
    if inputs.ndim != 2 or inputs.is_floating_point() or inputs.shape[1] < 3:
        return None
    behind = inputs[:, 1:]
    for leaf in leaves:
        if not isinstance(leaf, Constant) or leaf.tensor.is_floating_point():
            continue
        if leaf.tensor.shape not in (behind.shape, (behind.numel(),)):
            continue
        told = leaf.get().reshape(behind.shape).to(behind.device)
        differs = told != behind
        if not bool(differs.any()):
            return leaf, None
        ids, values = behind[differs].unique(), told[differs].unique()
        if len(ids) == len(values) == 1 and torch.equal(behind == ids, differs):
            return leaf, (int(ids), int(values))
    return None


def _one_call(found: Iterable[tuple[int, Entry]]) -> tuple[int, Entry, Tensor]:
    """Return the index of the only recorded call of a model, the call, and its only input tensor.

    ``found`` are pairs (index, call) of the recorded calls of models.

    Raises:
        ValueError: there are no calls or several, or the call has not exactly one input tensor.
    """
    calls = list(found)
    if len(calls) != 1:
        raise ValueError(f"a loss needs {len(calls)} calls of modules, expected one of a model")
    number, call = calls[0]
    tensors = [leaf.tensor for leaf in call.inputs() if isinstance(leaf, Constant)]
    if len(tensors) != 1:
        raise ValueError(f"the model was called with {len(tensors)} tensors, expected one input")
    return number, call, tensors[0]


def _is_trained(training: CapturedTraining, entry: Entry) -> bool:
    model = entry.function
    return isinstance(model, nn.Module) and any(id(p) in training.held for p in model.parameters())


def has_parameter_term(training: CapturedTraining, backward: Backward) -> bool:
    """Return whether trained parameters enter the loss other than by the model's output.

    Examples are FedProx, whose loss takes the parameters, and a loss module that takes the model as
    an argument.
    """
    leaves = (leaf for entry in backward.entries for leaf in entry.inputs())
    return any(
        any(id(p) in training.held for p in leaf.parameters())
        if isinstance(leaf, nn.Module)
        else isinstance(leaf, Tensor) and id(leaf) in training.held
        for leaf in leaves
    )


@dataclass(frozen=True)
class SeenInputs:
    """The inputs of the trained model's only call, and the targets that its loss compares.

    Attributes:
        inputs: the input tensor, whose first dimension counts the B samples.
        targets: the B class ids; ``None`` if the loss takes no tensor of class ids, or several.
        num_outputs: the number K of logits if the loss takes an output (B, K) with B class ids; 0
            otherwise.
        num_targets: the number of tensors of class ids that the loss takes with the output; MixUp
            has two.
    """

    inputs: Tensor
    targets: Tensor | None
    num_outputs: int
    num_targets: int = 1


def see_inputs(training: CapturedTraining, backward: Backward) -> SeenInputs:
    """Return the inputs of the trained model and the targets, from the recorded calls before
    ``backward``.

    Raises:
        ValueError: the model was not called exactly once with one tensor.
    """
    number, call, inputs = _one_call(
        (number, entry)
        for number, entry in enumerate(backward.entries)
        if _is_trained(training, entry)
    )
    found: list[tuple[Constant, int]] = []
    for entry in backward.entries[number + 1 :]:
        leaves = entry.inputs()
        ids = [
            leaf for leaf in leaves
            if isinstance(leaf, Constant)
            and leaf.tensor.shape == inputs.shape[:1]
            and not leaf.tensor.is_floating_point()
        ]  # fmt: skip
        shapes = [
            call.shapes.get(leaf.leaf, ()) for leaf in leaves
            if isinstance(leaf, Value) and leaf.entry == number
        ]  # fmt: skip
        if len(ids) == 1 and len(shapes) == 1 and len(shapes[0]) == 2:
            found.append((ids[0], shapes[0][1]))
    if not found:
        return SeenInputs(inputs, None, 0, 0)
    different = {id(ids.tensor) for ids, _ in found}
    targets = found[0][0].get() if len(different) == 1 else None
    return SeenInputs(inputs, targets, found[0][1], len(different))


_MEAN_CROSS_ENTROPY: Mapping[str, Any] = {
    "weight": None, "size_average": None, "ignore_index": -100, "reduce": None,
    "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip
"""All arguments of ``F.cross_entropy`` besides logits and targets, in order, with their default
values. A call with these values is the mean cross-entropy."""


def cross_entropy_settings(entry: Entry) -> dict[str, Any] | None:
    """Return the arguments of a recorded cross-entropy besides logits and targets, by name.

    The result is ``None`` if the recorded call is none of ``F.cross_entropy`` or
    ``nn.CrossEntropyLoss``.
    """
    function, (args, kwargs) = entry.function, entry.arguments
    if function is F.cross_entropy:
        named = dict(zip(("input", "target", *_MEAN_CROSS_ENTROPY), args, strict=False))
        return {**_MEAN_CROSS_ENTROPY, **named, **kwargs}
    if type(function) is nn.CrossEntropyLoss:
        names = [name for name in _MEAN_CROSS_ENTROPY if hasattr(function, name)]
        return {**_MEAN_CROSS_ENTROPY, **{name: getattr(function, name) for name in names}}
    return None


def _plain(tail: tuple[Entry, ...]) -> Loss | None:
    """Return ``F.cross_entropy`` if the captured loss is the mean cross-entropy, else ``None``.

    ``tail`` are the recorded calls after that of the model.
    """
    settings = cross_entropy_settings(tail[0]) if len(tail) == 1 else None
    if settings is None or settings["weight"] is not None:
        return None
    is_mean = all(settings[name] == value for name, value in _MEAN_CROSS_ENTROPY.items())
    return F.cross_entropy if is_mean else None


def _taped(tail: tuple[Entry, ...], output: Value, targets: Constant, loss: Value) -> TapedLoss:
    nothing = Entry(_never, ((), {}), None, Autocast("cpu", False, torch.bfloat16))

    def renumber(leaf: object) -> object:
        if leaf == output:
            return Value(0, 0)
        if isinstance(leaf, Value):
            return Value(leaf.entry + 1, leaf.leaf)
        if isinstance(leaf, Constant) and leaf.tensor is targets.tensor:
            return Value(1, 0)
        if isinstance(leaf, Constant) and leaf.tensor.device != CPU:
            tensor = leaf.get().to(CPU)
            return Constant(tensor, tensor._version)
        return leaf

    moved = tuple(_on_cpu(entry.map(renumber)) for entry in tail)
    return TapedLoss((nothing, nothing, *moved), Value(loss.entry + 1, loss.leaf))


def _on_cpu(entry: Entry) -> Entry:
    """Return a recorded call with the tensors of its module, such as class weights, on the CPU."""
    function = entry.function
    if isinstance(function, nn.Module) and any(
        tensor.device != CPU for tensor in (*function.parameters(), *function.buffers())
    ):
        return replace(entry, function=copy.deepcopy(function).to(CPU))
    return entry


def _never() -> None:
    raise ValueError("this entry's result is given")


def captured_batches(training: CapturedTraining) -> list[LossCall]:
    """Return the samples and the loss of every recorded mini-batch, in the order of use.

    Raises:
        ValueError: nothing was captured, or a loss is no function of a model's output and targets.
    """
    if training.problem:
        raise ValueError(training.problem)
    return [read_loss_call(training, backward) for backward in training.backwards]


def drops_out(training: CapturedTraining) -> bool:
    """Return whether a recorded call drew random numbers, as dropout does."""
    return any(
        entry.states is not None for backward in training.backwards for entry in backward.entries
    )


def captured_gradient_map(
    training: CapturedTraining, names: Mapping[str, NamedTensor], call: LossCall
) -> GradientMap:
    """Return the gradient map of the captured model and loss, with parameters named as received.

    ``names`` are the captured tensors by received name, and ``call`` the call of model and loss.

    Raises:
        ValueError: the received arrays are not named as the model's parameters and buffers.
    """
    model = training.roots[call.root].copy
    own = {named.own_name: name for name, named in names.items() if named.root == call.root}
    for wrapper in ("_module", "module", "_orig_mod"):
        inner = getattr(model, wrapper, None)
        if isinstance(inner, nn.Module) and len(inner.state_dict()) == len(model.state_dict()):
            model, own = inner, {k.removeprefix(f"{wrapper}."): v for k, v in own.items()}
    if {own.get(name) for name in model.state_dict()} != set(names) or any(
        own[name] != name for name in model.state_dict()
    ):
        raise ValueError("the called model's arrays have other names than those that were received")
    return GradientMap(model, call.loss, training.batch_norm or "running")


def captured_schedule(training: CapturedTraining, num_examples: int) -> LocalSchedule:
    """Return the schedule of the captured training on ``num_examples`` samples.

    Raises:
        ValueError: a ``LocalSchedule`` cannot express the training; the message says why.
    """
    if training.problem:
        raise ValueError(training.problem)
    if training.optimizer_class is None:
        raise ValueError("no optimizer was captured")
    frozen = {backward.frozen for backward in training.backwards}
    if len(frozen) > 1:
        raise ValueError("parts of the model were trained in turns, as FedRep's head and body")
    if training.correction is not None:
        raise ValueError(
            "each step was followed by the same change of the parameters (control variates, as "
            "SCAFFOLD's), which no attack here takes into account"
        )
    options = [group for step in training.steps for group in step.options]
    check_settings(training.optimizer_class, options, training.settings_changed)
    if any(len(step.backwards) != 1 for step in training.steps):
        raise ValueError("gradients were accumulated over several mini-batches")
    rewritten = [step for step in training.steps if step.rescaled_to is not None]
    if rewritten and all(step.clipped_to is not None for step in rewritten):
        raise ValueError("gradients were clipped by value between backward and a step")
    if rewritten:
        raise ValueError(
            "gradients were changed between backward and a step (clipping, noise or control "
            "variates)"
        )
    schedule = LocalSchedule(
        num_steps=training.num_steps,
        batch_size=max(training.batch_sizes),
        **sgd_settings(options),
    )
    in_order = takes_in_order(training, num_examples)
    if not in_order or len(training.batch_sizes) != training.num_steps:
        raise ValueError("its mini-batches are not those of its number of samples in order")
    return schedule


def takes_in_order(training: CapturedTraining, num_examples: int) -> bool:
    """Return whether the mini-batches have the sizes of consecutive batches from a fixed order.

    Consecutive batches cut ``num_examples`` samples into pieces of one size, of which only the last
    in each epoch is smaller.
    """
    if not training.batch_sizes or num_examples < 1:
        return False
    schedule = LocalSchedule(1.0, len(training.batch_sizes), max(training.batch_sizes))
    sizes = [window.stop - window.start for window in schedule.slices(num_examples)]
    return sizes == list(training.batch_sizes)


def check_settings(
    optimizer: type[Optimizer], settings: Sequence[Mapping[str, Any]], changed: bool
) -> None:
    """Check that a ``LocalSchedule`` can express the optimizer and its settings.

    ``settings`` are those of each group of parameters in each observed step. ``changed`` says that
    the settings changed in steps that were only counted.

    Raises:
        ValueError: a schedule cannot express them; the message says why.
    """
    if not issubclass(optimizer, SGD):
        raise ValueError(no_sgd(optimizer.__name__))
    first = settings[0]
    if changed or any({**each, "initial_lr": 0} != {**first, "initial_lr": 0} for each in settings):
        raise ValueError("the learning rate or another setting differs between steps or groups")
    for name in ("nesterov", "maximize", "dampening"):
        if first[name]:
            raise ValueError(f"SGD with {name} is not replayed by attacks")


def private_samples(training: CapturedTraining, num_examples: int) -> Batch:
    """Return the samples that the steps used, each once: those of the first epoch, in order of use.

    ``num_examples`` is the number of samples that the client reports.

    Raises:
        ValueError: a later epoch took the samples in another order, which no schedule expresses; or
            ``num_examples`` is the number of mini-batches instead of that of samples.
    """
    try:
        batches = [call.batch for call in captured_batches(training)]
    # If the loss is no function of one model's output and targets, the inputs and class ids may be
    # known all the same.
    except ValueError:
        seen = [see_inputs(training, backward) for backward in training.backwards]
        pairs = [(each.inputs, each.targets) for each in seen if each.targets is not None]
        if training.problem or not seen or len(pairs) < len(seen):
            raise
        batches = [Batch(inputs, targets).to(CPU) for inputs, targets in pairs]
    joined = Batch.concatenate(batches)
    count = min(num_examples, sum(training.batch_sizes))
    if len(joined) < count and not training.complete:
        return joined
    first, later = joined[:count], joined[count:]
    for start in range(0, len(later), count):
        part = later[start : start + count]
        if not torch.equal(part.inputs, first.inputs[: len(part)]):
            if count == len(training.batch_sizes):
                raise ValueError(
                    f"{count} samples are reported, as many as mini-batches were seen, of "
                    f"{len(joined)} samples that do not repeat: report len(loader.dataset) in the "
                    f"place of len(loader)"
                )
            raise ValueError("a later epoch took the samples in another order, or changed them")
    return first
