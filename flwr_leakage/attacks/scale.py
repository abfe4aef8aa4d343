"""The factor by which a client scaled its update, as clipping to a norm does.

A client that clips sends c g in place of its gradient g, with a factor c that it tells nobody. The
factor is no secret. For one sample a linear last layer of weights W and bias b has the gradient
``c e [h, 1]ᵀ``, with h its input and ``e(h) = ∂L/∂(W h + b)``. The quotient of both gradients gives
h, whatever c is, h gives e, and ``c = ⟨c e, e⟩ / ‖e‖²``. For a batch,
:mod:`flwr_leakage.attacks.exact.batch_search` reads c off the samples that it finds.
"""

import torch

from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.idlg import idlg_label
from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.network.linear import logits_behind
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR, NOISE_DEVIATIONS


def unscaled(problem: Problem, roughest: float = 0.1) -> Problem:
    """Return the problem with the factor of a scaled update divided out, if it can be told.

    An update of several samples or steps, or without a trained last layer with bias, is returned as
    it is. So is one whose factor differs from 1 by no more than its noise explains.

    Args:
        problem: what a server observed.
        roughest: the largest relative distance of the last layer's gradient from ``c e [h, 1]ᵀ`` at
            which the factor is believed. Pruning exceeds it.
    """
    if problem.num_samples != 1 or not problem.is_single_gradient or problem.earlier:
        return problem
    if problem.spec.next_token:
        return problem  # one text has an error at each position
    try:
        layer = find_last_layer(problem)
    except ValueError:
        return problem
    if layer.bias is None or not {layer.weight, layer.bias} <= problem.gradient_map.trained:
        return problem
    weight, errors = problem.gradient[layer.weight].double(), problem.gradient[layer.bias].double()
    if not bool(errors.any()):
        return problem
    features = mean_feature(weight, errors)
    targets = problem.known_targets
    targets = idlg_label(errors) if targets is None else targets
    outputs = problem.params[layer.weight].double() @ features
    outputs = (outputs + problem.params[layer.bias]).to(problem.params[layer.bias])[None]
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        loss = problem.gradient_map.loss(logits_behind(problem, layer.weight, leaf), targets)
        (expected,) = torch.autograd.grad(loss, leaf)
    expected = expected[0].double()
    size = float(expected.square().sum())
    if not size > 0:
        return problem
    scale = float(errors @ expected) / size
    rough = max(
        float((errors - scale * expected).norm() / errors.norm()),
        float((weight - errors[:, None] * features).norm() / weight.norm()),
        FLOAT32_RELATIVE_ERROR,
    )
    if not scale > 0 or not rough <= roughest or abs(scale - 1) <= NOISE_DEVIATIONS * rough:
        return problem
    return problem.divided(scale)
