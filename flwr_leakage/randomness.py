"""Generators that are pure functions of (seed, round, client, purpose)."""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Draws = torch.Generator | Sequence[torch.Generator]
"""Where the rows of a random matrix come from: one generator for all, or one for each row.

With one for each, a row does not depend on which other rows are drawn beside it.
"""


def derive_seed(seed: int, *, server_round: int = 0, client_id: int = 0, purpose: str = "") -> int:
    """Return a seed of 63 bits that depends on the arguments only, and on each of them."""
    words = [seed, server_round, client_id, zlib.crc32(purpose.encode())]
    if min(words) < 0:
        raise ValueError(f"seed, server_round and client_id must be ≥ 0, got {words[:3]}.")
    state = np.random.SeedSequence(words).generate_state(2, np.uint32)
    return int(state[0]) << 31 ^ int(state[1])


def make_generator(
    seed: int, *, server_round: int = 0, client_id: int = 0, purpose: str = ""
) -> torch.Generator:
    """Return a CPU generator that depends on the arguments only.

    Every random draw of the project comes from such a generator, so that a result does not
    depend on the process, the engine or the order in which clients are served. ``purpose``
    separates the streams of one client and round (``"batch"``, ``"defense"``, ``"attack"``).
    """
    generator = torch.Generator()
    generator.manual_seed(
        derive_seed(seed, server_round=server_round, client_id=client_id, purpose=purpose)
    )
    return generator


def normal_rows(shape: Sequence[int], draws: Draws) -> Float[Tensor, "S N"]:
    """Independent standard normal numbers of a shape (S, N), in float64."""
    if isinstance(draws, torch.Generator):
        return torch.randn(tuple(shape), generator=draws, dtype=torch.float64)
    _check_count(shape, draws)
    return torch.stack([torch.randn(shape[1], generator=g, dtype=torch.float64) for g in draws])


def sign_rows(shape: Sequence[int], draws: Draws) -> Float[Tensor, "S N"]:
    """Independent entries of −1 and 1 with equal chances, of a shape (S, N), in float64."""
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
