"""The linear layers of a network, found in a pass, and passes with other outputs for one layer."""

from functools import partial

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Affine, Op
from flwr_leakage.attacks.network.trace import Run, Trace
from flwr_leakage.attacks.problem import Problem


def traced(problem: Problem, inputs: Tensor | None = None) -> Trace:
    """Return the record, without autograd, of a pass through a problem's network.

    Args:
        problem: the problem with the network.
        inputs: (B, C, H, W); one input of zeros by default.
    """
    run = partial(problem.logits, problem.zeros(1) if inputs is None else inputs)
    with torch.no_grad():
        return Trace.of(run, problem.params)


def told_of_computed_weights(problem: Problem) -> str:
    """Return the end of a message about a missing linear layer if weights are computed.

    It is empty if all weights of linear layers are parameters.
    """
    ops = [step.op for step in traced(problem).steps]
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
        inputs = problem.zeros(1).expand(len(outputs), *problem.spec.shape)

    def answer(op: Op, run: Run) -> Tensor:
        found: Tensor = outputs.clone() if isinstance(op, Affine) and op.is_layer(weight) else run()
        return found

    run = partial(problem.logits, inputs)
    logits: Tensor = Trace.of(run, problem.params, answer, records=False).outputs
    return logits
