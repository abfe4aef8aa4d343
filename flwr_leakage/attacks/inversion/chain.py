"""Products with the Jacobian of a plain chain's gradients, as products of matrices.

A network is a chain up to some point if its images pass convolutions, linear layers, ReLUs and
pooling one after another. Let its outputs c be worth a functional F, whose slope δ is known. The
gradients of F by the chain's parameters are what a client sends. Derivatives of these by the images
are convolutions again, for a few images of few channels. Autograd spends most of their time on
arranging patches, and on starting operations. Here patches are gathered by an index, and shared by
all that reads them.

With columns a of patches of a layer's inputs, outputs ``z = W a + b`` and errors ``δ = ∂F/∂z`` the
gradient is ``∂F/∂W = δ aᵀ``. Images that move by dx move it by ``dδ aᵀ + δ daᵀ``. The changes dz
pass the chain upward, the changes of errors downward,

    dδ_in = φ'(z) ∘ dδ_out + φ''(z) ∘ dz ∘ δ_out

through a ReLU (pooling likewise, :mod:`~flwr_leakage.attacks.inversion.chain_stages`), and Wᵀ dδ
through a layer, where overlapping patches are summed. The transpose runs the same way: up, then
down.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.inversion.chain_stages import (
    POOLINGS,
    Bend,
    Places,
    Relu,
    Stage,
    below,
    pooling_call,
)
from flwr_leakage.attacks.relus import relu_call
from flwr_leakage.function_mode import FunctionMode
from flwr_leakage.params import Params

MOST_ENTRIES = 1_000_000
"""Of the patches that one sample has in a layer: 36,864 in 3×3 of 16 channels at 16×16 places."""


@dataclass(frozen=True)
class Layer:
    """A convolution, or a linear layer, as a product of matrices.

    Values of a layer are of shape (n, B), those of a sample below one another.

    Attributes:
        weight: the name of W.
        bias: the name of b; empty for none.
        rows: K, entries of a patch.
        places: of each entry of its columns in a sample's inputs (K · P); ``None`` where the inputs
            are the columns.
    """

    weight: str
    bias: str
    rows: int
    places: Places | None = None

    @classmethod
    def convolution(
        cls,
        weight: str,
        bias: str,
        kernel: Sequence[int],
        shape: Sequence[int],
        padding: Any,
        dilation: Any,
        stride: Any,
    ) -> "Layer":
        """Of inputs of a shape (C, H, W); settings as ``F.unfold`` takes them."""
        count = torch.Size(shape).numel()
        numbers = torch.arange(1.0, count + 1, dtype=torch.float64).reshape(1, *shape)
        found = F.unfold(numbers, tuple(kernel), dilation, padding, stride)[0].long()
        gathered = torch.where(found > 0, found - 1, count).flatten()
        return cls(weight, bias, len(found), Places.of(gathered, count))

    def columns(self, values: Tensor) -> Tensor:
        """Patches (K, P · B) of inputs (n, B)."""
        if self.places is not None:
            values = self.places.taken(values)
        return values.reshape(self.rows, -1)

    def summed(self, columns: Tensor, samples: int) -> Tensor:
        """Σ over the places of each input (n, B): the transpose of :meth:`columns`."""
        values = columns.reshape(-1, samples)
        return values if self.places is None else self.places.summed(values)


@dataclass(frozen=True)
class Chain:
    """Layers, ReLUs and pooling, one after another.

    Attributes:
        steps: the first is a layer, which takes the images.
        names: of the parameters whose gradients are wanted, in their order.
    """

    steps: Sequence[Layer | Stage]
    names: Sequence[str]

    @property
    def layers(self) -> list[Layer]:
        """In their order."""
        return [step for step in self.steps if isinstance(step, Layer)]

    @classmethod
    def of(
        cls,
        forward: Callable[[Tensor], Tensor],
        params: Params,
        names: Sequence[str],
        images: Tensor,
    ) -> "Chain | None":
        """The chain that a pass of images (B, C, H, W) is, or ``None`` if it is more than that.

        Layers of large maps are none, either: there autograd's convolutions are as fast, and their
        patches would take much memory.

        A pass is a chain if each of its layers, ReLUs and poolings takes what the one before gave,
        number by number, the first is a layer of the images, and the outputs are the last one's. So
        reshaping and dropout in eval mode make no difference, and a normalisation or a branch is
        noticed, whatever it is called. Windows of pooling lie within their inputs.

        Args:
            forward: the pass, which takes its parameters from ``params``.
            params: by name.
            names: of those whose gradients are wanted.
            images: what it may take, as far from images as candidates get.
        """
        with torch.no_grad(), _Recorder({id(v): k for k, v in params.items()}) as recorder:
            outputs = forward(images)
        used: list[_Call] = []
        before = images
        for call in recorder.calls:
            if _same(outputs, before):
                break  # what it computes besides
            if not _same(call.inputs, before):
                return None
            before = call.outputs
            used.append(call)
        if recorder.is_foreign or not _same(outputs, before) or not (used and used[0].is_layer):
            return None
        found = [name for call in used for name in call.names if name]
        if sorted(name for name in found if name in set(names)) != sorted(names):
            return None
        if max(call.entries for call in used) > MOST_ENTRIES:
            return None
        return cls([call.pose() for call in used], names)


def _same(some: Tensor, others: Tensor) -> bool:
    return some.numel() == others.numel() and torch.equal(some.flatten(1), others.flatten(1))


@dataclass(frozen=True)
class _Call:
    """A layer, a ReLU or a pooling.

    Attributes:
        inputs: what it took.
        outputs: what it gave.
        pose: makes the step of a chain.
        names: of a layer's weight and bias.
        entries: of a sample's columns in a layer.
    """

    inputs: Tensor
    outputs: Tensor
    pose: Callable[[], Layer | Stage]
    names: tuple[str, str] = ("", "")
    entries: int = 0

    @property
    def is_layer(self) -> bool:
        return bool(self.names[0])


class _Recorder(FunctionMode):
    """Notes the layers, ReLUs and poolings of a pass, with what they take and give.

    Attributes:
        calls: in their order.
        is_foreign: whether a layer was met whose weight is no parameter as it is, or which is no
            product of its patches alone, or a pooling whose windows differ.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.calls: list[_Call] = []
        self.is_foreign = False

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note layers, ReLUs and poolings."""
        relu = relu_call(function, args, kwargs)
        is_layer = function in _CONVOLUTIONS or function is F.linear
        if relu is None and not is_layer and function not in POOLINGS:
            return function(*args, **kwargs)
        inputs = relu.inputs if relu is not None else args[0] if args else kwargs["input"]
        inputs = inputs.detach().clone()  # a ReLU may work in place
        outputs = function(*args, **kwargs)
        if not isinstance(outputs, Tensor):  # with the indices of maxima
            self.is_foreign = True
            return outputs
        told = outputs.detach().clone()
        if relu is not None:
            call: _Call | None = _Call(inputs, told, partial(Relu, inputs.shape[1:]))
        elif is_layer:
            call = self._layer(function, inputs, told, args[1:], kwargs)
        else:
            call = _pooling(function, inputs, told, args[1:], kwargs)
        if call is None:
            self.is_foreign = True
        else:
            self.calls.append(call)
        return outputs

    def _layer(
        self,
        function: Callable[..., Any],
        inputs: Tensor,
        outputs: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Call | None:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        weight, bias = given["weight"], given.get("bias")
        names = self.names.get(id(weight), ""), self.names.get(id(bias), "")
        if not names[0] or (bias is not None and not names[1]):
            return None
        if function is F.linear:
            pose: Callable[[], Layer] = partial(Layer, *names, weight.shape[1])
            return _Call(inputs, outputs, pose, names) if inputs.ndim == 2 else None
        padding = given.get("padding", 0)
        if given.get("groups", 1) != 1 or isinstance(padding, str) or inputs.ndim != 4:
            return None
        stride, dilation = given.get("stride", 1), given.get("dilation", 1)
        settings = (padding, dilation, stride)
        pose = partial(Layer.convolution, *names, weight.shape[2:], inputs.shape[1:], *settings)
        entries = weight[0].numel() * outputs[0, 0].numel()
        return _Call(inputs, outputs, pose, names, entries)


def _pooling(
    function: Callable[..., Any],
    inputs: Tensor,
    outputs: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Call | None:
    if inputs.ndim != 4:
        return None
    try:
        found = pooling_call(function, args, kwargs, inputs.shape[1:])
    except ValueError:
        return None
    return _Call(inputs, outputs, lambda: found)


_CONVOLUTIONS = {F.conv2d, torch.conv2d}
_ARGUMENTS = ("weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True)
class Top:
    """What outputs c are worth, each of shape (n, B).

    Attributes:
        told: numbers that are told of c besides the gradients, of each output one.
        slope: of these, by c.
        errors: ∂F/∂c.
        curvature: ∂²F/∂c², of each output by itself.
    """

    told: Tensor
    slope: Tensor
    errors: Tensor
    curvature: Tensor


class ChainLinearization:
    """F's gradients and what is told of the outputs, at a point, and products with their Jacobian.

    It stands for a :class:`~flwr_leakage.attacks.inversion.linearization.Linearization` of a flat
    function: the gradients of the chain's names, then what is told (B, n).

    Attributes:
        value: at the point (P,).
        products: with J or its transpose, so far.
    """

    def __init__(
        self,
        chain: Chain,
        params: Params,
        widths: Sequence[Tensor],
        top: Callable[[Tensor], Top],
        point: Tensor,
    ) -> None:
        """Pass the point up the chain, and the errors down.

        Args:
            chain: the layers.
            params: by name, in the point's precision.
            widths: σ of the blur of each ReLU and max pooling, broadcast to its inputs (B, …); none
                for no blur.
            top: what outputs (n, B) are worth.
            point: images (B, C, H, W).
        """
        self.products = 0
        self._chain, self._shape, self._samples = chain, point.shape, len(point)
        self._sizes = [params[name].numel() for name in chain.names]
        self._at: list[_Reached | Bend] = []
        values, blurs = below(point), iter(widths)
        for step in chain.steps:
            if isinstance(step, Layer):
                weight = params[step.weight].detach().flatten(1)
                columns = step.columns(values)
                values = weight @ columns
                if step.bias:
                    values = values + params[step.bias].detach()[:, None]
                values = values.reshape(-1, self._samples)
                self._at.append(_Reached(step, weight, columns))
                continue
            width = next(blurs, None) if step.has_kinks else None
            if width is not None:
                width = below(width.expand(self._samples, *step.shape))
            values, bend = step.at(values, width)
            self._at.append(bend)
        found = top(values)
        self._slope, self._curvature = found.slope, found.curvature
        errors, gradients, biases = found.errors, [], []
        for index, here in reversed(list(enumerate(self._at))):
            if isinstance(here, _Reached):
                reached = here.by(errors)
                self._at[index] = reached
                gradients.append(reached.errors @ reached.columns.T)
                biases.append(reached.errors)
                if index:
                    errors = reached.down(errors)
            else:
                self._at[index], errors = here.reached_by(errors)
        self.value = self._joined(gradients[::-1], biases[::-1], found.told)

    def push(self, direction: Tensor) -> Tensor:
        """J v (P,), for v of the point's shape."""
        self.products += 1
        moved: list[Tensor] = []  # columns of a layer, inputs of a bend
        values = below(direction)
        for step in self._at:
            if isinstance(step, _Reached):
                moved.append(step.layer.columns(values))
                values = (step.weight @ moved[-1]).reshape(-1, self._samples)
            else:
                moved.append(values)
                values = step.up(values)
        told, errors = self._slope * values, self._curvature * values
        gradients: list[Tensor] = []
        changes: list[Tensor] = []
        for index, step in reversed(list(enumerate(self._at))):
            if isinstance(step, _Reached):
                changes.append(errors.reshape(len(step.weight), -1))
                own = step.errors @ moved[index].T
                gradients.append(torch.addmm(own, changes[-1], step.columns.T))
                if index:
                    errors = step.down(errors)
            else:
                errors = step.down(errors, moved[index])
        return self._joined(gradients[::-1], changes[::-1], told)

    def pull(self, dual: Tensor) -> Tensor:
        """Jᵀ u, of the point's shape, for u (P,)."""
        self.products += 1
        duals, told = self._parted(dual)
        inner: list[Tensor] = []  # inputs of a bend
        values: Tensor | None = None
        parts = iter(duals)
        for step in self._at:
            inner.append(told if values is None else values)
            if isinstance(step, _Reached):
                weights, bias = next(parts)
                moved = torch.addmm(bias[:, None], weights, step.columns)
                if values is not None:
                    moved = torch.addmm(moved, step.weight, step.layer.columns(values))
                values = moved.reshape(-1, self._samples)
            else:
                values = step.up(inner[-1])
        assert values is not None
        values = self._slope * told + self._curvature * values
        for index, step in reversed(list(enumerate(self._at))):
            if isinstance(step, _Reached):
                weights, _ = duals.pop()
                columns = step.weight.T @ values.reshape(len(step.weight), -1)
                columns = torch.addmm(columns, weights.T, step.errors)
                values = step.layer.summed(columns, self._samples)
            else:
                values = step.down(values, inner[index])
        return values.T.reshape(self._shape)

    def _joined(self, weights: Sequence[Tensor], errors: Sequence[Tensor], told: Tensor) -> Tensor:
        """Gradients of the wanted names in their order, then what is told, flat."""
        found: dict[str, Tensor] = {}
        for layer, weight, error in zip(self._chain.layers, weights, errors, strict=True):
            found[layer.weight] = weight.reshape(-1)
            if layer.bias:
                found[layer.bias] = error.sum(1)
        return torch.cat([*(found[name] for name in self._chain.names), told.T.reshape(-1)])

    def _parted(self, dual: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """The parts of u of each layer's weight (m, K) and bias (m,), and those of the outputs.

        Those of parameters whose gradients are not wanted are zero.
        """
        *pieces, told = dual.split([*self._sizes, len(dual) - sum(self._sizes)])
        found = dict(zip(self._chain.names, pieces, strict=True))
        parts = []
        for step in self._at:
            if isinstance(step, _Reached):
                own = found.get(step.layer.weight)
                weight = step.weight
                own = torch.zeros_like(weight) if own is None else own.reshape(weight.shape)
                parts.append((own, found.get(step.layer.bias, torch.zeros_like(weight[:, 0]))))
        return parts, told.reshape(self._samples, -1).T


@dataclass(frozen=True)
class _Reached:
    """A layer at a point: W (m, K), columns of its inputs (K, P · B), errors of its outputs."""

    layer: Layer
    weight: Tensor
    columns: Tensor
    errors: Tensor = field(default_factory=lambda: torch.empty(0))

    def by(self, errors: Tensor) -> "_Reached":
        """The same with errors (n, B)."""
        return replace(self, errors=errors.reshape(len(self.weight), -1))

    def down(self, errors: Tensor) -> Tensor:
        """Wᵀ δ of errors (n, B), summed where patches overlap."""
        columns = self.weight.T @ errors.reshape(len(self.weight), -1)
        return self.layer.summed(columns, errors.shape[1])
