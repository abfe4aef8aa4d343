"""Find a model's trained parameters and its logits, and make its second derivatives right."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import wrap_torch_function

from flwr_leakage.dropout import Dropouts, Masked
from flwr_leakage.function_mode import FunctionMode
from flwr_leakage.params import Params


def trained_names(model: nn.Module, trained: Iterable[nn.Parameter] | None) -> frozenset[str]:
    """Return the names of the parameters that the client trains: those that require a gradient, and
    that are among ``trained``, the parameters of its optimizer. With ``trained=None`` every
    parameter of the model that requires a gradient counts. A parameter that two layers share has
    the one name that ``named_parameters`` gives it.

    Raises:
        ValueError: no parameter is trained, or ``trained`` holds a parameter of another model.
    """
    names = {id(value): name for name, value in model.named_parameters() if value.requires_grad}
    if trained is not None:
        listed = [id(value) for value in trained]
        own = {id(value) for value in model.parameters()}
        strange = sum(entry not in own for entry in listed)
        if strange:
            raise ValueError(
                f"trained must hold parameters of this very model, got {strange} that are not."
            )
        names = {entry: names[entry] for entry in listed if entry in names}
    if not names:
        raise ValueError("a model must have a parameter that is trained, got none (requires_grad).")
    return frozenset(names.values())


def logits_of(output: object) -> Tensor:
    """Return the logits within a model's output: the output itself if it is a tensor; its attribute
    or entry ``logits``; or the only tensor in a sequence or mapping.

    Raises:
        ValueError: the output is none of these, such as a tuple of two tensors.
    """
    if isinstance(output, Tensor):
        return output
    named = output.get("logits") if isinstance(output, Mapping) else None
    named = getattr(output, "logits", None) if named is None else named
    if isinstance(named, Tensor):
        return named
    parts: list[object] = []
    if isinstance(output, Mapping):
        parts = list(output.values())
    elif isinstance(output, Sequence):
        parts = list(output)
    if len(parts) == 1 and isinstance(parts[0], Tensor):
        return parts[0]
    shown = [tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts]
    raise ValueError(
        f"the model must return logits (B, K), or an output with 'logits', got a "
        f"{type(output).__name__}{f' of {shown}' if shown else ''}; wrap it in a module that "
        f"returns its logits."
    )


@dataclass(frozen=True)
class PlainKernels:
    """A context in which models are computed by kernels with right second derivatives.

    Some fused kernels of PyTorch have no second derivative: those of
    ``scaled_dot_product_attention``, the fast path of ``nn.MultiheadAttention`` in eval mode, the
    recurrent layers of oneDNN and cuDNN, and ``nn.Hardsigmoid``. The second derivative of layer and
    instance normalisation is wrong if it is taken outside of the ``torch.func.vmap`` within which
    the first was taken. The context switches fused kernels off, and replaces the normalisations and
    ``nn.Hardsigmoid`` by elementary operations.

    Attributes:
        recurrent: whether the model has recurrent layers. Only then oneDNN and cuDNN are switched
            off, as without them other layers are slow.
        writes_out: whether the model has a normalisation or an ``nn.Hardsigmoid`` that must be
            replaced by elementary operations.
        skips_dropout: whether dropout that stays active in eval mode, as a call of ``F.dropout``
            may, is left out.
        masks: the masks by which calls of dropout multiply, in the order of a forward pass; see
            :class:`flwr_leakage.dropout.Masked`.
    """

    recurrent: bool
    writes_out: bool
    skips_dropout: bool = False
    masks: tuple[Tensor | None, ...] = ()

    @staticmethod
    def of(model: nn.Module) -> "PlainKernels":
        """Return the context of kernels in which ``model`` has right second derivatives."""
        layers = list(model.modules())
        return PlainKernels(
            any(isinstance(layer, nn.RNNBase) for layer in layers),
            any(
                isinstance(layer, nn.LayerNorm | _InstanceNorm | nn.Hardsigmoid) for layer in layers
            ),
        )

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Switch to kernels with right second derivatives within a ``with`` block."""
        mha, mkldnn, cudnn = torch.backends.mha, torch.backends.mkldnn, torch.backends.cudnn
        fast = mha.get_fastpath_enabled()
        mha.set_fastpath_enabled(False)
        with ExitStack() as stack:
            stack.callback(mha.set_fastpath_enabled, fast)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.recurrent:
                stack.callback(mkldnn.set_flags, mkldnn.set_flags(False)[0])
                stack.enter_context(cudnn.flags(enabled=False))
            if self.writes_out:
                stack.enter_context(_WrittenOut())
            if self.skips_dropout:
                stack.enter_context(Dropouts(skip=True))
            if self.masks:
                stack.enter_context(Masked(self.masks))
            yield


class _WrittenOut(FunctionMode):
    """A context that replaces layer normalisation, instance normalisation and ``F.hardsigmoid``,
    which lack a right second derivative, by elementary operations.
    """

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function is F.layer_norm:
            return _layer_norm(*args, **kwargs)
        if function is F.instance_norm:
            return _instance_norm(function, *args, **kwargs)
        if function is F.hardsigmoid:
            return hard_sigmoid(*args, **kwargs)
        return function(*args, **kwargs)


@wrap_torch_function(lambda input, inplace=False: (input,))
def hard_sigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Return ``F.hardsigmoid(input)``, by operations that can be differentiated twice. A
    ``TorchFunctionMode`` around :class:`PlainKernels` sees a single call, as it does of torch's own
    function.
    """
    outputs = (input / 6 + 0.5).clamp(0, 1)
    return input.copy_(outputs) if inplace else outputs


def _layer_norm(
    inputs: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normal = _normalized(inputs, list(range(-len(normalized_shape), 0)), eps)
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


def _instance_norm(
    func: Callable[..., Tensor],
    inputs: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return func(inputs, running_mean, running_var, weight, bias, False, momentum, eps)
    normal = _normalized(inputs, list(range(2, inputs.ndim)), eps)
    shape = (-1, *[1] * (inputs.ndim - 2))
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def _normalized(inputs: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = inputs - inputs.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def gradient_by_autograd(
    function: Callable[[Mapping[str, Tensor]], Tensor],
    point: Mapping[str, Tensor],
    others: Sequence[Tensor],
) -> Params:
    """Return the gradient of a scalar function of named tensors at ``point``, keyed as ``point``
    and computed by autograd. ``others`` are further tensors on which the function depends. The
    gradient can itself be differentiated if an entry of ``point`` or of ``others`` requires a
    gradient.
    """
    again = torch.is_grad_enabled() and any(t.requires_grad for t in [*point.values(), *others])
    with torch.enable_grad():
        leaves = {
            name: value if value.requires_grad else value.detach().requires_grad_()
            for name, value in point.items()
        }
        found = torch.autograd.grad(
            function(leaves), list(leaves.values()), create_graph=again, materialize_grads=True
        )
    return dict(zip(leaves, found, strict=True))
