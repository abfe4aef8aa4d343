"""What each defense of this package does to an update or to a batch, in a plain half sentence."""

from collections.abc import Mapping
from typing import Any

_OWN = "flwr_leakage.defenses."
_DOES = {
    "GaussianNoise": "random noise is added to every number of the update",
    "LaplacianNoise": "random noise is added to every number of the update",
    "InfluenceNoise": "random noise is added to the update where it hides the images most",
    "Clipping": "an update above a set length is shortened to it",
    "DPSGD": "in each training step the share of each image is limited, and random noise is added",
    "TargetRisk": "noise or pruning is made as strong as a target of the predicted error asks",
    "Soteria": "in one layer the numbers of the update that tell most of the images are not sent",
    "MixUp": "the client trains on mixtures of several images",
    "InstaHide": "the client trains on mixtures of several images with random signs of pixels",
    "WithholdBuffers": "the running statistics of batch normalisation are not sent",
}


def mechanism(node: Any) -> str:
    """What a configured defense does; empty for one that is not of this package.

    Example:
        >>> mechanism({"_target_": "flwr_leakage.defenses.GradientPruning", "prune_ratio": 0.99})
        'only the largest 1 % of the update’s numbers are sent'
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(target, str) or not target.startswith(_OWN):
        return ""
    name = target.removeprefix(_OWN)
    if name == "Chain":
        parts = node.get("defenses")
        told = [mechanism(part) for part in parts] if isinstance(parts, list) else [""]
        return "; then ".join(told) if all(told) else ""
    if name == "GradientPruning":
        return _pruning(node)
    return _DOES.get(name, "")


def _pruning(node: Mapping[str, Any]) -> str:
    ratio = node.get("prune_ratio")
    share = f"largest {100 * (1 - ratio):g} %" if isinstance(ratio, int | float) else "largest"
    of = "of each layer’s numbers" if node.get("per_layer") is True else "of the update’s numbers"
    return f"only the {share} {of} are sent"
