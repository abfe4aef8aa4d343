"""Products of gradients without the gradients, for convolutional networks.

The weight gradient of a layer is ``∂L/∂W = Σ_p δ_p a_pᵀ`` over positions p, with a_p the patch
of its input and δ_p the error of its output. Objectives that are functions of the inner product
⟨g, g*⟩ and of ‖g‖² alone do not need it:

    ⟨g, g*⟩ = Σ_p ⟨δ_p, g* a_p⟩,    ‖g‖² = Σ_pq ⟨a_p, a_q⟩ ⟨δ_p, δ_q⟩.

Where a layer has few positions, as all deep ones have, that spares the weight gradient, its
derivative and their memory traffic: with F the cost of a forward pass an evaluation costs 6 F
instead of 7 F and writes no array of the parameters' size. Where positions are many, the weight
gradient is formed as usual. Besides, the network is passed once for all targets: what differs
between them is only the products with each one's g*.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params

FEW_POSITIONS = 64
"""Up to so many positions a sample a convolution is a product of matrices: measured on a CPU,
where the libraries' direct convolutions win on larger maps only."""


class UnsupportedError(ValueError):
    """The model does with a parameter what is not covered here."""


@dataclass(frozen=True)
class _Layer:
    """A layer as one pass through the network met it.

    Attributes:
        names: of the weight and of the bias, which may be missing.
        inputs: of all samples: (S, F), patches (S, P, F), images (S, C, H, W), or normalised
            images.
        outputs: of all samples, before anything else.
        kind: which of the four.
        settings: stride, padding and dilation of a convolution of images.
    """

    names: tuple[str | None, str | None]
    inputs: Tensor
    outputs: Tensor
    kind: str
    settings: tuple[Any, ...] = ()


