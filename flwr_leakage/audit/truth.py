"""What a simulation knows of the truth, for the evaluation and for what is granted by name."""

from collections.abc import Callable
from dataclasses import dataclass

from flwr_leakage.records import Batch


@dataclass(frozen=True)
class Truth:
    """What a client really trained on; only a simulation can know it.

    Attributes:
        private: the private samples, against which reconstructions are measured.
        defended: the samples as encoded by the defense, whose labels and BatchNorm statistics
            are those that a threat model may grant.
    """

    private: Batch
    defended: Batch


TruthSource = Callable[[int, int, int], Truth]
"""(server_round, client_id, num_examples) ↦ the truth; ValueError where there is none."""
