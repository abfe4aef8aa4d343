"""The last linear layer of a classifier: where label attacks look."""

from dataclasses import dataclass

from torch import nn

from flwr_leakage.attacks.problem import Problem


@dataclass(frozen=True)
class LastLayer:
    """Names of the last linear layer's parameters.

    Attributes:
        weight: of shape (K, F).
        bias: of shape (K,), or ``None``.
    """

    weight: str
    bias: str | None


def find_last_layer(problem: Problem) -> LastLayer:
    """Find the last ``nn.Linear`` of the model.

    Raises:
        ValueError: there is none, or it does not have one row a class.
    """
    layers = [
        (name, module)
        for name, module in problem.gradient_map.model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    if not layers:
        raise ValueError("labels are inferred from the last linear layer, the model has none.")
    name, module = layers[-1]
    if module.out_features != problem.spec.num_classes:
        raise ValueError(
            f"the last linear layer must have one output for each of "
            f"{problem.spec.num_classes} classes, got {module.out_features}."
        )
    prefix = f"{name}." if name else ""
    return LastLayer(f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None)
