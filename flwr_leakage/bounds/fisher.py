"""Bounds on the squared error of reconstruction, from the eigenvalues λ of JJᵀ.

The update shows g(x) + n with n ~ N(0, σ²I), and J = ∇ₓ∇_θL ∈ R^{N×P}. The Fisher information of
x is then JJᵀ/σ², whatever the network. All errors here are means over the N inputs, in squared
model input units.
"""

from jaxtyping import Float
from torch import Tensor


def cramer_rao_mse(
    eigenvalues: Float[Tensor, "... N"], noise_std: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Return σ² Σ(1/λ)/N, below which no unbiased attacker's error lies (Cramér 1946, Rao 1945).

    It is the expected squared I²F for Gaussian noise without damping (Zhang et al. 2023, equation
    6). Conditions: the attacker is unbiased (E x̂ = x for all images near x: no prior, no clamping),
    the noise is Gaussian of known σ on every entry, and J has full rank. It is infinite where an
    eigenvalue is zero: then no unbiased attacker with a finite error exists.

    Args:
        eigenvalues: λ ≥ 0 of JJᵀ.
        noise_std: σ ≥ 0 of each set of eigenvalues.

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
    """Return τ²σ²/(σ² + τ²λ): the variance that √λ x + N(0, σ²) leaves of x ~ N(0, τ²).

    Args:
        eigenvalues: λ ≥ 0.
        noise_variance: σ², ≥ 0; not 0 where λ is.
        prior_variance: τ² > 0.
    """
    return prior_variance * noise_variance / (noise_variance + prior_variance * eigenvalues)


def bayesian_mse(
    eigenvalues: Float[Tensor, "... N"], noise_std: Float[Tensor, "..."], prior_std: float
) -> Float[Tensor, "..."]:
    """Return Σ 1/(λ/σ² + 1/τ²)/N, the mean squared error of the best Gaussian attacker.

    Exact for a linear gradient map and x ~ N(μ, τ²I), for every attacker, biased ones too, as a
    mean over images of the prior. For a network it is the linearised one at x. A bound for the
    network itself is that of van Trees (1968): JJᵀ averaged over the prior takes the place of JJᵀ,
    which is never larger than the mean of this over the prior (Jensen). It does not bind on a
    single image, nor where images are not of this prior: a better prior may go below.

    Args:
        eigenvalues: λ ≥ 0 of JJᵀ.
        noise_std: σ > 0 of each set of eigenvalues.
        prior_std: τ > 0, of every input.
    """
    variance = (noise_std**2)[..., None]
    return posterior_variance(eigenvalues, variance, prior_std**2).mean(-1)


def fisher_leakage(
    trace: Float[Tensor, "..."], noise_std: Float[Tensor, "..."], num_inputs: int
) -> Float[Tensor, "..."]:
    """Return η = √(tr(JJᵀ)/N)/σ, the diagonal Fisher leakage dFIL (Guo et al. 2022, section 4).

    An unbiased attacker's mean squared error is at least 1/η². That is looser than
    ``cramer_rao_mse``, as a harmonic mean of λ is at most its arithmetic mean, but it takes the
    trace only, and holds for a J without full rank, too.

    Args:
        trace: Σλ = ‖J‖_F².
        noise_std: σ > 0.
        num_inputs: N.
    """
    return (trace / num_inputs).sqrt() / noise_std
