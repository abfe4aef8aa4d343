"""What a simulation knows of the truth, for the evaluation and for what is granted by name."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.records import Batch


@dataclass(frozen=True)
class Mixed:
    """How a defense mixed a client's samples.

    Attributes:
        matrix: W (B, n) of the encodings W · samples.
        flips_signs: whether each entry's sign was then drawn anew.
    """

    matrix: Tensor
    flips_signs: bool


@dataclass(frozen=True)
class Truth:
    """What a client really trained on; only a simulation can know it.

    Attributes:
        private: the private samples, against which reconstructions are measured.
        defended: the samples as encoded by the defense, whose labels and BatchNorm statistics
            are those that a threat model may grant.
        mixing: how the samples were mixed, which a threat model may grant too; ``None`` where
            they were not.
    """

    private: Batch
    defended: Batch
    mixing: Mixed | None = None


TruthSource = Callable[[int, int, int], Truth]
"""(server_round, client_id, num_examples) ↦ the truth; ValueError where there is none."""
