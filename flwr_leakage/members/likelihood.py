"""Compare records with an update by the likelihood ratio of their gradients.

The gradients of records are modelled as draws of a Gaussian, whose covariance is estimated from
records that are no members (Leemann, Pawelczyk and Kasneci, Gaussian Membership Inference Privacy,
NeurIPS 2023). The test needs the records' labels. It also works if the row space of no layer's
update shows members.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.members.statistics import Sketch, gradient_products
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch

RIDGES = (1e-1, 1e-3, 1e-5)
"""Ridges ρ, relative to the mean squared length of the reference's gradients, those of records that
are no members. A ridge sets the variance of the Gaussian in directions in which these gradients do
not vary. A rehearsal (a repetition of the round on records that are no members) weights the
likelihood ratios of all three. On four development draws each, the smallest ridge found most
members after one step of a ConvNet, and the middle one after several local steps and for texts. The
largest is meant for updates with noise; this was not measured."""


def log_likelihood_ratios(
    along: Float[Tensor, "... N"], energies: Float[Tensor, "... N"], count: int
) -> Float[Tensor, "... N"]:
    """Return ``‖g‖²_Σ / (2n) − ⟨g, ḡ⟩_Σ``, small for members, for N records in the last axis.

    g is a record's gradient, ḡ the update of ``count`` = n samples, and ``⟨a, b⟩_Σ = aᵀΣ⁻¹b`` with
    the covariance Σ of gradients. If ḡ is Gaussian with the covariance Σ/n, and g moves its mean by
    g/n, this is the negative logarithm of the ratio of its densities with the record and without
    it. ``along`` holds ⟨g, ḡ⟩_Σ, and ``energies`` ‖g‖²_Σ.

    Example:
        >>> log_likelihood_ratios(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 2.0]), 2).tolist()
        [-0.5, 0.5]
    """
    return energies / (2 * count) - along


LARGEST_REFERENCE = 600
"""The number of records, all no members, whose gradients make a :class:`Reference`; more are taken
only if a repetition of the round needs more. The cost of inverting their inner products grows with
the cube of this number."""


@dataclass(frozen=True)
class Reference:
    """The gradients of R records that are no members, from which the covariance of all records'
    gradients is estimated.

    Attributes:
        names: the names of the gradients' parameters, in the order of the model.
        sketches: (R, D) the sketches of the records' gradients, see
            :class:`~flwr_leakage.members.statistics.Sketch`.
        gram: (R, R) the inner products of the sketches.
    """

    names: tuple[str, ...]
    sketches: Float[Tensor, "R D"]
    gram: Float[Tensor, "R R"]

    @classmethod
    def of(cls, problem: Problem, records: Batch) -> "Reference":
        """Return the reference made of the gradients of ``records`` at the parameters and buffers
        that the server sent for the update ``problem``.
        """
        *_, found = gradient_products(problem, [problem.gradient], records, sketched=True)
        names = tuple(name for name in problem.params if name in problem.gradient)
        return cls(names, found, found @ found.T)

    def compare(
        self,
        updates: Sequence[Params],
        members: Sequence[Int[Tensor, " M"] | None],
        count: int,
        sketches: Float[Tensor, "N D"] | None,
    ) -> Float[Tensor, "V N L"]:
        """Return the log-likelihood ratios of N records in V updates, for each of L ridges.

        With H (R, D) the reference's sketches and a ridge ρ, the covariance is
        ``Σ = (HᵀH + ρI)/R``. So ``Σ⁻¹x`` is ``x − Hᵀ(HHᵀ + ρI)⁻¹Hx`` up to a factor (Woodbury),
        which is left out. The gradients' mean is not subtracted: the centred gradients sum to zero,
        so that all but one would determine the last. For a record of the reference itself, Σ is
        estimated from the other records.

        Args:
            updates: the pseudo-gradients of V updates.
            members: for each update, the indices of the reference's records that were in it, which
                are left out of the covariance; ``None`` if there are none.
            count: the number of samples of an update.
            sketches: the sketches of the records; ``None`` for those of the reference itself.
        """
        vectors = torch.stack([ravel({k: one[k] for k in self.names}) for one in updates])
        each = []
        shortened = Sketch(vectors.shape[1])(vectors)
        for update, inside in zip(shortened, members, strict=True):
            known = torch.ones(len(self.gram), dtype=torch.bool)
            if inside is not None:
                known[inside] = False
            along = self.sketches @ update
            if sketches is None:
                values = torch.empty(len(self.gram), len(RIDGES), dtype=torch.float64)
                values[~known] = self._others(
                    self.gram[~known][:, known], self.gram.diagonal()[~known], along[~known],
                    known, along, count,
                )  # fmt: skip
                values[known] = self._left_out(known, along, count)
            else:
                cross = sketches @ self.sketches[known].T
                values = self._others(
                    cross, sketches.square().sum(1), sketches @ update, known, along, count
                )
            each.append(values)
        return torch.stack(each)

    def _inverses(self, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(HHᵀ + ρI)⁻¹`` (L, K, K) for L ridges, and the ridges ρ (L,). H (K, D) has the
        sketches of the K records of the reference at which ``known`` (R,) is true.
        """
        gram = self.gram[known][:, known]
        ridges = torch.tensor(RIDGES).double() * gram.diagonal().mean().clamp_min(1e-300)
        unit = torch.eye(len(gram), dtype=torch.float64)
        return torch.linalg.inv(gram + ridges[:, None, None] * unit), ridges

    def _others(
        self,
        cross: Float[Tensor, "N K"],
        energies: Float[Tensor, " N"],
        along: Float[Tensor, " N"],
        known: Tensor,
        of_known: Float[Tensor, " R"],
        count: int,
    ) -> Float[Tensor, "N L"]:
        """Return the log-likelihood ratios (N, L) of N records that are not among the K records of
        the reference at which ``known`` is true. ``cross`` are the inner products of their
        gradients with those of the K records, ``energies`` those with themselves, and ``along``
        those with the update. ``of_known`` are the inner products of all the reference's gradients
        with the update, and ``count`` is the number of the update's samples.
        """
        inverses, _ = self._inverses(known)
        weights = cross @ inverses
        left = energies - (weights * cross).sum(2)
        return log_likelihood_ratios(along - weights @ of_known[known], left.clamp_min(0), count).T

    def _left_out(
        self, known: Tensor, along: Float[Tensor, " R"], count: int
    ) -> Float[Tensor, "K L"]:
        """Return the log-likelihood ratios (K, L) of the K records of the reference at which
        ``known`` is true, each by a covariance from the K − 1 others. Let ``Q = (HHᵀ + ρI)⁻¹``,
        with H the K sketches. The part of gradient i that the others do not explain has the inner
        product ``(Q H ḡ)ᵢ / Qᵢᵢ`` with the update ḡ, and the squared length ``1/Qᵢᵢ − ρ`` (Schur
        complement). ``along`` are the inner products of all R sketches with ḡ, and ``count`` is the
        number of the update's samples.
        """
        inverses, ridges = self._inverses(known)
        own = inverses.diagonal(dim1=1, dim2=2)
        left = (1 / own - ridges[:, None]).clamp_min(0)
        return log_likelihood_ratios((inverses @ along[known]) / own, left, count).T
