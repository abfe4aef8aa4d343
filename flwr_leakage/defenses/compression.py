"""Compress the update: by a random subset, few levels, signs, or few singular values.

They are made to send less, and give no guarantee of privacy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.defenses.base import Defense, LocalRound, check_update
from flwr_leakage.params import Params, ravel, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Update


class Compression(Defense, ABC):
    """A defense whose answer depends on the update's entries and on fresh draws alone."""

    @abstractmethod
    def compress(self, delta: Mapping[str, Tensor], randomness: Randomness) -> Params:
        """Return the compressed update that is sent, with the same names, shapes and dtypes."""

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Compress ``update.delta``."""
        check_update(update)
        return replace(update, delta=self.compress(update.delta, randomness))


@dataclass(frozen=True)
class RandomSubset(Compression):
    """Send each entry with the chance ``share``, and zero otherwise, drawn anew every round.

    Shokri and Shmatikov (2015, section 5) share a random tenth of the entries; Konečný et al.
    (2016, section 3) divide the sent entries by the chance, so that their mean is the update.

    Attributes:
        share: chance of each entry, in (0, 1].
        is_unbiased: whether entries are divided by ``share``.
    """

    share: float = 0.1
    is_unbiased: bool = False

    def __post_init__(self) -> None:
        _check_share("share", self.share)

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return f"a random {100 * self.share:g} % of the update’s numbers are sent"

    def compress(self, delta: Mapping[str, Tensor], randomness: Randomness) -> Params:
        """Set all other entries to zero."""
        factor = 1 / self.share if self.is_unbiased else 1.0
        return {
            name: torch.where(
                randomness.uniform(value.shape).to(value.device) <= self.share, value * factor, 0.0
            )
            for name, value in delta.items()
        }


@dataclass(frozen=True)
class QSGD(Compression):
    """Round each entry at random to one of few levels of its bucket's norm.

    ``Q(v)_i = ‖v‖₂ sign(v_i) ξ_i / s``, with ξ_i one of the two integers around ``s |v_i| / ‖v‖₂``
    so that ``E Q(v) = v`` (Alistarh et al. 2017, section 3.1). A bucket v is a run of
    ``bucket_size`` entries of the whole update; the last one is padded with zeros. The defaults are
    those of the authors' later code (github.com/IST-DASLab/smart-quantizer).

    Attributes:
        levels: s, the number of levels above zero, ≥ 1.
        bucket_size: entries that share a norm, ≥ 1.
    """

    levels: int = 16
    bucket_size: int = 512

    def __post_init__(self) -> None:
        for name in ("levels", "bucket_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return f"each of the update’s numbers is rounded at random to one of {self.levels} sizes"

    def compress(self, delta: Mapping[str, Tensor], randomness: Randomness) -> Params:
        """Round all entries."""
        vector = ravel(delta)
        padded = F.pad(vector, (0, -len(vector) % self.bucket_size)).reshape(-1, self.bucket_size)
        norms = padded.norm(dim=1, keepdim=True)
        places = self.levels * padded.abs() / norms.clamp_min(torch.finfo(norms.dtype).tiny)
        chosen = (places + randomness.uniform(places.shape).to(places)).floor()
        rounded = (padded.sign() * chosen * norms / self.levels).reshape(-1)[: len(vector)]
        return {n: v.to(delta[n].dtype) for n, v in unravel(rounded, delta).items()}


@dataclass(frozen=True)
class SignSGD(Compression):
    """Send each entry's sign, times one size for each tensor.

    The size is the tensor's mean magnitude, ``‖v‖₁ / d · sign(v)`` (Karimireddy et al. 2019,
    section 4), or the step that all clients share (Bernstein et al. 2018, algorithm 1).

    Attributes:
        step: the size of every entry, > 0, or ``None`` for each tensor's mean magnitude.
    """

    step: float | None = None

    def __post_init__(self) -> None:
        if self.step is not None and not self.step > 0:
            raise ValueError(f"step must be positive or None, got {self.step}.")

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        sizes = "one size for each layer" if self.step is None else "one size for all"
        return f"only the signs of the update’s numbers are sent, with {sizes}"

    def compress(self, delta: Mapping[str, Tensor], randomness: Randomness) -> Params:
        """Keep the signs; an entry of zero stays zero."""
        return {
            name: value.sign() * (value.abs().mean() if self.step is None else self.step)
            for name, value in delta.items()
        }


@dataclass(frozen=True)
class TruncatedSVD(Compression):
    """Send the singular parts of each weight's update that hold a share of its energy.

    The r largest parts of ``ΔW = Σ_i σ_i u_i v_iᵀ`` are sent, with a convolution's kernels as rows,
    and with r the least number for which ``Σ_{i ≤ r} σ_i² ≥ energy · Σ_i σ_i²``. Vectors are sent
    as they are. It is the core of SVDefense (Luo et al. 2026), which chooses the energy by a
    client's class balance, and weights channels and layers; these parts are not built here.

    Attributes:
        energy: the share that is kept, in (0, 1].
    """

    energy: float = 0.99

    def __post_init__(self) -> None:
        _check_share("energy", self.energy)

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return (
            f"each layer’s update is replaced by one of low rank with {100 * self.energy:g} % of "
            "its energy"
        )

    def compress(self, delta: Mapping[str, Tensor], randomness: Randomness) -> Params:
        """Drop the smaller singular values of all matrices and kernels."""
        return {n: v.clone() if v.ndim < 2 else self._truncated(v) for n, v in delta.items()}

    def _truncated(self, value: Tensor) -> Tensor:
        left, sizes, right = torch.linalg.svd(value.flatten(1), full_matrices=False)
        held = sizes.double().square().cumsum(0)
        kept = int((held < self.energy * held[-1]).sum()) + 1
        return (left[:, :kept] * sizes[:kept] @ right[:kept]).reshape(value.shape)


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must lie in (0, 1], got {value}.")
