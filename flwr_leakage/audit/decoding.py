"""Decode the encoded samples of MixUp and InstaHide, on a server that knows the weights of the
mixing.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.decode import decode_instahide, decode_mixup
from flwr_leakage.audit.grant import Case
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, Reconstruction


@dataclass
class Decoder:
    """A decoder of the encodings that an attack recovered from a client's updates over rounds.

    A defense by mixing (MixUp, InstaHide) trains on encodings, which are weighted sums of a
    client's samples. The decoder is told the weights of each sum and the classes of the samples,
    and not the samples. As an attacker hardly knows these weights, the decoded samples are an upper
    bound on the leakage (Huang et al. 2021, section 5.1).

    Attributes:
        spec: shapes and normalisation of the inputs.
        seed: the seed of the starting points of InstaHide's decoding.
        seen: by client, for each round so far, the B encodings (B, C, H, W) that the attack
            recovered and the weights (B, n) of the client's n samples in them.
    """

    spec: InputSpec
    seed: int = 0
    seen: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def __call__(self, case: Case, answer: Reconstruction) -> Reconstruction | None:
        """Return the samples decoded from a client's encodings of all rounds so far.

        ``answer`` holds the encodings that the attack recovered from ``case``. The result has the
        samples' true classes, which the threat model grants. It is ``None`` if the encodings are
        not those of a single client, the mixing is not known, or no encoding was recovered.
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
        # A threat model that grants the weights of the mixing grants the class of each sample, too.
        found = Batch(images, truth.private.targets.cpu())
        return replace(answer, batch=found, stats={"encodings": len(encodings)}, parts=())
