"""Hide the representation, the input of the last linear layer, which this layer's gradient reveals
(Soteria).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import InputSpec, Update
from flwr_leakage.values import require


def last_linear_layer(model: nn.Module) -> str:
    """Return the name of a model's last ``nn.Linear``, whose input is the representation.

    Raises:
        ValueError: the model has no such layer.
    """
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
    """Return the sensitivity (F,) of each entry k of a linear layer's input r, Σ_x ‖∂rₖ/∂x‖₂ / |rₖ|
    over the samples x. Perturbing the entry rₖ moves a reconstruction by about the inverse of its
    sensitivity (Sun et al. 2021, section 4.2). So perturbing entries of small sensitivity hides
    most.

    Args:
        gradient_map: the model's gradient map, whose BatchNorm must not use batch statistics.
        params: the parameters θ, by name.
        inputs: the inputs of B samples.
        layer: the name of the linear layer, as in ``model.named_modules()``.
        buffers: BatchNorm statistics.
        chunk_size: the number of entries that are processed at a time.
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
            for entries in torch.arange(len(value)).split(chunk_size):
                rows = F.one_hot(entries, len(value)).to(value)
                (jacobian,) = torch.func.vmap(pullback)(rows)
                norms.append(jacobian.flatten(1).norm(dim=1))
            # An entry that is zero, as after a ReLU, reveals nothing. Division by zero makes its
            # sensitivity infinite, so that it is never chosen for pruning.
            total = total + torch.cat(norms) / value.abs()
    finally:
        handle.remove()
    return total.nan_to_num(nan=math.inf, posinf=math.inf)


def representation_mask(sensitivity: Float[Tensor, " F"], prune_ratio: float) -> Bool[Tensor, " F"]:
    """Return a mask (F,) that is false at the ``floor(prune_ratio · F)`` entries of least
    sensitivity, with ``prune_ratio`` in [0, 1), and true elsewhere.
    """
    dropped = math.floor(round(prune_ratio * len(sensitivity), 6))
    mask = torch.ones(len(sensitivity), dtype=torch.bool)
    mask[sensitivity.topk(dropped, largest=False).indices] = False
    return mask


@dataclass(frozen=True)
class Soteria(Defense):
    """A defense that prunes columns of a linear layer's weight update (Sun et al. 2021).

    The layer's gradient reveals its input, the representation, exactly. Column k of the weight
    belongs to the representation's entry k. Soteria zeroes the columns of those entries that move a
    reconstruction most if perturbed. Balunović et al. (2022) show that it does not hinder an
    attacker who leaves this layer out of the objective.

    Attributes:
        prune_ratio: the share of the representation's entries that is pruned, in [0, 1); 0.01 in
            the paper's code.
        layer: the name of the linear layer; ``None`` for the last one of the model.
        max_samples: the number of samples whose sensitivities are summed, the first ones of the
            round, ≥ 1.
    """

    effect: ClassVar[str] = (
        "in one layer the numbers of the update that tell most of the images are not sent"
    )
    takes_texts: ClassVar[bool] = False

    prune_ratio: float = 0.5
    layer: str | None = None
    max_samples: int = 8

    def __post_init__(self) -> None:
        require(self, "lie in [0, 1)", "prune_ratio")
        require(self, "be at least 1", "max_samples")

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Raise ``ValueError`` if the model has no linear layer named ``layer``, or none at all."""
        super().validate(gradient_map, spec, num_examples)
        self._layer_and_weight(gradient_map.model)

    def _layer_and_weight(self, model: nn.Module) -> tuple[str, str]:
        """Return the names of the linear layer that is pruned and of its weight parameter."""
        layer = last_linear_layer(model) if self.layer is None else self.layer
        if not isinstance(dict(model.named_modules()).get(layer), nn.Linear):
            raise ValueError(f"layer must name a linear layer of the model, got {layer!r}.")
        return layer, f"{layer}.weight" if layer else "weight"

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update with those columns of the layer's weight set to zero that are pruned.

        These columns belong to the representation's entries of least sensitivity, see
        :func:`representation_sensitivity`.
        """
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
