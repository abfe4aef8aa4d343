"""The walk through a chain of layers from its logits towards its input.

The last layer's gradient is ``e hᵀ``, with e the logit error, which is the bias's gradient; so its
input h is known. From h follows where the last activation was active, so the error δ at the layer
before is exact, and that layer's weight gradient is *linear* in its input a: ``M(δ) a = ∂L/∂W``.
Through invertible activations a is the solution of a convex problem; where it has one solution,
the next layer is treated likewise. Of a that comes from ReLUs it is enough to know where it is
zero, as that is the next layer's error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link
from flwr_leakage.attacks.exact.hidden import Hidden, OwnEquations
from flwr_leakage.attacks.exact.layer_equations import Knowledge, solve_layer
from flwr_leakage.attacks.exact.masks import MaskSearch
from flwr_leakage.attacks.labels.counts import mean_feature


@dataclass(frozen=True)
class Walk:
    """What a walk found.

    Attributes:
        logit_error: ∂L/∂logits (K,).
        levels: knowledge about the inputs of the layers, from the last but one towards the first.
        residuals: of the convex problems on the way, see :func:`solve_layer`.
        hidden: the ReLUs at which the walk ended or, if it went on, the last ones that it passed;
            ``None`` if the way to the input is through invertible activations only.
    """

    logit_error: Tensor
    levels: list[Knowledge]
    residuals: list[float]
    hidden: Hidden | None


def walk_back(
    chain: Sequence[Link],
    search: MaskSearch,
    own: OwnEquations,
    *,
    rank_tolerance: float,
    rank_fraction: float,
    layer_iterations: int,
    solved: float,
) -> Walk:
    """Walk from the logits of a chain as far towards its input as its gradients lead.

    Args:
        chain: of at least two layers.
        search: for masks of ReLUs.
        own: how the gradient of a layer with proven masks is used.
        rank_tolerance: singular values of a gradient's equations below this fraction of the
            largest are left out.
        rank_fraction: the walk ends at a layer whose gradient determines less than this share of
            its input; solving it would cost much and rarely have one solution.
        layer_iterations: of the convex problem of a layer behind invertible activations.
        solved: such a layer counts as found once its relative mean squared residual is at most
            this.

    Raises:
        ValueError: the last layer has no bias.
    """
    last = chain[-1]
    if last.bias_gradient is None:
        raise ValueError("feature matching needs the last layer's bias, the model has none.")
    outputs = mean_feature(last.weight_gradient, last.bias_gradient)
    errors = last.pull_back(last.bias_gradient[None])
    trust: Tensor | float = 1.0
    levels: list[Knowledge] = []
    residuals: list[float] = []
    hidden: Hidden | None = None
    for position in range(len(chain) - 2, -1, -1):
        level = Knowledge.of(chain[position], outputs, errors, rank_tolerance, trust)
        levels.append(level)
        if position == 0:
            break
        before, link = chain[: position - 1], chain[position - 1]
        if level.equations.num_equations < rank_fraction * level.equations.num_positions:
            if hidden is None and link.activation.has_kink:
                hidden = Hidden.unknown(before, link, level, search, own)
            break
        errors = level.input_errors
        if link.activation.has_kink:
            hidden = Hidden.begin(before, link, level, search, own)
            if not hidden.is_proven:
                break
            outputs, trust = hidden.masks.features, hidden.masks.determined
            continue
        hidden, trust = None, 1.0
        low, high = link.activation.low, link.activation.high
        inputs, residual = solve_layer(level, low, high, layer_iterations)
        residuals.append(residual)
        if residual > solved:
            break
        outputs = inputs.clamp(low, high)
    return Walk(last.bias_gradient / last.scale, levels, residuals, hidden)
