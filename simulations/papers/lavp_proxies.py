"""LAVP's proxies of a sample, exact and as its paper computes them."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vmap

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import SampleJacobian, row_norms, sample_gradients
from flwr_leakage.params import Params, ravel
from flwr_leakage.per_sample.cross_entropy import stable
from flwr_leakage.records import Batch
from flwr_leakage.spectral.estimate import normalize_rows

Proxies = dict[str, list[float]]
"""The five proxies of S samples, by name; 0 where one is below what rounding leaves."""

PROXIES = ("grad_norm", "max", "min", "ang_max", "ang_min")
_COLUMNS = 64
_RESOLVED = 1e-12
"""An eigenvalue below this part of the largest may be no more than float32's rounding of J."""


def dense_gram(
    gradient_map: GradientMap, sample: Batch, memory_bytes: int = 2 * 1024**3
) -> Float[Tensor, "N N"]:
    """H = JJᵀ of one sample in float64, J = ∇ₓ∇_θL ∈ R^{N×P}.

    Where J fits, it is built in float32, some columns of Jᵀ at a time, and multiplied in float64:
    its rounding moves a singular value by about 1e-7 of the largest. Where it does not fit, it
    takes a product of JJᵀ for each of N inputs, in float64.

    Args:
        gradient_map: of a model that uses no statistics of a batch.
        sample: one.
        memory_bytes: for J in both precisions.
    """
    num_inputs = sample.inputs.numel()
    num_outputs = sum(value.numel() for value in gradient_map.params.values())
    params = gradient_map.params
    if 12 * num_inputs * num_outputs > memory_bytes:
        double: Params = {name: value.double() for name, value in params.items()}
        wide = Batch(sample.inputs.double(), sample.targets)
        operator = SampleJacobian(gradient_map, double, wide)
        columns = [operator.gram(operator.unit(i))[0] for i in range(num_inputs)]
        gram = torch.stack(columns)
    else:

        def gradient(flat: Tensor) -> Tensor:
            moved = Batch(flat.reshape(sample.inputs.shape), sample.targets)
            return ravel(gradient_map(params, moved, gradient_map.buffers))

        point = sample.inputs.flatten()
        basis = torch.eye(num_inputs, dtype=point.dtype, device=point.device)
        push = vmap(lambda v: jvp(gradient, (point,), (v,))[1])
        rows = torch.cat([push(part) for part in basis.split(_COLUMNS)]).double()
        gram = rows @ rows.T
    return (gram + gram.T) / 2


def exact_proxies(gradient_map: GradientMap, samples: Batch) -> Proxies:
    """From the dense Hessians of both attacks' losses at the truth.

    H of L2 = JJᵀ (Hong et al. 2024, theorem 3, whose J is the transpose), H of the cosine distance
    = (JJᵀ − (Jg)(Jg)ᵀ/‖g‖²)/‖g‖² (theorem 4). An eigenvalue that rounding may have made
    is 0: of a wide network it is so small, of a narrow one J has no full rank.

    Args:
        gradient_map: of a model that uses no statistics of a batch.
        samples: S of them.
    """
    # Torch's cross-entropy loses the digits of confident samples.
    gradient_map = gradient_map.with_loss(stable(gradient_map.loss) or gradient_map.loss)
    params, buffers = gradient_map.params, gradient_map.buffers
    found: Proxies = {name: [] for name in PROXIES}
    for index in range(len(samples)):
        sample = samples[index : index + 1]
        operator = SampleJacobian(gradient_map, params, sample, buffers)
        gradient = operator.value.double()
        squared = float(gradient.square().sum())
        along = operator.rmatvec(operator.value)[0].double()
        gram = dense_gram(gradient_map, sample)
        angular = (gram - torch.outer(along, along) / squared) / squared
        found["grad_norm"].append(squared**0.5)
        for name, matrix, scale in (("", gram, 1.0), ("ang_", angular, squared)):
            spectrum = torch.linalg.eigvalsh(matrix)
            floor = _RESOLVED * float(gram.diagonal().sum()) / scale
            least = float(spectrum[0])
            found[f"{name}max"].append(float(spectrum[-1]))
            found[f"{name}min"].append(least if least > floor else 0.0)
    return found


def published_proxies(
    gradient_map: GradientMap,
    samples: Batch,
    iterations: int,
    step: float,
    generator: torch.Generator,
) -> Proxies:
    """By power iteration with finite differences, as Hong et al. 2024 describe (Algorithm 1).

    Jᵀv is a central difference of the gradient, (g(x + hv) − g(x − hv))/2h, in float32; an exact
    pullback at x gives J(Jᵀv). For the cosine distance Jᵀv loses its share along g first and the
    product is divided by ‖g‖². The smallest eigenvalue is ``max`` less the largest one of
    max · I − H, by as many iterations again. The listing draws v anew inside its loop, which is no
    power iteration; here v is kept, as the paper's text says. Neither the number of iterations
    nor h is printed.

    Args:
        gradient_map: of a model that uses no statistics of a batch.
        samples: S of them.
        iterations: of each of the four power iterations.
        step: h, with ‖v‖ = 1.
        generator: of the first v.
    """
    params, buffers = gradient_map.params, gradient_map.buffers
    operator = SampleJacobian(gradient_map, params, samples, buffers)
    inputs, gradients = samples.inputs.flatten(1), operator.value
    norms = row_norms(gradients)[:, None]

    def at(flat: Tensor) -> Tensor:
        moved = Batch(flat.reshape(samples.inputs.shape), samples.targets)
        return sample_gradients(gradient_map, params, moved, buffers)

    def product(v: Tensor, angular: bool) -> Tensor:
        pushed = (at(inputs + step * v) - at(inputs - step * v)) / (2 * step)
        if not angular:
            return operator.rmatvec(pushed)
        pushed = pushed - gradients * (gradients * pushed).sum(1, keepdim=True) / norms**2
        return operator.rmatvec(pushed) / norms**2

    def power(angular: bool, shift: Tensor | None) -> Tensor:
        v = torch.randn(inputs.shape, generator=generator).to(inputs)
        v = normalize_rows(v)[0]
        value = v.new_zeros(len(v))
        for _ in range(iterations):
            image = product(v, angular)
            if shift is not None:
                image = shift[:, None] * v - image
            value = (v * image).sum(1)
            v = normalize_rows(image)[0]
        return value if shift is None else shift - value

    found = {"grad_norm": norms[:, 0].tolist()}
    for name, angular in (("", False), ("ang_", True)):
        top = power(angular, None)
        found[f"{name}max"] = top.tolist()
        found[f"{name}min"] = power(angular, top).tolist()
    return found
