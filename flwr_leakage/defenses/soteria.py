"""Hide the representation that the last layer's gradient reveals (Soteria)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import InputSpec, Update


def last_linear_layer(model: nn.Module) -> str:
    """Name the last ``nn.Linear`` of a model: its input is the representation."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise ValueError("Soteria needs a model with a linear layer, got one without.")
    return names[-1]


def representation_sensitivity(
    gradient_map: GradientMap,
    params: Mapping[str, Tensor],
    inputs: Float[Tensor, "B C H W"],
    layer: str,
    buffers: Mapping[str, Tensor] | None = None,
    chunk_size: int = 64,
) -> Float[Tensor, " F"]:
    """Return Σ over samples of ‖∂rₖ/∂x‖₂ / |rₖ| for each entry k of a linear layer's input r.

    Sun et al. (2021, section 4.2): perturbing rₖ moves an attacker's reconstruction by about
    |rₖ| ‖∂rₖ/∂x‖⁻¹, so that the entries of smallest sensitivity hide most.

    Args:
        gradient_map: the gradient map of the client's model; it must use no statistics of a batch,
            as the samples are looked at one by one.
        params: θ.
        inputs: B samples.
        layer: the layer's name, as in ``model.named_modules()``.
        buffers: BatchNorm statistics.
        chunk_size: entries whose derivatives are held at a time.
    """
    module = gradient_map.model.get_submodule(layer)
    captured: list[Tensor] = []

    def representation(single: Tensor) -> Tensor:
        captured.clear()
        gradient_map.logits(params, single[None], buffers)
        return captured[0].reshape(-1)

    handle = module.register_forward_pre_hook(lambda _, args: captured.append(args[0]))
    try:
        total = torch.zeros(())
        for single in inputs:
            value, pullback = torch.func.vjp(representation, single)[:2]
            norms = []
            for start in range(0, len(value), chunk_size):
                rows = torch.zeros(
                    min(chunk_size, len(value) - start), len(value), dtype=value.dtype
                )
                rows[torch.arange(len(rows)), start + torch.arange(len(rows))] = 1
                (jacobian,) = torch.func.vmap(pullback)(rows)
                norms.append(jacobian.flatten(1).norm(dim=1))
            # Entries that are zero (behind a ReLU) release nothing: they are never the ones to
            # hide, and their sensitivity is infinite.
            total = total + torch.cat(norms) / value.abs()
    finally:
        handle.remove()
    return total.nan_to_num(nan=math.inf, posinf=math.inf)


def representation_mask(sensitivity: Float[Tensor, " F"], prune_ratio: float) -> Bool[Tensor, " F"]:
    """Keep all but the ``floor(prune_ratio · F)`` entries of smallest sensitivity."""
    dropped = math.floor(round(prune_ratio * len(sensitivity), 6))
    mask = torch.ones(len(sensitivity), dtype=torch.bool)
    mask[sensitivity.topk(dropped, largest=False).indices] = False
    return mask


@dataclass(frozen=True)
class Soteria(Defense):
    """Prune the columns of a linear layer's weight update (Sun et al. 2021).

    The layer's gradient is an outer product with its input, the representation: an attacker
    reads it off exactly. Soteria sets to zero the columns of the entries whose perturbation
    moves a reconstruction most, and leaves every other layer as it is. Balunović et al. (2022)
    show that an attacker who leaves this layer out of the objective is not hindered.

    Attributes:
        prune_ratio: share of the representation's entries, in [0, 1); 0.01 in the paper's code.
        layer: name of the linear layer; the last one where it is ``None``.
        max_samples: samples whose sensitivities are summed, from the first on, ≥ 1.
    """

    takes_texts: ClassVar[bool] = False

    prune_ratio: float = 0.5
    layer: str | None = None
    max_samples: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.prune_ratio < 1:
            raise ValueError(f"prune_ratio must lie in [0, 1), got {self.prune_ratio}.")
        if self.max_samples < 1:
            raise ValueError(f"max_samples must be at least 1, got {self.max_samples}.")

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return "in one layer the numbers of the update that tell most of the images are not sent"

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Raise unless the model has the linear layer."""
        super().validate(gradient_map, spec, num_examples)
        self._layer_and_weight(gradient_map.model)

    def _layer_and_weight(self, model: nn.Module) -> tuple[str, str]:
        """Return names of the layer and of its weight."""
        layer = last_linear_layer(model) if self.layer is None else self.layer
        if not isinstance(dict(model.named_modules()).get(layer), nn.Linear):
            raise ValueError(f"layer must name a linear layer of the model, got {layer!r}.")
        return layer, f"{layer}.weight" if layer else "weight"

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Set columns of the layer's weight update to zero."""
        check_update(update)
        around = require_local_round(self, local_round)
        if self.prune_ratio == 0:
            return update
        layer, key = self._layer_and_weight(around.gradient_map.model)
        samples = around.samples(update.schedule)[: self.max_samples]
        sensitivity = representation_sensitivity(
            samples.gradient_map, samples.params, samples.batch.inputs, layer, samples.buffers
        )
        mask = representation_mask(sensitivity, self.prune_ratio)
        return replace(update, delta={**update.delta, key: update.delta[key] * mask})
