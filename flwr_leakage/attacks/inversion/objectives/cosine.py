"""Cosine distance of gradients."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.params import Params


def inner_product(left: Params, right: Params) -> Tensor:
    """Return ``Σ ⟨left_l, right_l⟩`` over all entries, a scalar."""
    terms = [(left[k] * right[k]).sum() for k in right]
    return sum(terms[1:], start=terms[0])


def cosine_distance(candidate: Params, observed: Params) -> Tensor:
    """Return ``1 − ⟨g, g*⟩ / (‖g‖ ‖g*‖)`` (Geiping et al. 2020, eq. 4), in [0, 2]."""
    return cosine_of_products(
        inner_product(candidate, observed),
        inner_product(candidate, candidate),
        inner_product(observed, observed),
    )


def cosine_of_products(inner: Tensor, squared: Tensor, observed_squared: Tensor) -> Tensor:
    """Return the cosine distance by ⟨g, g*⟩, ‖g‖² and ‖g*‖²."""
    norms = squared * observed_squared
    tiny = 1e-30 if norms.element_size() < 8 else 1e-300
    return 1 - inner / norms.clamp_min(tiny).sqrt()


@dataclass(frozen=True)
class Cosine:
    """The objective of Inverting Gradients, which ignores the gradient's length."""

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        return cosine_distance(candidate, observed)

    def of_products(self, inner: Tensor, squared: Tensor, observed_squared: Tensor) -> Tensor:
        """Return the distances (A,) of A candidates by their ⟨g, g*⟩, ‖g‖² and ‖g*‖², (A,) each."""
        return cosine_of_products(inner, squared, observed_squared)
