"""Compress the update: to a random subset, to few levels, to signs, or to few singular values.
These methods are made to send fewer bits, and guarantee no privacy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.defenses.base import UpdateDefense
from flwr_leakage.params import Params, ravel, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update
from flwr_leakage.values import require


@dataclass(frozen=True)
class RandomSubset(UpdateDefense):
    """A defense that sends each entry of the update with probability ``share``, and otherwise zero.

    The draws are new in each round. Shokri and Shmatikov (2015, section 5) send a tenth of the
    entries. Konečný et al. (2016, section 3) divide the sent entries by ``share``, so that their
    expected value is the update.

    Attributes:
        share: the probability of each entry to be sent, in (0, 1].
        is_unbiased: whether the sent entries are divided by ``share``.
    """

    share: float = 0.1
    is_unbiased: bool = False

    def __post_init__(self) -> None:
        require(self, "lie in (0, 1]", "share")

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        return f"a random {100 * self.share:g} % of the update’s numbers are sent"

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update with entries that are drawn at random set to zero. Each is kept with
        probability ``share``, and divided by ``share`` if ``is_unbiased``.
        """
        factor = 1 / self.share if self.is_unbiased else 1.0
        return {
            name: torch.where(
                randomness.uniform(value.shape).to(value.device) <= self.share, value * factor, 0.0
            )
            for name, value in update.delta.items()
        }


@dataclass(frozen=True)
class QSGD(UpdateDefense):
    """A defense that rounds each entry at random to a multiple of 1/s of the norm of the entry's
    bucket.

    A bucket v consists of ``bucket_size`` consecutive entries of the whole update; the last one is
    padded with zeros. It is sent as ``Q(v)_i = ‖v‖₂ sign(v_i) ξ_i / s``, with ξ_i drawn from the
    two integers around ``s |v_i| / ‖v‖₂`` so that ``E Q(v) = v`` (Alistarh et al. 2017, section
    3.1). The defaults are those of the authors' later code (github.com/IST-DASLab/smart-quantizer).

    Attributes:
        levels: the number s of levels above zero, ≥ 1.
        bucket_size: the number of entries in a bucket, ≥ 1.
    """

    levels: int = 16
    bucket_size: int = 512

    def __post_init__(self) -> None:
        require(self, "be at least 1", "levels", "bucket_size")

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        return f"each of the update’s numbers is rounded at random to one of {self.levels} sizes"

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update's tensors with each entry rounded at random to a multiple of ‖v‖ / s.

        Here s is ``levels``, and the bucket v consists of the entry and its neighbours,
        ``bucket_size`` consecutive entries of the whole update.
        """
        vector = ravel(update.delta)
        padded = F.pad(vector, (0, -len(vector) % self.bucket_size)).reshape(-1, self.bucket_size)
        norms = padded.norm(dim=1, keepdim=True)
        places = self.levels * padded.abs() / norms.clamp_min(torch.finfo(norms.dtype).tiny)
        chosen = (places + randomness.uniform(places.shape).to(places)).floor()
        rounded = (padded.sign() * chosen * norms / self.levels).reshape(-1)[: len(vector)]
        return {n: v.to(update.delta[n].dtype) for n, v in unravel(rounded, update.delta).items()}


@dataclass(frozen=True)
class SignSGD(UpdateDefense):
    """A defense that sends the sign of each entry, multiplied by one number per tensor.

    For a tensor v of d entries ``‖v‖₁ / d · sign(v)`` is sent (Karimireddy et al. 2019, section 4),
    or ``step · sign(v)`` with a step that all clients share (Bernstein et al. 2018, algorithm 1).

    Attributes:
        step: the magnitude of every sent entry, > 0; ``None`` for the mean magnitude of the entry's
            tensor.
    """

    step: float | None = None

    def __post_init__(self) -> None:
        require(self, "be positive", "step", optional=True)

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        sizes = "one size for each layer" if self.step is None else "one size for all"
        return f"only the signs of the update’s numbers are sent, with {sizes}"

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the signs of the update's entries times ``step``, or times their tensor's mean
        magnitude if ``step`` is ``None``. An entry of zero stays zero.
        """
        return {
            name: value.sign() * (value.abs().mean() if self.step is None else self.step)
            for name, value in update.delta.items()
        }


@dataclass(frozen=True)
class TruncatedSVD(UpdateDefense):
    """A defense that sends the largest singular components of each weight's update ΔW.

    The r largest components of ``ΔW = Σ_i σ_i u_i v_iᵀ`` are sent, where r is the least number for
    which ``Σ_{i ≤ r} σ_i² ≥ energy · Σ_i σ_i²``. A convolution's weight is a matrix with its
    kernels as rows. Vectors are sent unchanged. SVDefense (Luo et al. 2026) also chooses the energy
    by class balance and weights channels and layers; this is not implemented here.

    Attributes:
        energy: the share of the squared norm that is kept, in (0, 1].
    """

    energy: float = 0.99

    def __post_init__(self) -> None:
        require(self, "lie in (0, 1]", "energy")

    def in_words(self) -> str:
        """Return a clause on the effect of the defense, for the sentences of the report."""
        return (
            f"each layer’s update is replaced by one of low rank with {100 * self.energy:g} % of "
            "its energy"
        )

    def released(self, update: Update, randomness: Randomness) -> Params:
        """Return the update with each weight reduced to its largest singular components."""
        return {n: v.clone() if v.ndim < 2 else self._truncated(v) for n, v in update.delta.items()}

    def _truncated(self, value: Tensor) -> Tensor:
        left, sizes, right = torch.linalg.svd(value.flatten(1), full_matrices=False)
        held = sizes.double().square().cumsum(0)
        kept = int((held < self.energy * held[-1]).sum()) + 1
        return (left[:, :kept] * sizes[:kept] @ right[:kept]).reshape(value.shape)
