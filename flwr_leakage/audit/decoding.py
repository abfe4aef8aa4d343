"""Decode a client's encodings over the rounds, by a server that knows the mixing."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.decode import decode_instahide, decode_mixup
from flwr_leakage.audit.grant import Case
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, Reconstruction


@dataclass
class Decoder:
    """Collect each client's recovered encodings of the same samples, and decode them together.

    The mapping and the coefficients are granted. So the decoded samples are an upper bound on the
    leakage of the attack that recovered the encodings (Huang et al. 2021, section 5.1).

    Attributes:
        spec: the public facts about the data.
        seed: the seed of the starts of InstaHide's decoding.
        seen: the encodings (B, C, H, W) and the mixing W (B, n) of each round so far, by client.
    """

    spec: InputSpec
    seed: int = 0
    seen: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __call__(self, case: Case, answer: Reconstruction) -> Reconstruction | None:
        """Return the samples decoded from all rounds so far; ``None`` if nothing can be decoded.

        Args:
            case: the case of a client whose truth tells the mixing.
            answer: the encodings, in the order of the granted labels.
        """
        truth, seen = case.truth, case.observation
        if truth is None or truth.mixing is None or answer.batch is None or seen.client_id < 0:
            return None
        weights = truth.mixing.matrix
        kept = self.seen.setdefault(seen.client_id, [])
        kept.append((answer.batch.inputs.detach().cpu(), weights.cpu()))
        encodings = torch.cat([encoding for encoding, _ in kept])
        matrix = torch.cat([rows for _, rows in kept])
        if truth.mixing.flips_signs:
            generator = make_generator(self.seed, client_id=seen.client_id, purpose="decoding")
            images = decode_instahide(encodings, matrix, self.spec, generator).images
        else:
            images = decode_mixup(encodings, matrix)
        # The granted mapping includes the class of each sample.
        found = Batch(images, truth.private.targets.cpu())
        return replace(answer, batch=found, stats={"encodings": len(encodings)}, parts=())
