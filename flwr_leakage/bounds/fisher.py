"""Bounds on the squared error of a reconstruction, from the eigenvalues λ of JJᵀ.

The attacker sees g(x) + n of an input x in R^N, with the gradient g ∈ R^P of the loss L by the
parameters θ and noise n ~ N(0, σ²I), and J = ∇ₓ∇_θL ∈ R^{N×P} is the Jacobian of g by x. The Fisher
information of x is then JJᵀ/σ², whatever the network. All errors here are means over the N entries
of x, in squared units of the model's input.
"""

from jaxtyping import Float
from torch import Tensor


def cramer_rao_mse(
    eigenvalues: Float[Tensor, "... N"], noise_std: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return σ² Σ(1/λ)/N, a lower bound of an unbiased attacker's mean squared error.

    It is the Cramér–Rao bound (Cramér 1946, Rao 1945) for an input x with N entries, over which the
    error is a mean. J is the Jacobian of a gradient by x, and λ are the N eigenvalues of JJᵀ.

    The bound equals the expected squared inversion influence for Gaussian noise without damping
    (Zhang et al. 2023, equation 6). Conditions: the attacker is unbiased (E x̂ = x for all images
    near x: no prior, no clamping), the noise is Gaussian of known σ on every entry, and J has full
    rank. The bound is infinite if an eigenvalue is zero: then no unbiased attacker with a finite
    error exists.

    Args:
        eigenvalues: (..., N) the eigenvalues λ ≥ 0 of JJᵀ.
        noise_std: (...) the standard deviation σ ≥ 0 of the noise for each set of eigenvalues.

    Example:
        >>> cramer_rao_mse(torch.tensor([1.0, 4.0]), torch.tensor(2.0))
        tensor(2.5000)
    """
    return noise_std**2 * (1 / eigenvalues).mean(-1)


def posterior_variance(
    eigenvalues: Float[Tensor, "..."],
    noise_variance: Float[Tensor, "..."] | float,
    prior_variance: float,
) -> Float[Tensor, "..."]:
    """Return τ²σ²/(σ² + τ²λ), the posterior variance of x given the noisy observation of √λ x.

    The prior is x ~ N(0, τ²), and the noise is N(0, σ²).

    Args:
        eigenvalues: λ ≥ 0, squared factors by which x enters the observation.
        noise_variance: σ² ≥ 0; not 0 where λ is 0.
        prior_variance: τ² > 0.
    """
    return prior_variance * noise_variance / (noise_variance + prior_variance * eigenvalues)


def bayesian_mse(
    eigenvalues: Float[Tensor, "... N"], noise_std: Float[Tensor, "..."], prior_std: float
) -> Float[Tensor, "..."]:
    """Return Σ 1/(λ/σ² + 1/τ²)/N, the least mean squared error under a Gaussian prior.

    The sum is over the N eigenvalues λ of JJᵀ, with J the Jacobian of a gradient by the N entries
    of an input x. The gradient is seen with noise N(0, σ²I). For a linear gradient map and x ~ N(μ,
    τ²I) no attacker, biased or not, has a smaller error than this on average over images of this
    prior. For a network the bound holds for the linearisation at x alone. The bound of van Trees
    (1968), in which JJᵀ is averaged over the prior, holds for the network itself. It is at most the
    mean of this one over the prior. Neither bound holds for a single image, nor for images of
    another distribution.

    Args:
        eigenvalues: (..., N) the eigenvalues λ ≥ 0 of JJᵀ.
        noise_std: (...) the standard deviation σ > 0 of the noise for each set of eigenvalues.
        prior_std: the standard deviation τ > 0 of the prior of every entry of x.
    """
    variance = (noise_std**2)[..., None]
    return posterior_variance(eigenvalues, variance, prior_std**2).mean(-1)


def fisher_leakage(
    trace: Float[Tensor, "..."], noise_std: Float[Tensor, "..."], num_inputs: int
) -> Float[Tensor, "..."]:
    """Return η = √(tr(JJᵀ)/N)/σ, the diagonal Fisher leakage dFIL (Guo et al. 2022, section 4).

    J is the Jacobian of a gradient by the N entries of an input, and λ are the eigenvalues of JJᵀ.
    An unbiased attacker's mean squared error per entry is at least 1/η². That is looser than
    ``cramer_rao_mse``, but needs only the trace, and J needs no full rank.

    Args:
        trace: the trace Σλ = ‖J‖_F² of JJᵀ.
        noise_std: the standard deviation σ > 0 of the noise.
        num_inputs: the number N of entries of an input.
    """
    return (trace / num_inputs).sqrt() / noise_std
