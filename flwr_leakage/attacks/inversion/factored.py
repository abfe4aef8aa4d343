"""Products of gradients without the gradients, for convolutional networks.

The weight gradient of a layer is ``∂L/∂W = Σ_p δ_p a_pᵀ`` over positions p, with a_p the patch
of its input and δ_p the error of its output. Objectives that are functions of the inner product
⟨g, g*⟩ and of ‖g‖² alone do not need it:

    ⟨g, g*⟩ = Σ_p ⟨δ_p, g* a_p⟩,    ‖g‖² = Σ_pq ⟨a_p, a_q⟩ ⟨δ_p, δ_q⟩.

For a layer with few positions, as all deep layers have, this avoids the weight gradient, its
derivative and their memory traffic. With F the cost of a forward pass, an evaluation costs 6 F
instead of 7 F, and writes no array of the parameters' size. For a layer with many positions, the
weight gradient is formed as usual.

One pass through the network also serves all targets, as only the products with each target's g*
differ. On small networks, where the start of an operation costs more than the operation itself,
these products are also formed for all targets at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flwr_leakage.attacks.inversion.factored_layers import Matrices, convolution_products, convolve
from flwr_leakage.attacks.network.calls import Affine, Normalise, read_call
from flwr_leakage.attacks.network.trace import Reader
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params

FEW_POSITIONS = 64
"""Largest number of positions per sample for which a convolution is computed as a product of
matrices. On a CPU, the libraries' direct convolutions were faster on larger maps only (no table).
"""


class UnsupportedError(ValueError):
    """A model, an update or an objective cannot be evaluated by products of gradients."""


@dataclass(frozen=True)
class _Recorded:
    """One use of a layer's parameters, as a pass through the network recorded it.

    Attributes:
        names: the names of the weight and of the bias, either of which may be missing.
        inputs: the inputs of all samples, in the form that ``kind`` names: (S, F) of a linear
            layer, patches (S, P, F), images (S, C, H, W), or normalised images.
        outputs: the outputs of all samples, before any activation.
        kind: ``patches`` (linear layers included), ``images``, or ``normalised``.
        settings: stride, padding and dilation of a convolution of images.
    """

    names: tuple[str | None, str | None]
    inputs: Tensor
    outputs: Tensor
    kind: str
    settings: tuple[Any, ...] = ()


class _Recorder(Reader):
    """Records every layer that a pass uses, and computes convolutions of few positions as products.

    Such a convolution multiplies its patches with a matrix, and the products of gradients use the
    same patches.
    """

    def __init__(self, names: Mapping[int, str], matrices: Matrices, few_positions: int) -> None:
        super().__init__(names)
        self.matrices = matrices
        self.few_positions = few_positions
        self.layers: list[_Recorded] = []

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a call's outputs; calls that take parameters are replaced and recorded."""
        used = [v for v in (*args, *kwargs.values()) if id(v) in self.names]
        if not used:
            return function(*args, **kwargs)
        op = read_call(function, args, kwargs)
        if isinstance(op, Normalise):
            return self._normalize(op)
        if isinstance(op, Affine):
            return self._convolve(op) if op.is_convolution else self._linear(op)
        raise UnsupportedError(f"{function} of parameter {self.names[id(used[0])]!r}")

    def _note(
        self,
        op: Affine | Normalise,
        inputs: Tensor,
        outputs: Tensor,
        kind: str,
        settings: tuple[Any, ...] = (),
    ) -> None:
        # No parameter has the id of ``None``.
        names = (self.names.get(id(op.weight)), self.names.get(id(op.bias)))
        self.layers.append(_Recorded(names, inputs, outputs, kind, settings))

    def _convolve(self, op: Affine) -> Tensor:
        try:
            geometry = op.geometry
        except ValueError as error:
            raise UnsupportedError(str(error)) from error
        assert geometry is not None
        kernel, dilation, padding, stride = geometry
        height, width = geometry.positions(op.inputs.shape[2:])
        if height * width > self.few_positions:
            settings = (stride, padding, dilation)
            outputs = convolve(op.inputs, op.weight, op.bias, settings)
            self._note(op, op.inputs, outputs, "images", settings)
            return outputs
        if kernel == (1, 1) and padding == (0, 0):
            patches = op.inputs[:, :, :: stride[0], :: stride[1]].flatten(2).mT.contiguous()
        else:
            patches = geometry.patches(op.inputs).mT.contiguous()
        name = self.names[id(op.weight)]
        rows = self.matrices.product(patches.flatten(0, 1), name, op.weight)
        outputs = rows.unflatten(0, patches.shape[:2])
        self._note(op, patches, outputs, "patches")
        if op.bias is not None:
            outputs = outputs + op.bias
        return outputs.mT.unflatten(2, (height, width))

    def _linear(self, op: Affine) -> Tensor:
        if op.inputs.ndim != 2:
            raise UnsupportedError(f"a linear layer of inputs of {op.inputs.ndim} dimensions")
        outputs = self.matrices.product(op.inputs, self.names[id(op.weight)], op.weight)
        self._note(op, op.inputs[:, None], outputs[:, None], "patches")
        outputs = self.layers[-1].outputs[:, 0]
        return outputs if op.bias is None else outputs + op.bias

    def _normalize(self, op: Normalise) -> Tensor:
        mean, variance, weight, bias = op.mean, op.variance, op.weight, op.bias
        if mean is None or variance is None:
            raise UnsupportedError("BatchNorm by the batch's own statistics")
        over = (-1,) + (1,) * (op.inputs.ndim - 2)
        scale = (variance + op.eps).rsqrt()
        gain = scale if weight is None else scale * weight
        shift = -mean * gain if bias is None else bias - mean * gain
        outputs = torch.addcmul(shift.reshape(over), op.inputs, gain.reshape(over))
        normal = torch.addcmul((-mean * scale).reshape(over), op.inputs, scale.reshape(over))
        self._note(op, normal, outputs, "normalised")
        return outputs


