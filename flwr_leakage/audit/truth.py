"""Hold the truth that a simulation knows, for the evaluation and for granted facts."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from flwr_leakage.records import Batch
from flwr_leakage.untrusted import parse_json


@dataclass(frozen=True)
class Mixed:
    """The mixing of a client's samples by a defense.

    Attributes:
        matrix: W (B, n) of the encodings W · samples.
        flips_signs: whether each entry's sign was then drawn anew.
    """

    matrix: Tensor
    flips_signs: bool


@dataclass(frozen=True)
class Truth:
    """The samples that a client trained on, which only a simulation can know.

    Attributes:
        private: the private samples, against which reconstructions are measured.
        defended: the samples as encoded by the defense, whose labels and BatchNorm statistics
            are those that a threat model may grant.
        mixing: the mixing of the samples, which a threat model may grant, too; ``None`` where they
            were not.
    """

    private: Batch
    defended: Batch
    mixing: Mixed | None = None


UNREADABLE = (
    ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""The errors that foreign JSON raises, where an entry is of another kind, too large or too deep."""


@dataclass
class ImageNumbers:
    """Number each client's private images, so that each can be followed from round to round.

    A sample's place in the batch changes between rounds. Equal images have the same number.

    Attributes:
        seen: the number of each image, by client and digest, in the order of first appearance from
            1 on.
    """

    seen: dict[int, dict[bytes, int]] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> "ImageNumbers":
        """Return the numbers that ``to_json`` wrote."""
        return ImageNumbers(
            {
                int(client_id): {bytes.fromhex(one): n for n, one in enumerate(digests, start=1)}
                for client_id, digests in parse_json(text).items()
            }
        )

    def to_json(self) -> str:
        """Return the digests by client, each client's in the order of their numbers."""
        # A dictionary keeps the order in which its entries came, which is that of the numbers.
        return json.dumps(
            {str(client_id): [one.hex() for one in known] for client_id, known in self.seen.items()}
        )

    def of(self, client_id: int, private: Batch) -> list[int]:
        """Return the number of each sample; new images get the next ones."""
        known = self.seen.setdefault(client_id, {})
        digests = (hashlib.sha256(one.numpy().tobytes()).digest() for one in private.inputs.cpu())
        return [known.setdefault(digest, len(known) + 1) for digest in digests]


TruthSource = Callable[[int, int, int], Truth]
"""(server_round, client_id, num_examples) ↦ the truth; ValueError where there is none."""
