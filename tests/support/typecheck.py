"""The type checker of the tests: beartype, with an int accepted where a float is asked for."""

import random

import beartype._check.code.codemain as _generated
from beartype import BeartypeConf, beartype

# Beartype checks one entry of a container, drawn from the process-wide generator. That would move
# the very state that tests of a passive observer compare.
_generated.getrandbits = random.Random(0).getrandbits  # type: ignore[attr-defined]

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