class GradientProducts:
    """The map from candidates of T targets to ⟨g, g*⟩ and ‖g‖², by one pass through the network.

    Args:
        gradient_map: the model and loss; BatchNorm uses running statistics.
        params: θ_t, the same for all targets.
        buffers: the statistics of BatchNorm, the same for all targets.
        observed: g* of every target.
        together: whether the weight gradients of all targets are formed in one pass, which is
            faster if they are small. Otherwise targets follow one another, and convolutions of few
            positions form no weight gradient.
    """

    def __init__(
        self,
        gradient_map: GradientMap,
        params: Params,
        buffers: Params,
        observed: Sequence[Params],
        together: bool = False,
    ) -> None:
        self.gradient_map = gradient_map
        self.together = together
        self.params = {name: self._laid_out(value.detach()) for name, value in params.items()}
        self.buffers = buffers
        self.observed = [{k: self._laid_out(v) for k, v in target.items()} for target in observed]
        self._stacked: tuple[list[int], Params] = ([], {})
        self.names = {id(value): name for name, value in self.params.items()}
        self.matrices = Matrices()
        squares = [[v.square().sum() for v in target.values()] for target in observed]
        self.observed_squared = torch.stack([torch.stack(terms).sum() for terms in squares])

    def __call__(self, inputs: Tensor, targets: Tensor, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Return ⟨g, g*⟩ (A,) and ‖g‖² (A,), differentiable in the inputs.

        Args:
            inputs: (A · B, C, H, W) the candidates of the chosen targets, one after another.
            targets: (A, B) or (A, B, K) labels.
            chosen: (A,) indices of targets.

        Raises:
            UnsupportedError: a parameter is not used exactly once, in a convolution, a linear layer
                or a normalisation by given statistics.
        """
        recorder = _Recorder(self.names, self.matrices, 0 if self.together else FEW_POSITIONS)
        with recorder:
            logits = self.gradient_map.logits(self.params, self._laid_out(inputs), self.buffers)
        met = [name for layer in recorder.layers for name in layer.names if name is not None]
        if sorted(met) != sorted(self.params):
            raise UnsupportedError("every parameter must be used once")
        losses = each(self.gradient_map.loss, logits.unflatten(0, (len(chosen), -1)), targets)
        outputs = [layer.outputs for layer in recorder.layers]
        errors = torch.autograd.grad(losses.sum(), outputs, create_graph=True)
        products = [
            pair
            for layer, error in zip(recorder.layers, errors, strict=True)
            for pair in self._of_layer(layer, error, chosen)
        ]
        inner, squared = (torch.stack(terms).sum(0) for terms in zip(*products, strict=True))
        return inner, squared

    def _of_layer(
        self, layer: _Recorded, error: Tensor, chosen: list[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ⟨g, g*⟩ (A,) and ‖g‖² (A,) of a layer's bias, if it has one, then of its weight."""
        weight, bias = layer.names
        positions = (1,) if layer.kind == "patches" else tuple(range(2, error.ndim))
        if bias is not None:
            yield self._of_vector(bias, error.sum(positions), chosen)
        if weight is None:
            return
        if layer.kind == "normalised":
            gradients = (error * layer.inputs).sum(positions)
            yield self._of_vector(weight, gradients, chosen)
            return
        shares = [chosen] if self.together else [[target] for target in chosen]
        products = []
        for share, inputs, errors in zip(
            shares, layer.inputs.chunk(len(shares)), error.chunk(len(shares)), strict=True
        ):
            observed = self._observed(weight, share)
            if layer.kind == "images":
                products.append(convolution_products(inputs, errors, observed, layer.settings))
                continue
            rows, errors = (
                value.flatten(0, 1).unflatten(0, (len(share), -1)) for value in (inputs, errors)
            )
            if len(share) == 1:
                seen = self.matrices.product(rows[0], weight, observed[0], share[0])[None]
            else:
                seen = rows @ observed.flatten(2).mT
            squared = (rows @ rows.mT) * (errors @ errors.mT)
            products.append(((seen * errors).sum((1, 2)), squared.sum((1, 2))))
        inner, squared = (torch.cat(parts) for parts in zip(*products, strict=True))
        yield inner, squared

    def _of_vector(self, name: str, gradients: Tensor, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Return ⟨g, g*⟩ (A,) and ‖g‖² (A,) of a bias or of a BatchNorm's weight.

        Args:
            name: the name of the parameter, which has C entries.
            gradients: (S, C) gradient of every sample; they sum to the candidates' gradients.
            chosen: (A,) indices of targets.
        """
        gradients = gradients.unflatten(0, (len(chosen), -1)).sum(1)
        return (gradients * self._observed(name, chosen)).sum(1), gradients.square().sum(1)

    def _observed(self, name: str, chosen: list[int]) -> Tensor:
        """Return g* (A, ...) of some targets for one parameter.

        The stack is kept until a call with other targets, as most successive evaluations have the
        same ones.
        """
        if len(chosen) == 1:
            return self.observed[chosen[0]][name][None]
        if self._stacked[0] != chosen:
            self._stacked = (chosen, {})
        stacked = self._stacked[1]
        if name not in stacked:
            stacked[name] = torch.stack([self.observed[target][name] for target in chosen])
        return stacked[name]

    def _laid_out(self, value: Tensor) -> Tensor:
        """Return images with channels last in memory, which is faster for plain convolutions.

        Grouped convolutions, which treat all targets in one pass, are faster with channels first.
        """
        if value.ndim != 4 or self.together:
            return value
        return value.contiguous(memory_format=torch.channels_last)


def each(function: Callable[..., Tensor], *tensors: Any) -> Tensor:
    """Return ``function`` of every entry along the first dimension of tensors, stacked.

    A single entry does not pass through ``vmap``, which not every function allows.
    """
    if len(tensors[0]) == 1:
        return function(*(tree_map(lambda v: v[0], tensors)))[None]
    results: Tensor = torch.func.vmap(function)(*tensors)
    return results
