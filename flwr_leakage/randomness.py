"""Draw random numbers from a seed in a simulation, and else from the operating system's entropy.

A defense hides data behind random draws, so that whoever can repeat the draws can undo the defense.
A generator made of (seed, round, client) can be repeated by everyone who guesses the seed.
PyTorch's own generator (MT19937) can be rebuilt from some of its outputs, which a server sees
wherever it knows an entry's value before the noise. Defenses therefore draw from a ``Randomness``:
``Secure`` outside of simulations, ``Reproducible`` in one.
"""

import math
import os
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Draws = torch.Generator | Sequence[torch.Generator]
"""The generators of a random matrix: a single one for all rows, or a sequence with one for each
row.

With one generator per row, a row does not depend on which other rows are drawn."""

States = tuple[Tensor, ...]
"""States of torch's global generators: the CPU's, then those of all GPUs once one was used."""


def generator_states() -> States:
    """Return the present states of torch's global generators."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return (torch.get_rng_state(), *gpus)


def have_drawn(before: States) -> bool:
    """Return whether one of torch's global generators has drawn since they had the states
    ``before``.
    """
    # A GPU that was first used in the meantime has no earlier state, and ``zip`` leaves it out.
    pairs = zip(before, generator_states(), strict=False)
    return any(not torch.equal(then, now) for then, now in pairs)


@contextmanager
def generators_kept(begin: States | None = None) -> Iterator[None]:
    """Restore the states of torch's global generators after a ``with`` block.

    The block begins with the states ``begin``, or with the present ones if ``begin`` is ``None``.
    """
    kept = generator_states()
    try:
        if begin is not None:
            _set(begin)
        yield
    finally:
        _set(kept)


def _set(states: States) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(list(states[1:]))


def derive_seed(seed: int, *, server_round: int = 0, client_id: int = 0, purpose: str = "") -> int:
    """Return a seed of 63 bits that depends on the arguments only, and on each of them.

    Raises:
        ValueError: an argument is negative. The error's text never holds the seed, which may be a
            secret, as errors travel to the server.
    """
    if seed < 0:
        raise ValueError("seed must be ≥ 0, got a negative one.")
    if min(server_round, client_id) < 0:
        raise ValueError(
            f"server_round and client_id must be ≥ 0, got {server_round} and {client_id}."
        )
    words = [seed, server_round, client_id, zlib.crc32(purpose.encode())]
    state = np.random.SeedSequence(words).generate_state(2, np.uint32)
    return int(state[0]) << 31 ^ int(state[1])


def entropy_seed() -> int:
    """Return a seed of 63 bits from the operating system's entropy, for draws that hide nothing."""
    return secrets.randbits(63)


def make_generator(
    seed: int, *, server_round: int = 0, client_id: int = 0, purpose: str = ""
) -> torch.Generator:
    """Return a random generator on the CPU whose draws depend on the arguments only, and not on the
    process, the engine or the order of clients. ``purpose``, such as ``"batch"`` or ``"attack"``,
    separates the draws of one client and round.
    """
    generator = torch.Generator()
    generator.manual_seed(
        derive_seed(seed, server_round=server_round, client_id=client_id, purpose=purpose)
    )
    return generator


def normal_rows(shape: Sequence[int], draws: Draws) -> Float[Tensor, "S N"]:
    """Return independent standard normal numbers of a shape (S, N), in float64."""
    if isinstance(draws, torch.Generator):
        return torch.randn(tuple(shape), generator=draws, dtype=torch.float64)
    _check_count(shape, draws)
    return torch.stack([torch.randn(shape[1], generator=g, dtype=torch.float64) for g in draws])


def sign_rows(shape: Sequence[int], draws: Draws) -> Float[Tensor, "S N"]:
    """Return random signs, −1 or 1 with equal probability, of a shape (S, N), in float64."""
    if isinstance(draws, torch.Generator):
        bits = torch.randint(0, 2, tuple(shape), generator=draws)
    else:
        _check_count(shape, draws)
        bits = torch.stack([torch.randint(0, 2, (shape[1],), generator=g) for g in draws])
    return (2 * bits - 1).double()


def _check_count(shape: Sequence[int], draws: Sequence[torch.Generator]) -> None:
    if len(draws) != shape[0]:
        raise ValueError(
            f"draws must hold one generator for each of {shape[0]} rows, got {len(draws)}."
        )


