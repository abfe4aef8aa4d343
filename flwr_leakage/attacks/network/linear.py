"""The linear layers of a network, found in a pass, and passes with other outputs for one layer.

The last one gives the logits. The first one may take the network's input in another order than the
image's (``x.permute(0, 2, 3, 1).flatten(1)``), or scaled; it still determines the image.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.attacks.network.calls import Affine, Op
from flwr_leakage.attacks.network.trace import LinearUse, Run, Trace
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR


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


@dataclass(frozen=True)
class InputOrder:
    """The map ``h = a ∘ x[positions] + c`` from a flattened image x (n,) to a layer's input h.

    Attributes:
        positions: (n,) a permutation of the pixels.
        scale: a (n,), never zero.
        offset: c (n,).
    """

    positions: Tensor
    scale: Tensor
    offset: Tensor

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return the flattened images (…, n) of a layer's inputs (…, n)."""
        return self.moved((inputs - self.offset) / self.scale)

    def moved(self, values: Tensor) -> Tensor:
        """Return values (…, n) in the layer's order as values in the order of the pixels."""
        found = torch.empty_like(values)
        found[..., self.positions] = values
        return found


def input_orders(problem: Problem) -> list[tuple[LinearUse, InputOrder]]:
    """Return the linear layers of a pass that take the whole input, each with its ``InputOrder``.

    Four images are passed through the network. Zeros, ones and rising numbers determine offset,
    scale and positions, and random numbers check them.
    """
    like, size = problem.like, torch.Size(problem.spec.shape).numel()
    rising = torch.linspace(0, 1, size)
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(0))
    probes = torch.stack([torch.zeros(size), torch.ones(size), rising, drawn]).to(like)
    uses = traced(problem, probes.reshape(-1, *problem.spec.shape)).linear
    found = []
    for use in uses:
        if use.inputs.shape != probes.shape:
            continue
        offset, full, ranked, passed = use.inputs
        scale = full - offset
        if not bool(scale.all()):
            continue
        positions = ((ranked - offset) / scale * (size - 1)).round().long()
        if not torch.equal(positions.sort().values, torch.arange(size).to(positions)):
            continue
        expected = scale * probes[3][positions] + offset
        rounding = FLOAT32_RELATIVE_ERROR * float(passed.abs().max())
        if float((expected - passed).abs().max()) <= rounding:
            found.append((use, InputOrder(positions, scale, offset)))
    return found


def find_last_layer(problem: Problem) -> LinearUse:
    """Return the last linear layer of a pass, however the network is written.

    Raises:
        ValueError: no linear layer has one output for each class.
    """
    classes = problem.spec.num_classes
    uses = traced(problem, problem.zeros(2)).linear
    heads = [use for use in uses if use.outputs.shape == (2, *problem.spec.output_shape)]
    if not heads:
        raise ValueError(
            f"the network must end in a linear layer (F.linear, addmm, einsum, x @ W + c) of "
            f"{classes} outputs, one for each class, got {[use.name for use in uses] or 'none'}."
        )
    return heads[-1]


def find_last_bias(problem: Problem, scaled: bool = False, tolerance: float = 1e-4) -> str | None:
    """Return the name of the bias (K,) of the logits, or None if they have no trained bias.

    It is the bias of the last linear layer. Some networks have no such layer, as they end in a
    convolution and its mean over positions. Then it is the last parameter of K numbers each of
    which changes its own logit by its own change. Its gradient is the mean of softmax − onehot. A
    parameter that shifts all logits alike does not count, as the softmax does not depend on it.

    Args:
        problem: the problem of a classifier.
        scaled: whether a number may also change its logit by a share of its change, as if a ReLU
            follows the convolution. For one sample the gradient's signs stay the same.
        tolerance: difference up to which slopes of log-probabilities count as equal (chosen on
            development draws; no table).
    """
    try:
        bias = find_last_layer(problem).bias
        return bias if bias in problem.gradient_map.trained else None
    except ValueError:
        pass  # no linear layer gives the logits
    classes, like = problem.spec.num_classes, problem.like
    stream = torch.Generator().manual_seed(0)
    probes = torch.randn(2, *problem.spec.shape, generator=stream).to(like)
    own = torch.eye(classes).to(like)
    for name in reversed(problem.params):
        value = problem.params[name]
        if value.numel() != classes or name not in problem.gradient_map.trained:
            continue

        def log_softmax(bias: Tensor, name: str = name) -> Tensor:
            params = {**problem.params, name: bias}
            return problem.gradient_map.logits(params, probes, problem.buffers).log_softmax(1)

        slopes = torch.autograd.functional.jacobian(log_softmax, value)
        slopes = slopes.reshape(2, classes, classes)
        softmax = log_softmax(value).exp()[:, None]
        # Logits z + s ∘ b with the softmax p have the slopes (I − 1 pᵀ) diag(s).
        shares = torch.stack([each.diagonal() for each in slopes])[:, None] / (1 - softmax)
        expected = (own - softmax) * shares
        follows = float((slopes - expected).abs().max()) <= tolerance
        follows = follows and bool((shares > -tolerance).all())
        is_whole = bool(((shares - 1).abs() < tolerance).all())
        if follows and bool(shares.any()) and (scaled or is_whole):
            return name
    return None
