"""Generators that are pure functions of (seed, round, client, purpose)."""

import zlib

import numpy as np
import torch


def make_generator(
    seed: int, *, server_round: int = 0, client_id: int = 0, purpose: str = ""
) -> torch.Generator:
    """Return a CPU generator that depends on the arguments only.

    Every random draw of the project comes from such a generator, so that a result does not
    depend on the process, the engine or the order in which clients are served. ``purpose``
    separates the streams of one client and round (``"batch"``, ``"defense"``, ``"attack"``).
    """
    words = [seed, server_round, client_id, zlib.crc32(purpose.encode())]
    if min(words) < 0:
        raise ValueError(f"seed, server_round and client_id must be ≥ 0, got {words[:3]}.")
    state = np.random.SeedSequence(words).generate_state(2, np.uint32)
    generator = torch.Generator()
    generator.manual_seed(int(state[0]) << 31 ^ int(state[1]))
    return generator
