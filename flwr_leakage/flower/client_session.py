"""Hold one round of one client: its mini-batches, and the sources of its random draws.

In the client's training loop each mini-batch passes through ``Session.encode``, which applies a
defense such as MixUp.
"""

import logging
import math
from contextvars import ContextVar

import torch
from flwr.app import Context
from torch import Tensor

from flwr_leakage.flower.client_audit import ClientAudit
from flwr_leakage.randomness import (
    Randomness,
    Reproducible,
    Secure,
    derive_seed,
    entropy_seed,
)
from flwr_leakage.records import Batch

_LOG = logging.getLogger(__name__)


class Session:
    """One round of one client, with the mini-batches that its training passes to ``encode``.

    The first samples are kept for the scores: as many as the audit's ``max_samples``, rounded up to
    whole mini-batches. Later samples are encoded, but not kept.

    Attributes:
        context: the client's context, with its own state.
        train_seconds: the CPU seconds of the round's training, set when it has ended.
        private: the kept mini-batches before the defense encoded them.
        defended: the kept mini-batches after the defense encoded them.
        kept: the number of kept samples.
    """

    def __init__(
        self, audit: ClientAudit, server_round: int, client_id: int, context: Context
    ) -> None:
        self.audit = audit
        self.server_round = server_round
        self.client_id = client_id
        self.context = context
        self.train_seconds = 0.0
        self.private: list[Batch] = []
        self.defended: list[Batch] = []
        self.kept = 0
        self._draws: dict[str, Randomness] = {}

    def seed(self, purpose: str) -> int:
        """Return a seed for draws that hide no data, such as those of the scores.

        Each ``purpose``, such as ``"scores"``, has a seed of its own.
        """
        if self.audit.seed is None:
            return entropy_seed()
        return derive_seed(
            self.audit.seed,
            server_round=self.server_round,
            client_id=self.client_id,
            purpose=purpose,
        )

    @property
    def device(self) -> torch.device:
        """Return the device of the audit's model, on which scores and defenses compute."""
        return next(iter(self.audit.gradient_map.params.values()), torch.zeros(())).device

    def randomness(self, purpose: str) -> Randomness:
        """Return the source of random draws that hide data, such as a defense's noise.

        The source is the operating system's entropy. In a simulation with a seed, the source is a
        generator whose state depends on the seed, the round, the client and the purpose.
        """
        if purpose not in self._draws:
            simulated = self.audit.seed is not None
            self._draws[purpose] = Reproducible(self._generator(purpose)) if simulated else Secure()
        return self._draws[purpose]

    def _generator(self, purpose: str) -> torch.Generator:
        """Return the generator of a simulation's draws for a purpose, before its first draw."""
        return torch.Generator().manual_seed(self.seed(purpose))

    def has_reproducible_draws(self) -> bool:
        """Return whether the defense drew from a seeded generator, so that its draws can be
        repeated.
        """
        return any(
            not torch.equal(drawn.generator.get_state(), self._generator(purpose).get_state())
            for purpose, drawn in self._draws.items()
            if isinstance(drawn, Reproducible)
        )

    def encode(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return a mini-batch as the defense encodes it, and keep both forms for the scores.

        Samples beyond the audit's ``max_samples`` are encoded, but not kept. Inputs (B, C, H, W)
        are in the model's input space, and targets (B,) are class indices. The results are on the
        device of the arguments.

        Raises:
            ValueError: the inputs have another shape than the client's spec, a label is no class of
                the spec, or the defense refuses the mini-batch.
        """
        here = self.device  # the audit's model may be on another device than this mini-batch
        private = Batch(inputs.to(here), targets.to(here))
        spec = self.audit.spec
        if inputs.shape[1:] != spec.shape:
            expected = f"inputs must have shape (B, {', '.join(map(str, spec.shape))})"
            raise self._unfit(expected, f"got {tuple(inputs.shape)}")
        if targets.ndim == 1 and len(targets):
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= spec.num_classes:
                expected = f"labels must lie in 0 … {spec.num_classes - 1}"
                raise self._unfit(expected, f"got {low} … {high}")
        try:
            randomness = self.randomness("encode")
            defended = self.audit.defense.on_batch(private, spec.num_classes, randomness)
        except ValueError as error:
            raise self._unfit("the defense must take each mini-batch", str(error)) from None
        room = self.audit.max_samples - self.kept
        if room > 0:
            size = self.audit.schedule.batch_size
            whole = slice(min(len(private), math.ceil(room / size) * size))
            self.private.append(Batch(private.inputs.detach(), private.targets.detach())[whole])
            self.defended.append(Batch(defended.inputs.detach(), defended.targets.detach())[whole])
            self.kept += whole.stop
        if defended is private:
            return inputs, targets
        return defended.inputs.to(inputs.device), defended.targets.to(targets.device)

    def _unfit(self, expected: str, came: str) -> ValueError:
        """Return the error for a mini-batch that cannot be used, with the requirement and what came
        instead.

        Flower sends errors to the server. So both texts are in the error only if the client's owner
        shares reasons; otherwise they are written to the client's log.
        """
        if self.audit.sharing.reasons:
            return ValueError(f"{expected}, {came}.")
        _LOG.error("flwr_leakage: %s, %s.", expected, came)
        return ValueError(f"{expected}; what came instead is in the client's own log.")


SESSION: ContextVar[Session | None] = ContextVar("flwr_leakage_session", default=None)


def encode(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mini-batch as the client's defense encodes it, and keep it for the scores.

    Call the function once for every mini-batch of the training loop. Or call it once before every
    epoch with all samples, which is cheaper and lets MixUp and InstaHide mix all of them. Outside
    of a ``LeakageMod``, as in a notebook or an evaluation, it returns its arguments unchanged.

    Args:
        inputs: (B, C, H, W) in the model's input space.
        targets: (B,) class indices.

    Returns:
        The inputs and targets to train on. After MixUp the targets are (B, K) probabilities of the
        K classes.
    """
    session = SESSION.get()
    return (inputs, targets) if session is None else session.encode(inputs, targets)
