"""Products with the Jacobian of a plain chain's gradients, as products of matrices.

A network is a chain up to some point if its images pass convolutions, linear layers and ReLUs one
after another. Let its outputs c be worth a functional F, whose slope δ is known. The gradients of F
by the chain's parameters are what a client sends. Derivatives of these by the images are
convolutions again, for a few images of few channels. Autograd spends most of their time on
arranging patches, and on starting operations. Here patches are gathered by an index, and shared by
all that reads them.

With columns a of patches of a layer's inputs, outputs ``z = W a + b`` and errors ``δ = ∂F/∂z`` the
gradient is ``∂F/∂W = δ aᵀ``. Images that move by dx move it by ``dδ aᵀ + δ daᵀ``. The changes dz
pass the chain upward, the changes of errors downward,

    dδ_in = φ'(z) ∘ dδ_out + φ''(z) ∘ dz ∘ δ_out

through a ReLU, and Wᵀ dδ through a layer, where overlapping patches are summed. The transpose runs
the same way: up, then down.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.inversion.blur import relu_parts
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
        gathered: the place in a sample's inputs of each entry of its columns (K · P,), the number
            of inputs for padding; ``None`` where the inputs are the columns.
        scattered: for each input, the places in the columns that hold it (m, n), the number of
            entries for none; ``None`` likewise.
    """

    weight: str
    bias: str
    rows: int
    gathered: Tensor | None = None
    scattered: Tensor | None = None

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
        places = torch.arange(1.0, count + 1, dtype=torch.float64).reshape(1, *shape)
        found = F.unfold(places, tuple(kernel), dilation, padding, stride)[0].long()
        gathered = torch.where(found > 0, found - 1, count).flatten()
        inside = (gathered < count).nonzero()[:, 0]
        order = inside[gathered[inside].argsort(stable=True)]
        uses = gathered[order].bincount(minlength=count)
        number = torch.arange(len(order)) - (uses.cumsum(0) - uses)[gathered[order]]
        scattered = torch.full((int(uses.max()), count), len(gathered))
        scattered[number, gathered[order]] = order
        return cls(weight, bias, len(found), gathered, scattered)

    def columns(self, values: Tensor) -> Tensor:
        """Patches (K, P · B) of inputs (n, B)."""
        if self.gathered is not None:
            values = _take(values, self.gathered)
        return values.reshape(self.rows, -1)

    def summed(self, columns: Tensor, samples: int) -> Tensor:
        """Σ over the places of each input (n, B): the transpose of :meth:`columns`."""
        values = columns.reshape(-1, samples)
        if self.scattered is None:
            return values
        taken = _take(values, self.scattered.flatten())
        return taken.reshape(len(self.scattered), -1).sum(0).reshape(-1, samples)


def _take(values: Tensor, places: Tensor) -> Tensor:
    """Rows of values (n, B) at given places, of which n is a row of zeros."""
    if values.shape[1] == 1:  # rows of one number are dear
        values = values[:, 0]
    return torch.cat([values, torch.zeros_like(values[:1])]).index_select(0, places)


