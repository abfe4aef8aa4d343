"""Read a network as a chain of layers, in whatever way its code is written.

Layers are recognised by the functions that compute them, not by modules: ``F.relu`` and
``nn.ReLU``, ``view`` and ``nn.Flatten``, a module called twice or a function written by hand give
the same chain. A pass of random values shows whether a layer takes the outputs of the layer before
it, and whether several calls, such as ``(z + z.abs()) / 2``, compute a ReLU.

Attacks go through the chain from the last layer to the first. A :class:`Level` is a layer whose
outputs, and the derivatives of the loss with respect to its outputs, are known. :func:`solve_layer`
gives the input of such a layer.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.weight_equations import Whitened, weight_equations
from flwr_leakage.attacks.network.activations import IDENTITY, RELU, Activation, Elementwise
from flwr_leakage.attacks.network.calls import Affine, Geometry, Normalise, Op
from flwr_leakage.attacks.network.trace import Step, Trace, same_values
from flwr_leakage.attacks.optimizers.base import of_one
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem

LEAST_SINGULAR = 1e-4
"""Share of the largest singular value of a layer's equations below which an equation is left out.
At this share, noise of 1e-6 of the gradient (``FLOAT32_NOISE``) is 1 % of the equation's value. A
smaller share lets noisier equations in, and a larger one leaves more of the input unknown."""


@dataclass(frozen=True)
class Link:
    """One layer of a chain: φ(z) with z = scale · (W ∗ a + b) + shift, for an input a.

    W ∗ a is a convolution, or the product W a of a linear layer.

    Attributes:
        name: the prefix of the names of the layer's parameters.
        geometry: kernel, padding and stride of a convolution; ``None`` for a linear layer.
        input_shape: shape of a for one sample, without the batch.
        output_shape: shape of z for one sample, without the batch.
        weight: W (C, …) of C output channels or units.
        bias: b (C,); zero if the layer has none.
        scale: (C,) factors of a BatchNorm with fixed statistics; 1 without BatchNorm.
        shift: (C,) offsets of that BatchNorm; 0 without BatchNorm.
        activation: φ; the identity for the last layer.
        weight_gradient: ∂L/∂W of the one sample that is sought, as observed.
        bias_gradient: ∂L/∂b of that sample. If only BatchNorm has a bias, ∂L/∂b is computed from
            the gradient of that bias. It is ``None`` if neither has one.
    """

    name: str
    geometry: Geometry | None
    input_shape: torch.Size
    output_shape: torch.Size
    weight: Tensor
    bias: Tensor
    scale: Tensor
    shift: Tensor
    activation: Activation
    weight_gradient: Tensor
    bias_gradient: Tensor | None

    @property
    def num_channels(self) -> int:
        """Number of output channels of a convolution, or of units of a linear layer."""
        return len(self.scale)

    @property
    def gain(self) -> Tensor:
        """The standard deviation ``|scale_o| ‖W_o‖`` of z in each channel o, (C,), for white noise.

        The noise is the layer's input a, with independent entries of variance 1, and z is
        ``scale · (W ∗ a + b) + shift``.
        """
        return self.scale.abs() * self.weight.flatten(1).norm(dim=1)

    def linear(self, inputs: Tensor) -> Tensor:
        """Return ``W ∗ a`` (B, *output_shape) for a layer's weight W and inputs (B, *input_shape).

        It is a convolution, or the product W a of a linear layer.
        """
        if self.geometry is None:
            return inputs.flatten(1) @ self.weight.T
        _, dilation, padding, stride = self.geometry
        return F.conv2d(inputs, self.weight, None, stride, padding, dilation)

    def scaled(self, inputs: Tensor) -> Tensor:
        """Return the change ``scale · (W ∗ d)`` (B, *output_shape) of a layer's preactivations.

        d (B, *input_shape) is a change of the layer's input. ``scale`` (C,) holds the factors of
        the BatchNorm behind the layer, 1 without BatchNorm.
        """
        outputs = self.linear(inputs)
        return per_channel(self.scale, outputs) * outputs

    def preactivation(self, inputs: Tensor) -> Tensor:
        """Return ``z = scale · (W ∗ a + b) + shift`` (B, *output_shape) for inputs a of a layer.

        The inputs have the shape (B, *input_shape). ``scale`` and ``shift`` (C,) stand for the
        BatchNorm behind the layer.
        """
        outputs = self.linear(inputs)
        scale, shift, bias = (
            per_channel(values, outputs) for values in (self.scale, self.shift, self.bias)
        )
        return scale * (outputs + bias) + shift

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return a layer's outputs φ(z) (B, *output_shape) for inputs (B, *input_shape).

        φ is the activation behind the layer, and z are its preactivations.
        """
        return self.activation.function(self.preactivation(inputs))

    def patches(self, inputs: Tensor) -> Tensor:
        """Return the patches of a layer's input (1, *input_shape), one for each output position.

        Returns:
            A matrix (K, P). Its column p holds the K entries of the input that meet the K weights
            of an output channel at position p. The product of the matrix with a channel's
            ``∂L/∂(W ∗ a)`` (P,) is that channel's ``∂L/∂W`` (K,).
        """
        if self.geometry is None:
            return inputs.reshape(-1, 1)
        return self.geometry.patches(inputs)[0]

    def pull_back(self, errors: Tensor) -> Tensor:
        """Return the derivatives ∂L/∂a (B, *input_shape) of the loss by a layer's inputs a.

        ``errors`` are the derivatives ∂L/∂(W ∗ a) (B, *output_shape), with the layer's weight W.
        """
        zeros = torch.zeros(len(errors), *self.input_shape, dtype=errors.dtype)
        pull = torch.func.vjp(self.linear, zeros)[1]
        return pull(errors)[0]

    def equations(self, errors: Tensor, channels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return M and T of the weight gradient's equations ``M a = T`` for the layer's input a.

        M (O, K, P) has O output channels, K kernel entries and P input positions; T is (O, K, C),
        for C channels of a. The ``errors`` are ∂L/∂(W ∗ a), (1, *output_shape), of the one sample.
        ``channels`` is true for the O output channels whose equations are returned; by default all.
        """
        gradient = self.weight_gradient
        if channels is not None:
            errors, gradient = errors[:, channels], gradient[channels]
        return weight_equations(errors, gradient, self.input_shape, self.geometry)


def per_channel(values: Tensor, outputs: Tensor) -> Tensor:
    """Return one value per channel (C,), reshaped to broadcast over outputs (B, C, …)."""
    return values.reshape((-1,) + (1,) * (outputs.ndim - 2))


def features_of(links: Iterable[Link], inputs: Tensor) -> Tensor:
    """Return the outputs of the last of several successive layers, for an input of the first.

    The layers stand in the order of a pass. The input has the shape (B, *input_shape).
    """
    for link in links:
        inputs = link.outputs(inputs)
    return inputs


def _may_be_link(op: Op) -> bool:
    if isinstance(op, Elementwise):
        return op.activation.inverse is not None
    if isinstance(op, Affine):
        return bool(op.name) or op.is_convolution
    return isinstance(op, Normalise)


def trace_chain(problem: Problem) -> list[Link]:
    """Return the layers of a model that is a chain of convolutions or linear layers, in order.

    Activations stand between the layers, and each belongs to the layer before it. So does a
    BatchNorm with fixed statistics, as the layer's ``scale`` and ``shift``. Flattening is allowed
    anywhere, and log-softmax at the end.

    Raises:
        ValueError: the model is no such chain (branches, pooling, another function, BatchNorm with
            batch statistics, padding with different numbers of zeros on both sides, groups, a layer
            that is frozen or used twice). The message names the layer that does not take the
            outputs of the layer before it, and the unknown calls between the two, with their lines
            in the model.
    """
    like = problem.like
    # A layer follows another if its inputs are that layer's outputs. A pass of random values shows
    # whether they are equal.
    stream = torch.Generator().manual_seed(0)
    probe = torch.rand(1, *problem.spec.shape, dtype=like.dtype, generator=stream)
    steps, unlinked, logits = _walked(problem, probe)
    links: list[Link] = []
    previous, used = probe, set[str]()
    for number, step in enumerate(steps):
        called = ", ".join(dict.fromkeys(unlinked[number]))
        name = _name(step.op)
        what = repr(name.removesuffix(".weight")) if name else "an activation"
        follows = same_values(step.inputs, previous)
        if number > 0 and not follows and _is_relu(problem, probe, number):
            _extend(links, Step(Elementwise(previous, RELU), step.inputs), "an activation", problem)
            follows = True
        if not follows:
            raise ValueError(
                f"the model must be a chain of layers; {what} does not take the outputs of the "
                "layer before it" + (f" (called there: {called})." if called else ".")
            )
        if name and name in used:
            raise ValueError(f"{what} cannot be part of a chain, as it is used twice.")
        if name in problem.params and name not in problem.gradient_map.trained:
            raise ValueError(f"{what} is frozen: its gradient is not in the update.")
        used.add(name)
        previous = step.outputs
        _extend(links, step, what, problem)
    # Cross-entropy has the same gradient for log-probabilities as for logits, so that a chain may
    # end in either.
    ends = same_values(logits, previous) or same_values(logits, previous.log_softmax(-1))
    if not links or not ends or links[-1].activation is not IDENTITY:
        called = ", ".join(dict.fromkeys(unlinked[-1]))
        raise ValueError(
            "the model must be a chain that ends in a linear layer"
            + (f" (called at its end: {called})." if called else ".")
        )
    if links[-1].geometry is not None:
        raise ValueError("the model's last layer must be linear.")
    return links


def _walked(problem: Problem, probe: Tensor) -> tuple[list[Step], list[list[str]], Tensor]:
    """Return the calls of a pass that may belong to a chain of layers, and describe the others.

    ``probe`` (1, C, H, W) is the input of the pass.

    Returns:
        The n calls that may belong to a chain; n + 1 lists, one for each of these calls and one for
        the end of the pass, which describe all other calls right before it that changed values; and
        the logits.
    """
    trace = Trace.of(partial(problem.logits, probe), problem.params, notes_all=True)
    steps: list[Step] = []
    unlinked: list[list[str]] = [[]]
    for step in trace.steps:
        if _may_be_link(step.op):
            steps.append(step)
            unlinked.append([])
        elif step.called:
            unlinked[-1].append(step.called)
    return steps, unlinked, trace.outputs


def _name(op: Op) -> str:
    """Return the parameter name of the weight of a layer or BatchNorm; empty for any other call."""
    return op.name if isinstance(op, Affine | Normalise) else ""


def _is_relu(problem: Problem, probe: Tensor, number: int) -> bool:
    """Return whether a recorded call takes the ReLU of the outputs of the recorded call before it.

    ``number`` is the index of the call among those that :func:`_walked` returns, which are calls of
    layers and activations. One pass takes ``probe`` (1, C, H, W), and a second one takes 1e4 times
    ``probe``; the inputs must be the ReLU in both.
    """
    for factor in (1, 1e4):  # ReLU6 equals a ReLU for small numbers only
        steps, _, _ = _walked(problem, factor * probe)
        if number >= len(steps):  # all inputs were positive, so that a mask shows no ReLU
            return False
        if not same_values(steps[number].inputs, steps[number - 1].outputs.clamp_min(0)):
            return False
    return True


def _extend(links: list[Link], step: Step, what: str, problem: Problem) -> None:
    """Append a layer to a chain, or merge a BatchNorm or an activation into its last layer.

    The list ``links`` is changed in place. ``step`` is the recorded call of the layer, BatchNorm or
    activation, and ``what`` its name for messages.

    Raises:
        ValueError: the call does not fit behind the last layer of the chain.
    """
    if isinstance(step.op, Affine):
        if links and links[-1].activation is IDENTITY:
            raise ValueError(f"an activation must precede {what}.")
        links.append(_link(step.op, step.outputs, what, problem))
        return
    if not links or links[-1].activation is not IDENTITY:
        raise ValueError(f"{what} cannot be part of a chain: no layer is right before it.")
    last = links[-1]
    if isinstance(step.op, Elementwise):
        links[-1] = replace(last, activation=step.op.activation)
        return
    assert isinstance(step.op, Normalise)
    mean, variance = step.op.mean, step.op.variance
    if mean is None or variance is None:
        raise ValueError("BatchNorm must use given statistics, got those of the batch.")
    mean, std = mean.to(last.weight), (variance.to(last.weight) + step.op.eps).sqrt()
    gain = problem.params.get(step.op.name, torch.ones_like(std)) / std
    offset = problem.params.get(step.op.bias_name, torch.zeros_like(std))
    scale, shift = gain * last.scale, gain * (last.shift - mean) + offset
    found = last.bias_gradient
    if found is None and step.op.bias_name in problem.gradient:
        found = scale * problem.gradient[step.op.bias_name]
    links[-1] = replace(last, scale=scale, shift=shift, bias_gradient=found)


def _link(op: Affine, outputs: Tensor, what: str, problem: Problem) -> Link:
    """Return the layer of a chain for a call, with its gradients, without BatchNorm and activation.

    ``op`` is the linear layer or convolution that was called, ``outputs`` are the call's outputs,
    and ``what`` is the layer's name for messages.

    Raises:
        ValueError: the layer's weight is no trained parameter, or the layer takes several vectors.
    """
    if op.name not in problem.gradient:
        raise ValueError("a layer's weight must be a parameter of the model as it is.")
    weight = problem.params[op.name]
    if not op.is_convolution and op.inputs.numel() != weight.shape[1]:
        raise ValueError(f"{what} must take one vector of a sample, got several.")
    zeros = weight.new_zeros(weight.shape[0])
    return Link(
        name=op.name.removesuffix("weight"),
        geometry=op.geometry,
        input_shape=op.inputs.shape[1:],
        output_shape=outputs.shape[1:],
        weight=weight,
        bias=problem.params.get(op.bias_name or "", zeros),
        scale=torch.ones_like(zeros),
        shift=zeros,
        activation=IDENTITY,
        weight_gradient=problem.gradient[op.name],
        bias_gradient=problem.gradient.get(op.bias_name or ""),
    )


@dataclass(frozen=True)
class Level:
    """A layer of a chain with known outputs φ(z), and linear equations for its input a.

    The layer computes z = scale · (W ∗ a + b) + shift.

    Attributes:
        link: the layer.
        known: the known values of the outputs φ(z), and bounds of the unknown ones, (1,
            *output_shape).
        errors: the derivatives ∂L/∂(W ∗ a) of the loss, (1, *output_shape).
        equations: the linear equations about a that the layer's weight gradient gives.
    """

    link: Link
    known: Known
    errors: Tensor
    equations: Whitened

    @classmethod
    def of(cls, link: Link, known: Known, output_errors: Tensor) -> "Level":
        """Return a layer with known outputs, and the equations that it gives for its input.

        ``known`` holds the known values of the outputs behind the activation, and
        ``output_errors`` the derivatives of the loss by these outputs, both in any shape. The
        equations come from the gradient of the layer's weight.
        """
        shape = (1, *link.output_shape)
        known = known.map(lambda each: each.reshape(shape))
        assert link.activation.slope is not None
        errors = output_errors.reshape(shape)
        if link.activation.is_relu:
            errors = torch.where(known.mask.on, errors, 0.0)
        else:
            errors = errors * link.activation.slope(known.values)
        errors = errors * per_channel(link.scale, errors)
        equations = Whitened.by_svd(*link.equations(errors), LEAST_SINGULAR)
        return cls(link, known, errors, equations)

    @property
    def input_errors(self) -> Tensor:
        """The derivative ∂L/∂a of the loss by the layer's input a, (1, *input_shape)."""
        return self.link.pull_back(self.errors)

    def forward_residual(self, inputs: Tensor) -> Tensor:
        """Return differences (1, *output_shape) of ``z(a)`` from the z that the known outputs give.

        z are the preactivations of the layer, and a is its input (1, *input_shape). The differences
        are divided by the mean of the layer's :attr:`Link.gain`, and so are in the units of a.
        Where an output φ(z) determines z, the difference is weighted by the slope φ'(z), relative
        to the largest slope. An output may give only a bound on z, as a ReLU's zero does. Then only
        the excess of ``z(a)`` over the bound counts. Unknown outputs give 0.
        """
        link, outputs, activation = self.link, self.known.values, self.link.activation
        z = link.preactivation(inputs)
        assert activation.slope is not None
        binds, target = activation.binds(z, outputs), activation.target(outputs)
        slope = activation.slope(outputs)
        invertible = activation.invertible(outputs)
        weight = torch.where(invertible, slope / slope.max().clamp_min(1e-30), 1.0)
        residual = torch.where(binds & self.known.told, z - target, 0.0)
        return weight * residual / link.gain.mean().clamp_min(1e-30)


def solve_layer(
    level: Level, low: Tensor | float, high: Tensor | float, iterations: int
) -> tuple[Tensor, float]:
    """Return the input a of a layer with an invertible activation, by a convex problem.

    The equations ``M a = ∂L/∂W`` of the layer's weight gradient hold exactly. So a is one of their
    solutions plus a vector of M's null space. At most ``iterations`` of L-BFGS choose the vector by
    least squares: the forward equations ``z(a) = φ⁻¹(outputs)`` should hold, and the entries of a
    lie in [``low``, ``high``].

    Returns:
        a (1, *input_shape), and the mean squared residual divided by the mean square of a.
    """
    equations = level.equations
    null = equations.null_space()
    channels, freedom = equations.values.shape[1], null.shape[1]
    start = torch.zeros(1, freedom * channels, dtype=equations.rows.dtype)

    def to_inputs(flat: Tensor) -> Tensor:
        solution = equations.rows.T @ equations.values + null @ flat.reshape(freedom, channels)
        return solution.T.reshape(1, *level.link.input_shape)

    def residuals(flat: Tensor) -> Tensor:
        inputs = to_inputs(flat)
        outside = (low - inputs).clamp_min(0) + (inputs - high).clamp_min(0)
        forward = level.forward_residual(inputs)
        return torch.cat([forward.flatten(), outside.flatten()])

    if freedom:
        unit = float(residuals(start[0]).square().mean().clamp_min(1e-30))
        evaluate = of_one(lambda flat: residuals(flat).square().mean() / unit)
        optimizer = LBFGS(iterations, tolerance=1e-20, relative_tolerance=1e-3)
        start = optimizer(evaluate, start).points
    solution = to_inputs(start)
    error = residuals(start[0]).square().mean() / solution.square().mean().clamp_min(1e-30)
    return solution, float(error)
