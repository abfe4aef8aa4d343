"""Replace texts by the embeddings of their tokens, by which a score can differentiate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, Exposure


@runtime_checkable
class TakesEmbeddings(Protocol):
    """The protocol of a model of token ids that can take their embeddings as inputs instead."""

    def embed(self, params: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        """Return the embeddings (B, T, d) of token ids (B, T), which the model takes as inputs."""
        ...


def on_embeddings(gradient_map: GradientMap, exposure: Exposure) -> Exposure:
    """Return the same round with its texts replaced by the embeddings of their tokens.

    A round of continuous inputs is returned as it is. With embeddings as inputs, the table of
    embeddings has no part in a sample's gradient. So scores say what the other parameters'
    gradients reveal of the embeddings, as in TAG (Deng et al. 2021).

    Raises:
        ValueError: the inputs are integers, and the model takes no embeddings.
    """
    whole = exposure.whole
    if whole.private.inputs.is_floating_point():
        return exposure
    model = gradient_map.model
    if not isinstance(model, TakesEmbeddings):
        raise ValueError(
            f"inputs must be floating-point to be differentiated, got "
            f"{whole.private.inputs.dtype}; convert images to floats, and score the embeddings of "
            f"tokens: a model does that itself if it has a method embed(params, ids), see "
            f"flwr_leakage.models.TextTransformer."
        )
    params = exposure.params
    private = _embedded(model, params, whole.private)
    defended = private
    if whole.defended is not whole.private:
        defended = _embedded(model, params, whole.defended)
    seen = replace(whole, private=private, defended=defended)
    if exposure.part_of is None:
        return seen
    places = [whole.indices.index(index) for index in exposure.indices]
    return seen.select(places)


def _embedded(model: TakesEmbeddings, params: Params, batch: Batch) -> Batch:
    if batch.inputs.is_floating_point():
        return batch
    return Batch(model.embed(params, batch.inputs), batch.targets)