class _Recorder(TorchFunctionMode):
    """Notes every use of a parameter, and computes it in the way that suits what follows."""

    def __init__(self, names: Mapping[int, str], matrices: "Matrices") -> None:
        super().__init__()
        self.names = names
        self.matrices = matrices
        self.layers: list[_Layer] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        used = [v for v in (*args, *kwargs.values()) if id(v) in self.names]
        if not used:
            return function(*args, **kwargs)
        if function is F.conv2d:
            return self._convolve(*args, **kwargs)
        if function is F.linear:
            return self._linear(*args, **kwargs)
        if function is F.batch_norm:
            return self._normalize(*args, **kwargs)
        raise UnsupportedError(f"{function} of parameter {self.names[id(used[0])]!r}")

    def _note(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        inputs: Tensor,
        outputs: Tensor,
        kind: str,
        settings: tuple[Any, ...] = (),
    ) -> None:
        names = tuple(
            None if value is None else self.names.get(id(value)) for value in (weight, bias)
        )
        self.layers.append(_Layer(names, inputs, outputs, kind, settings))  # type: ignore[arg-type]

    def _convolve(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if groups != 1 or isinstance(padding, str):
            raise UnsupportedError("a convolution of several groups, or of padding in words")
        stride, padding, dilation = (_pair(value) for value in (stride, padding, dilation))
        kernel = weight.shape[2:]
        height, width = (
            (input.shape[2 + i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i]
            + 1
            for i in (0, 1)
        )
        if height * width > FEW_POSITIONS:
            plain = F.conv2d(input, weight, None, stride, padding, dilation)
            self._note(weight, bias, input, plain, "images", (stride, padding, dilation))
            return plain if bias is None else plain + bias[:, None, None]
        if tuple(kernel) == (1, 1) and padding == (0, 0):
            patches = input[:, :, :: stride[0], :: stride[1]].flatten(2).mT.contiguous()
        else:
            patches = F.unfold(input, kernel, dilation, padding, stride).mT.contiguous()
        rows = self.matrices.product(patches.flatten(0, 1), self.names[id(weight)], weight)
        outputs = rows.unflatten(0, patches.shape[:2])
        self._note(weight, bias, patches, outputs, "patches")
        if bias is not None:
            outputs = outputs + bias
        return outputs.mT.unflatten(2, (height, width))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.ndim != 2:
            raise UnsupportedError(f"a linear layer of inputs of {input.ndim} dimensions")
        outputs = self.matrices.product(input, self.names[id(weight)], weight)
        self._note(weight, bias, input[:, None], outputs[:, None], "patches")
        outputs = self.layers[-1].outputs[:, 0]
        return outputs if bias is None else outputs + bias

    def _normalize(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if training or running_mean is None or running_var is None:
            raise UnsupportedError("BatchNorm by the batch's own statistics")
        over = (-1,) + (1,) * (input.ndim - 2)
        scale = (running_var + eps).rsqrt()
        gain = scale if weight is None else scale * weight
        shift = -running_mean * gain if bias is None else bias - running_mean * gain
        outputs = torch.addcmul(shift.reshape(over), input, gain.reshape(over))
        normal = torch.addcmul((-running_mean * scale).reshape(over), input, scale.reshape(over))
        self._note(weight, bias, normal, outputs, "normalised")
        return outputs


class Matrices:
    """Products of rows with constant weights, which are laid out once for both directions."""

    def __init__(self) -> None:
        self.cache: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def product(self, rows: Tensor, name: str, weight: Tensor, target: int = -1) -> Tensor:
        """``rows @ Wᵀ`` (S, N) of rows (S, K), differentiable in the rows.

        Args:
            rows: (S, K).
            name: of the weight.
            weight: (N, ...) with K entries a row.
            target: whose weight it is; −1 for the model's.
        """
        if (name, target) not in self.cache:
            matrix = weight.flatten(1).contiguous()
            self.cache[name, target] = matrix, matrix.T.contiguous()
        return _Product.apply(rows, *self.cache[name, target])


class _Product(torch.autograd.Function):
    """``rows @ Wᵀ``, whose derivative ``errors @ W`` is the same function of Wᵀ."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, transposed: Tensor) -> Tensor:
        ctx.save_for_backward(weight, transposed)
        return multiply(rows, weight)

    @staticmethod
    def backward(ctx: Any, errors: Tensor) -> tuple[Tensor, None, None]:
        weight, transposed = ctx.saved_tensors
        return _Product.apply(errors, transposed, weight), None, None


def multiply(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weightᵀ``, by oneDNN where torch was built with it.

    The BLAS that torch ships for x86 is up to two times slower than oneDNN on processors of
    other makers than its own.
    """
    fits = rows.device.type == "cpu" and rows.dtype == torch.float32 and len(rows) > 1
    if fits and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(rows.contiguous(), weight, None, "none", [], "")
    return rows @ weight.T


class _WeightGradient(torch.autograd.Function):
    """``∂L/∂W`` of a convolution from its input and its output's error."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, errors: Tensor, shape: torch.Size, settings: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(inputs, errors)
        ctx.settings = settings
        like = inputs.new_empty(1).expand(shape)
        return _convolution_backward(errors, inputs, like, settings, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inputs, errors = ctx.saved_tensors
        to_inputs = _convolution_backward(errors, inputs, outer, ctx.settings, 0)
        return to_inputs, F.conv2d(inputs, outer, None, *ctx.settings), None, None


def _convolution_backward(
    errors: Tensor, inputs: Tensor, weight: Tensor, settings: tuple[Any, ...], wanted: int
) -> Tensor:
    """The derivative with respect to the input (``wanted`` = 0) or to the weight (1)."""
    stride, padding, dilation = settings
    mask = [wanted == 0, wanted == 1, False]
    derivative: Tensor = torch.ops.aten.convolution_backward(
        errors, inputs, weight, None, stride, padding, dilation, False, [0, 0], 1, mask
    )[wanted]
    return derivative


class GradientProducts:
    """Candidates of T targets ↦ ⟨g, g*⟩ and ‖g‖², by one pass through the network.

    Args:
        gradient_map: the model and loss; BatchNorm by running statistics.
        params: θ_t, the same for all targets.
        buffers: the statistics to normalise with, the same for all targets.
        observed: g* of every target.
    """

    def __init__(
        self,
        gradient_map: GradientMap,
        params: Params,
        buffers: Params,
        observed: Sequence[Params],
    ) -> None:
        self.gradient_map = gradient_map
        self.params = {name: _laid_out(value.detach()) for name, value in params.items()}
        self.buffers = buffers
        self.observed = [{k: _laid_out(v) for k, v in target.items()} for target in observed]
        self.names = {id(value): name for name, value in self.params.items()}
        self.matrices = Matrices()
        squares = [[v.square().sum() for v in target.values()] for target in observed]
        self.observed_squared = torch.stack([torch.stack(terms).sum() for terms in squares])

    def __call__(
        self, inputs: Tensor, targets: Sequence[Tensor], chosen: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """⟨g, g*⟩ (A,) and ‖g‖² (A,), differentiable in the inputs.

        Args:
            inputs: (A · B, C, H, W), the candidates of the chosen targets one after another.
            targets: (B,) or (B, K) of each of them.
            chosen: indices (A,) of targets.

        Raises:
            UnsupportedError: the model does something else with its parameters than convolve,
                multiply or normalise by given statistics, each at one place.
        """
        recorder = _Recorder(self.names, self.matrices)
        with recorder:
            logits = self.gradient_map.logits(self.params, _laid_out(inputs), self.buffers)
        met = [name for layer in recorder.layers for name in layer.names if name is not None]
        if sorted(met) != sorted(self.params):
            raise UnsupportedError("every parameter must be used once")
        pieces = logits.split(len(inputs) // len(chosen))
        losses = [self.gradient_map.loss(*pair) for pair in zip(pieces, targets, strict=True)]
        outputs = [layer.outputs for layer in recorder.layers]
        errors = torch.autograd.grad(torch.stack(losses).sum(), outputs, create_graph=True)
        products = [
            pair
            for layer, error in zip(recorder.layers, errors, strict=True)
            for pair in self._of_layer(layer, error, chosen)
        ]
        inner, squared = (torch.stack(terms).sum(0) for terms in zip(*products, strict=True))
        return inner, squared

    def _of_layer(
        self, layer: _Layer, error: Tensor, chosen: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The products of a layer's bias, then of its weight."""
        weight, bias = layer.names
        count = len(chosen)
        positions = (1,) if layer.kind == "patches" else tuple(range(2, error.ndim))
        if bias is not None:
            yield self._of_vector(bias, error.sum(positions), chosen)
        if weight is None:
            return
        if layer.kind == "normalised":
            gradients = (error * layer.inputs).sum(positions)
            yield self._of_vector(weight, gradients, chosen)
            return
        inner, squared = [], []
        shares = layer.inputs.chunk(count), error.chunk(count)
        for target, inputs, errors in zip(chosen, *shares, strict=True):
            observed = self.observed[target][weight]
            if layer.kind == "images":
                gradient = _WeightGradient.apply(inputs, errors, observed.shape, layer.settings)
                inner.append((gradient * observed).sum())
                squared.append(gradient.square().sum())
                continue
            rows, errors = inputs.flatten(0, 1), errors.flatten(0, 1)
            inner.append((self.matrices.product(rows, weight, observed, target) * errors).sum())
            squared.append(((rows @ rows.T) * (errors @ errors.T)).sum())
        yield torch.stack(inner), torch.stack(squared)

    def _of_vector(
        self, name: str, gradients: Tensor, chosen: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Of a parameter with one entry a channel, from every sample's gradient (S, C)."""
        gradients = gradients.unflatten(0, (len(chosen), -1)).sum(1)
        observed = torch.stack([self.observed[target][name] for target in chosen])
        return (gradients * observed).sum(1), gradients.square().sum(1)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _laid_out(value: Tensor) -> Tensor:
    """Convolution weights with channels last, as the direct convolutions want them."""
    return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value