@dataclass(frozen=True)
class Chain:
    """Layers and ReLUs, one after another.

    Attributes:
        layers: the first takes the images.
        relus: shape of a sample's inputs of the ReLU after each layer; ``None`` for none.
        names: of the parameters whose gradients are wanted, in their order.
    """

    layers: Sequence[Layer]
    relus: Sequence[torch.Size | None]
    names: Sequence[str]

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

        A pass is a chain if each of its layers and ReLUs takes what the one before gave, number by
        number, the first takes the images, and the outputs are the last one's. So reshaping and
        dropout in eval mode make no difference, and a normalisation, a pooling or a branch is
        noticed, whatever it is called.

        Args:
            forward: the pass, which takes its parameters from ``params``.
            params: by name.
            names: of those whose gradients are wanted.
            images: what it may take, as far from images as candidates get.
        """
        with torch.no_grad(), _Recorder({id(v): k for k, v in params.items()}) as recorder:
            outputs = forward(images)
        posed: list[Callable[[], Layer]] = []
        used: list[str] = []
        entries = 0
        relus: list[torch.Size | None] = []
        before = images
        for call in recorder.calls:
            if _same(outputs, before):
                break  # what it computes besides
            if not _same(call.inputs, before):
                return None
            before = call.outputs
            if call.layer is not None:
                posed.append(call.layer)
                used += [name for name in call.names if name]
                entries = max(entries, call.entries)
                relus.append(None)
            elif not posed or relus[-1] is not None:
                return None
            else:
                relus[-1] = call.inputs.shape[1:]
        wanted = sorted(name for name in used if name in set(names))
        if recorder.is_foreign or not _same(outputs, before) or wanted != sorted(names):
            return None
        if entries > MOST_ENTRIES:
            return None
        return cls([pose() for pose in posed], relus, names)


def _same(some: Tensor, others: Tensor) -> bool:
    return some.numel() == others.numel() and torch.equal(some.flatten(1), others.flatten(1))


@dataclass(frozen=True)
class _Call:
    """A layer or a ReLU.

    Attributes:
        inputs: what it took.
        outputs: what it gave.
        layer: poses it, ``None`` for a ReLU.
        names: of the layer's weight and bias.
        entries: of a sample's columns.
    """

    inputs: Tensor
    outputs: Tensor
    layer: Callable[[], Layer] | None = None
    names: tuple[str, str] = ("", "")
    entries: int = 0


class _Recorder(FunctionMode):
    """Notes the layers and ReLUs of a pass, with what they take and give.

    Attributes:
        calls: in their order.
        is_foreign: whether a layer was met whose weight is no parameter as it is, or which is no
            product of its patches alone.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.calls: list[_Call] = []
        self.is_foreign = False

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note layers and ReLUs."""
        relu = relu_call(function, args, kwargs)
        if relu is None and function not in _CONVOLUTIONS and function is not F.linear:
            return function(*args, **kwargs)
        inputs = relu.inputs if relu is not None else args[0] if args else kwargs["input"]
        inputs = inputs.detach().clone()  # a ReLU may work in place
        outputs = function(*args, **kwargs)
        call = _Call(inputs, outputs.detach().clone())
        if relu is None:
            found = self._layer(function, call, args[1:], kwargs)
            self.is_foreign |= found is None
            call = found or call
        self.calls.append(call)
        return outputs

    def _layer(
        self,
        function: Callable[..., Any],
        call: _Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Call | None:
        inputs, outputs = call.inputs, call.outputs
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        weight, bias = given["weight"], given.get("bias")
        names = self.names.get(id(weight), ""), self.names.get(id(bias), "")
        if not names[0] or (bias is not None and not names[1]):
            return None
        if function is F.linear:
            pose = partial(Layer, *names, weight.shape[1])
            return replace(call, layer=pose, names=names) if inputs.ndim == 2 else None
        padding = given.get("padding", 0)
        if given.get("groups", 1) != 1 or isinstance(padding, str) or inputs.ndim != 4:
            return None
        stride, dilation = given.get("stride", 1), given.get("dilation", 1)
        settings = (padding, dilation, stride)
        pose = partial(Layer.convolution, *names, weight.shape[2:], inputs.shape[1:], *settings)
        entries = weight[0].numel() * outputs[0, 0].numel()
        return replace(call, layer=pose, names=names, entries=entries)


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


@dataclass(frozen=True)
class _Bend:
    """A ReLU at a point: φ' and φ'', then φ'' times the errors that reach it, (n, B)."""

    slope: Tensor
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
            widths: σ of each ReLU's blur, broadcast to its inputs (B, …); none for no blur.
            top: what outputs (n, B) are worth.
            point: images (B, C, H, W).
        """
        self.products = 0
        self._chain, self._shape, self._samples = chain, point.shape, len(point)
        self._weights = [params[layer.weight].detach().flatten(1) for layer in chain.layers]
        self._sizes = [params[name].numel() for name in chain.names]
        self._columns: list[Tensor] = []
        bends: list[_Bend | None] = []
        values, blurs = _below(point), iter(widths)
        for layer, weight, relu in self._each():
            self._columns.append(layer.columns(values))
            values = weight @ self._columns[-1]
            if layer.bias:
                values = values + params[layer.bias].detach()[:, None]
            values = values.reshape(-1, self._samples)
            if relu is None:
                bends.append(None)
                continue
            width = next(blurs, None)
            if width is not None:
                width = _below(width.expand(self._samples, *relu))
            values, slope, curvature = relu_parts(values, width)
            bends.append(_Bend(slope, curvature))
        found = top(values)
        self._slope, self._curvature = found.slope, found.curvature
        self._errors: list[Tensor] = []
        self._bends: list[_Bend | None] = []
        errors = found.errors
        for layer, weight, bend in zip(
            chain.layers[::-1], self._weights[::-1], bends[::-1], strict=True
        ):
            if bend is not None:
                self._bends.append(replace(bend, curvature=bend.curvature * errors))
                errors = errors * bend.slope
            else:
                self._bends.append(None)
            self._errors.append(errors.reshape(len(weight), -1))
            if layer is not chain.layers[0]:
                errors = layer.summed(weight.T @ self._errors[-1], self._samples)
        self._errors.reverse()
        self._bends.reverse()
        gradients = [e @ c.T for e, c in zip(self._errors, self._columns, strict=True)]
        self.value = self._joined(gradients, self._errors, found.told)

    def push(self, direction: Tensor) -> Tensor:
        """J v (P,), for v of the point's shape."""
        self.products += 1
        moved: list[Tensor] = []  # columns of each layer
        inner: list[Tensor] = []  # what reaches the ReLU behind it
        values = _below(direction)
        for (layer, weight, _), bend in zip(self._each(), self._bends, strict=True):
            moved.append(layer.columns(values))
            values = (weight @ moved[-1]).reshape(-1, self._samples)
            inner.append(values)
            if bend is not None:
                values = values * bend.slope
        told, errors = self._slope * values, self._curvature * values
        gradients: list[Tensor] = []
        changes: list[Tensor] = []
        for index in range(len(moved) - 1, -1, -1):
            layer, weight, bend = (
                self._chain.layers[index],
                self._weights[index],
                self._bends[index],
            )
            if bend is not None:
                errors = torch.addcmul(bend.curvature * inner[index], bend.slope, errors)
            changes.append(errors.reshape(len(weight), -1))
            own = self._errors[index] @ moved[index].T
            gradients.append(torch.addmm(own, changes[-1], self._columns[index].T))
            if index:
                errors = layer.summed(weight.T @ changes[-1], self._samples)
        return self._joined(gradients[::-1], changes[::-1], told)

    def pull(self, dual: Tensor) -> Tensor:
        """Jᵀ u, of the point's shape, for u (P,)."""
        self.products += 1
        weights, biases, told = self._parted(dual)
        inner: list[Tensor] = []
        values: Tensor | None = None
        for index, (layer, weight, _) in enumerate(self._each()):
            moved = torch.addmm(biases[index][:, None], weights[index], self._columns[index])
            if values is not None:
                moved = torch.addmm(moved, weight, layer.columns(values))
            inner.append(moved.reshape(-1, self._samples))
            bend = self._bends[index]
            values = inner[-1] if bend is None else inner[-1] * bend.slope
        assert values is not None
        values = self._slope * told + self._curvature * values
        for index in range(len(inner) - 1, -1, -1):
            layer, weight, bend = (
                self._chain.layers[index],
                self._weights[index],
                self._bends[index],
            )
            if bend is not None:
                values = torch.addcmul(bend.curvature * inner[index], bend.slope, values)
            columns = weight.T @ values.reshape(len(weight), -1)
            columns = torch.addmm(columns, weights[index].T, self._errors[index])
            values = layer.summed(columns, self._samples)
        return values.T.reshape(self._shape)

    def _each(self) -> Iterator[tuple[Layer, Tensor, torch.Size | None]]:
        return zip(self._chain.layers, self._weights, self._chain.relus, strict=True)

    def _joined(self, weights: Sequence[Tensor], errors: Sequence[Tensor], told: Tensor) -> Tensor:
        """Gradients of the wanted names in their order, then what is told, flat."""
        found: dict[str, Tensor] = {}
        for layer, weight, error in zip(self._chain.layers, weights, errors, strict=True):
            found[layer.weight] = weight.reshape(-1)
            if layer.bias:
                found[layer.bias] = error.sum(1)
        return torch.cat([*(found[name] for name in self._chain.names), told.T.reshape(-1)])

    def _parted(self, dual: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """The parts of u that belong to each layer's weight (m, K), its bias (m,) and the outputs.

        Those of parameters whose gradients are not wanted are zero.
        """
        *pieces, told = dual.split([*self._sizes, len(dual) - sum(self._sizes)])
        found = dict(zip(self._chain.names, pieces, strict=True))
        weights, biases = [], []
        for layer, weight, _ in self._each():
            own = found.get(layer.weight)
            weights.append(torch.zeros_like(weight) if own is None else own.reshape(weight.shape))
            biases.append(found.get(layer.bias, torch.zeros_like(weight[:, 0])))
        return weights, biases, told.reshape(self._samples, -1).T


def _below(values: Tensor) -> Tensor:
    """(B, …) as (n, B)."""
    return values.flatten(1).T.contiguous()
