"""The linear layers of a network, found in a pass, and passes with other outputs for one layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Affine, Op
from flwr_leakage.attacks.network.trace import Reader, Run, Trace
from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class LinearUse:
    """One call of a linear layer ``z = W h + c`` in a pass.

    Attributes:
        weight: the name of W (m, n).
        bias: the name of c (m,), or ``None``.
        inputs: h (B, n) of the pass.
        outputs: z (B, m) of the pass.
    """

    weight: str
    bias: str | None
    inputs: Tensor
    outputs: Tensor

    @property
    def name(self) -> str:
        """The name of the layer for messages."""
        return self.weight.removesuffix(".weight")


def traced(problem: Problem, inputs: Tensor) -> Trace:
    """Return the record of a pass of ``inputs`` (B, C, H, W) through a problem's network."""
    return Trace.of(
        lambda: problem.gradient_map.logits(problem.params, inputs, problem.buffers),
        problem.params,
    )


def find_linear_layers(problem: Problem, inputs: Tensor) -> list[LinearUse]:
    """Return the linear layers that a pass of ``inputs`` (B, C, H, W) calls, in their order."""
    found = []
    for step in traced(problem, inputs).linear:
        assert isinstance(step.op, Affine)
        found.append(LinearUse(step.op.name, step.op.bias_name, step.inputs, step.outputs))
    return found


def told_of_computed_weights(problem: Problem) -> str:
    """Return the end of a message about a missing linear layer if weights are computed.

    It is empty if all weights of linear layers are parameters.
    """
    like = next(iter(problem.params.values()))
    with torch.no_grad():
        trace = traced(problem, like.new_zeros(1, *problem.spec.shape))
    ops = [step.op for step in trace.steps]
    if all(op.name for op in ops if isinstance(op, Affine) and not op.is_convolution):
        return ""
    return (
        "; weights of linear layers are computed from other parameters (a parametrization, such as "
        "weight_norm), so that their own gradients are not in the update"
    )


def logits_behind(
    problem: Problem, weight: str, outputs: Tensor, inputs: Tensor | None = None
) -> Tensor:
    """Return the logits (B, K) of a pass with given outputs for one linear layer.

    Args:
        problem: the network.
        weight: the name of the layer's weight.
        outputs: (B, m) outputs in place of the layer's own; the logits are differentiable in them.
        inputs: (B, C, H, W) inputs of the network, for paths around the layer; zeros by default.
    """
    if inputs is None:
        spec = problem.spec
        blank = spec.blank(1, outputs) if spec.is_text else outputs.new_zeros(1, *spec.shape)
        inputs = blank.expand(len(outputs), *spec.shape)
    names = {id(value): name for name, value in problem.params.items()}
    with AtLayer(names, weight, lambda _: outputs.clone()):
        return problem.gradient_map.logits(problem.params, inputs, problem.buffers)


class AtLayer(Reader):
    """The reader that decides about the outputs of one linear layer.

    Args:
        names: the names of the parameters, by the tensors' ``id``.
        weight: the name of the layer's weight.
        answer: map from the layer's inputs (B, n) to its outputs (B, m).
    """

    def __init__(
        self, names: Mapping[int, str], weight: str, answer: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(names)
        self.weight = weight
        self.answer = answer

    def on_op(self, op: Op, run: Run) -> Tensor:
        """Return the outputs of a call; those of the layer are the answer."""
        if isinstance(op, Affine) and op.name == self.weight and not op.is_convolution:
            return self.answer(op.inputs)
        return super().on_op(op, run)
