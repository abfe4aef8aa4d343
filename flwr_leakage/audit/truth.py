"""Define the true samples that a simulation knows, to evaluate attacks and to grant them facts."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from flwr_leakage.records import Batch
from flwr_leakage.untrusted import parse_json


@dataclass(frozen=True)
class Mixed:
    """The mixing of a client's samples by a defense such as MixUp or InstaHide.

    Attributes:
        matrix: the weights W (B, n) of the client's n samples in the B encodings, which are W ·
            samples.
        flips_signs: whether the sign of each entry of an encoding was drawn at random afterwards.
    """

    matrix: Tensor
    flips_signs: bool


@dataclass(frozen=True)
class Truth:
    """The samples that a client trained on, which only a simulation can know.

    Attributes:
        private: the private samples, with which reconstructions are compared.
        defended: the samples as encoded by the defense, whose labels and BatchNorm statistics
            are those that a threat model may grant.
        mixing: the mixing of the samples, which a threat model may grant, too; ``None`` if they
            were not mixed.
    """

    private: Batch
    defended: Batch
    mixing: Mixed | None = None


UNREADABLE = (
    ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
"""The errors that reading untrusted JSON raises if an entry is of another type than expected, too
large, or nested too deeply.
"""


@dataclass
class ImageNumbers:
    """The numbers that identify each client's private images through all rounds.

    A sample's place in the batch changes between rounds. Equal images have the same number.

    Attributes:
        seen: by client id and by the digest of an image, its number. Each client's images are
            numbered from 1 in the order of their first appearance.
    """

    seen: dict[int, dict[bytes, int]] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> "ImageNumbers":
        """Return the images' numbers from the text that ``to_json`` wrote.

        Another text raises one of the errors ``UNREADABLE``.
        """
        return ImageNumbers(
            {
                int(client_id): {bytes.fromhex(one): n for n, one in enumerate(digests, start=1)}
                for client_id, digests in parse_json(text).items()
            }
        )

    def to_json(self) -> str:
        """Return as JSON the digests of each client's images, in the order of their numbers."""
        # A dictionary keeps the order of its first entries, which is the order of the numbers.
        return json.dumps(
            {str(client_id): [one.hex() for one in known] for client_id, known in self.seen.items()}
        )

    def of(self, client_id: int, private: Batch) -> list[int]:
        """Return the identifying number of each of a client's samples; new ones get the next
        numbers.
        """
        known = self.seen.setdefault(client_id, {})
        digests = (hashlib.sha256(one.numpy().tobytes()).digest() for one in private.inputs.cpu())
        return [known.setdefault(digest, len(known) + 1) for digest in digests]


TruthSource = Callable[[int, int, int], Truth]
"""A function of (server_round, client_id, num_examples) that returns the client's true samples of
the round, and raises ``ValueError`` if they are not known.
"""