class Randomness(ABC):
    """The source of random numbers from which defenses draw.

    A draw may have a more precise type than the ``dtype`` asked for. A defense therefore adds the
    draw to the update first, and rounds the sum to the update's type afterwards.
    """

    @abstractmethod
    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return independent standard normal draws."""

    @abstractmethod
    def laplace(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return independent draws of density ``exp(−|z|) / 2``, whose standard deviation is √2."""

    @abstractmethod
    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return independent uniform draws from [0, 1], of the default dtype."""

    @abstractmethod
    def permutation(self, count: int) -> Tensor:
        """Return 0 … ``count`` − 1 in random order."""

    @abstractmethod
    def bytes(self, count: int) -> Tensor:
        """Return ``count`` random integers, each of 0 … 255 equally likely."""

    def exponential(self, shape: Sequence[int]) -> Tensor:
        """Return independent exponential draws of density ``exp(−z)``, of the default dtype."""
        return -self.uniform(shape).clamp_min(torch.finfo(torch.float32).tiny).log()


@dataclass(frozen=True)
class Reproducible(Randomness):
    """Random draws that can be repeated, for simulations only.

    Anyone who can make the same generator can subtract the noise from the released update.

    Attributes:
        generator: the torch generator of all draws, which are made on its device.
    """

    generator: torch.Generator

    @staticmethod
    def from_seed(
        seed: int, *, server_round: int = 0, client_id: int = 0, purpose: str = ""
    ) -> "Reproducible":
        """Return draws from the generator that :func:`make_generator` gives for the arguments."""
        return Reproducible(
            make_generator(seed, server_round=server_round, client_id=client_id, purpose=purpose)
        )

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return independent standard normal draws of the generator."""
        generator = self.generator
        return torch.randn(shape, dtype=dtype, generator=generator, device=generator.device)

    def laplace(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return Laplacian draws ``−sign(v) · log(1 − |v|)``, with v uniform on (−1, 1)."""
        generator = self.generator
        draws = torch.rand(shape, dtype=dtype, generator=generator, device=generator.device)
        signed = draws.mul_(2).sub_(1)
        # |v| is kept below 1, as v = −1, which float32 draws with a probability of 2⁻²⁴, gives −∞.
        magnitude = signed.abs().clamp_(max=1 - torch.finfo(dtype).eps / 2)
        return magnitude.neg_().log1p_().neg_().mul_(signed.sign_())

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return independent uniform draws from [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.generator.device)

    def permutation(self, count: int) -> Tensor:
        """Return 0 … ``count`` − 1 in random order."""
        return torch.randperm(count, generator=self.generator, device=self.generator.device)

    def bytes(self, count: int) -> Tensor:
        """Return ``count`` random integers, each of 0 … 255 equally likely."""
        generator = self.generator
        return torch.randint(256, (count,), generator=generator, device=generator.device)

    def exponential(self, shape: Sequence[int]) -> Tensor:
        """Return independent exponential draws of density ``exp(−z)``."""
        draws = torch.empty(tuple(shape), device=self.generator.device)
        return draws.exponential_(generator=self.generator)


_CHUNK = 1 << 17
"""The number of draws that are made at a time. Their intermediate copies then fit into the
processor's cache; larger chunks are slower."""


@dataclass(frozen=True)
class Secure(Randomness):
    """Random draws from the operating system's entropy, which nobody can repeat or predict.

    ``os.urandom`` is a cryptographic generator, and keeps no state in this process.

    A normal number is the scaled sum of four, each made of 52 random bits by the inverse of the
    normal distribution function. A Laplacian number is also made of four normal ones. With a single
    one, the set of floating-point numbers that can occur would reveal the value below the noise
    (Mironov 2012). The sum is the remedy of Holohan and Braghin (2021), which Opacus' secure mode
    takes, too. Sums are computed in float64.
    """

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return standard normal draws in float64, each half the sum of four independent ones."""
        return _of_four_normals(shape, lambda z: z.sum(0).div_(2))

    def laplace(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return independent Laplacian draws z₁z₂ + z₃z₄ in float64, with z₁ … z₄ standard normal,
        as the characteristic function of each product is (1 + t²)^(−1/2) (Kotz et al. 2001, 2.2).
        """
        return _of_four_normals(shape, lambda z: z[0] * z[1] + z[2] * z[3])

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return independent uniform draws from (0, 1]."""
        return _uniforms(math.prod(shape)).to(torch.get_default_dtype()).reshape(tuple(shape))

    def permutation(self, count: int) -> Tensor:
        """Return 0 … ``count`` − 1 in the order that sorts as many random 64-bit integers. Two of
        these integers are equal with a probability of at most count² 2⁻⁶⁵; only then some orders
        are likelier than others.
        """
        return torch.argsort(_entropy(count, torch.int64))

    def bytes(self, count: int) -> Tensor:
        """Return ``count`` random integers, each of 0 … 255 equally likely."""
        return _entropy(count, torch.uint8).long()


def _entropy(count: int, dtype: torch.dtype) -> Tensor:
    """Return ``count`` integers of an integer type from the system's entropy, all bits random."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(os.urandom(count * dtype.itemsize)), dtype=dtype)


def _uniforms(count: int) -> Tensor:
    """Return ``count`` draws from the multiples of 2⁻⁵³ in (0, 1], equally likely, in float64."""
    # The shift keeps the sign, so that its results −2⁵² … 2⁵² − 1 become 2⁻⁵³ … 1.
    return (_entropy(count, torch.int64) >> 11).double().mul_(2.0**-53).add_(0.5 + 2.0**-53)


def _normals(count: int) -> Tensor:
    """Return ``count`` standard normal draws in float64. Each is Φ⁻¹, the inverse of the normal
    distribution function, at the centre of one of 2⁵² cells of equal width, chosen at random. The
    centres are exact floating-point numbers.
    """
    cells = (_entropy(count, torch.int64) >> 12).double()
    return torch.special.ndtri(cells.add_(0.5).mul_(2.0**-52).add_(0.5))


def _of_four_normals(shape: Sequence[int], combine: Callable[[Tensor], Tensor]) -> Tensor:
    drawn = torch.empty(math.prod(shape), dtype=torch.float64)
    for part in drawn.split(_CHUNK):
        part.copy_(combine(_normals(4 * len(part)).reshape(4, -1)))
    return drawn.reshape(tuple(shape))
