"""The walk through a chain of layers from its logits towards its input.

The last layer's weight gradient is ``e hᵀ``, where the logit error e is the bias's gradient. So the
layer's input h is known. It gives the slope of the last activation, so that the error δ of the
layer before is exact. That layer's weight gradient is then *linear* in its input a:
``M(δ) a = ∂L/∂W``.

Through invertible activations a is the solution of a convex problem. If there is one solution, the
walk goes on to the next layer in the same way. If a comes from ReLUs, its zeros are enough, as they
give the next layer's error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link
from flwr_leakage.attacks.exact.hidden import Hidden
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.layer_equations import Level, solve_layer
from flwr_leakage.attacks.labels.counts import mean_feature


@dataclass(frozen=True)
class Walk:
    """The result of a walk.

    Attributes:
        logit_error: ∂L/∂logits (K,).
        levels: the known outputs and equations of each layer, from the last layer but one on.
        residuals: residuals of the convex problems on the way, see :func:`solve_layer`.
        hidden: the ReLUs at which the walk ended or, if it went on, the last ones that it passed.
            ``None`` if the last activation that the walk came to is invertible.
    """

    logit_error: Tensor
    levels: list[Level]
    residuals: list[float]
    hidden: Hidden | None


def walk_back(
    chain: Sequence[Link],
    begin: Callable[..., Hidden],
    *,
    rank_tolerance: float,
    rank_fraction: float,
    layer_iterations: int,
    solved: float,
) -> Walk:
    """Return the walk from the logits of a chain as far towards its input as its gradients lead.

    Args:
        chain: the layers, at least two.
        begin: :meth:`Hidden.begin` with the settings of the search for masks.
        rank_tolerance: singular values of a gradient's equations below this fraction of the
            largest are left out.
        rank_fraction: the walk ends at a layer whose gradient determines less than this share of
            its input. Solving it would cost much, and it would rarely have one solution.
        layer_iterations: largest number of iterations for the convex problem of a layer behind an
            invertible activation.
        solved: largest relative mean squared residual of such a layer that counts as found.

    Raises:
        ValueError: the last layer has no bias.
    """
    last = chain[-1]
    require_last_bias(chain)
    assert last.bias_gradient is not None
    known = Known.exactly(mean_feature(last.weight_gradient, last.bias_gradient))
    errors = last.pull_back(last.bias_gradient[None])
    levels: list[Level] = []
    residuals: list[float] = []
    hidden: Hidden | None = None
    for position in range(len(chain) - 2, -1, -1):
        level = Level.of(chain[position], known, errors, rank_tolerance)
        levels.append(level)
        if position == 0:
            break
        before, link = chain[: position - 1], chain[position - 1]
        if level.equations.num_equations < rank_fraction * level.equations.num_positions:
            if hidden is None and link.activation.is_relu:
                hidden = begin(before, link, level, is_sought=False)
            break
        errors = level.input_errors
        if link.activation.is_relu:
            hidden = begin(before, link, level)
            if not hidden.is_proven:
                break
            known = hidden.known
            continue
        hidden = None
        low, high = link.activation.low, link.activation.high
        inputs, residual = solve_layer(level, low, high, layer_iterations)
        residuals.append(residual)
        if residual > solved:
            break
        known = Known.exactly(inputs.clamp(low, high))
    return Walk(last.bias_gradient / last.scale, levels, residuals, hidden)


def require_last_bias(chain: Sequence[Link]) -> None:
    """Raise ``ValueError`` if the last layer has no bias gradient."""
    if chain[-1].bias_gradient is None:
        raise ValueError("feature matching needs the last layer's bias, the model has none.")
