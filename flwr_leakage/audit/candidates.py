"""Test whether samples that a server has were used for a client's update (membership inference)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members import Membership, Records, examine_observation
from flwr_leakage.members.verdict import MIN_NULL
from flwr_leakage.records import Batch, InputSpec, Observation
from flwr_leakage.values import require

MAX_SAMPLES = 10_000
"""The largest number of samples behind an update that is tested. A client may report any number,
and the checks of the loss allocate as many rows of logits. The value is a choice.
"""


@dataclass(frozen=True)
class Candidates:
    """The samples whose membership is tested, and samples that cannot be members.

    A member is a sample that a client trained on. No sample is written anywhere: a run keeps only
    the numbers of the test.

    Attributes:
        records: the samples to test, as model inputs: a batch with labels, or inputs (N, C, H, W)
            where the labels are not known. Texts are token ids (N, T).
        null: samples that no client has, such as the server's own test data. The p-values are valid
            only if these come from the same distribution as ``records``. At least 20 are needed.
            Some hundreds allow small p-values, and let the test choose its statistic where
            membership cannot be decided algebraically.
        null_origin: the source of the null samples, in words, for the report.
    """

    records: Records
    null: Records
    null_origin: str = "records of the server's own"

    def __post_init__(self) -> None:
        for name in ("records", "null"):
            value = getattr(self, name)
            if not isinstance(value, Tensor | Batch) or inputs_of(value).ndim not in (2, 4):
                raise ValueError(
                    f"{name} must be a Batch or inputs, images (N, C, H, W) or texts (N, T), got "
                    f"{type(value).__name__}."
                )
            inputs = inputs_of(value)
            if inputs.is_floating_point() != (inputs.ndim == 4):
                raise ValueError(
                    f"{name} must be inputs as the model takes them, images of a floating type or "
                    f"texts of token ids, got {tuple(inputs.shape)} of {inputs.dtype}."
                )
        if not len(inputs_of(self.records)):
            raise ValueError("records must hold at least one record, got none.")
        if len(inputs_of(self.null)) < MIN_NULL:
            raise ValueError(
                f"null must hold at least {MIN_NULL} samples that no client has, got "
                f"{len(inputs_of(self.null))}."
            )

    def examine(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        seen: Observation,
        seed: int,
        optimizer: str = "SGD",
    ) -> Membership:
        """Return the result of testing the records for membership in the update ``seen``.

        ``seed`` is the seed of the test's random draws, and ``optimizer`` the class name of the
        optimizer with which the client trained.

        Raises:
            ValueError: the samples do not have the shape of the inputs, the steps use too many
                samples, or the update cannot be tested.
        """
        shape = tuple(inputs_of(self.records).shape[1:])
        # This is checked first, as the shape comes from a client and memory of that size is
        # allocated below.
        if shape != tuple(spec.shape):
            raise ValueError(f"the candidates have shape {shape}, and its inputs {spec.shape}.")
        schedule, told = seen.update.schedule, seen.members or (seen.update.num_examples,)
        used = sum(schedule.num_samples_used(count) for count in told)
        if used > MAX_SAMPLES:
            raise ValueError(f"its steps use {used:,} samples, more than {MAX_SAMPLES:,}.")
        return examine_observation(
            gradient_map,
            spec,
            seen,
            self.records,
            self.null,
            null_origin=self.null_origin,
            seed=seed,
            optimizer=optimizer,
        )

    def doubts(self, spec: InputSpec) -> str:
        """Return a warning if the samples seem to be pixels that were not normalised; else empty.

        They seem so if all values lie in [0, 1], although the normalisation of ``spec`` makes dark
        pixels negative.
        """
        dark = min(-mean / std for mean, std in zip(spec.mean, spec.std, strict=True))
        if spec.is_text or not spec.known or dark >= 0:
            return ""
        both = (inputs_of(self.records), inputs_of(self.null))
        if any(float(each.min()) < 0 or float(each.max()) > 1 for each in both):
            return ""
        return (
            f"all candidates lie in [0, 1], as pixels do, while clients train on pixels that are "
            f"normalised by mean {spec.mean} and deviation {spec.std}: give candidates normalised, "
            f"as the model takes them, or none of them is found"
        )

    def are_among(self, private: Batch) -> list[bool]:
        """Return for each tested sample whether it is among a client's own, which a simulation
        knows.

        Inputs are compared entry by entry, with a tolerance of 10⁻⁶.
        """
        own = private.inputs.flatten(1)
        rows = inputs_of(self.records).flatten(1).to(own)
        return [bool(torch.isclose(own, row, atol=1e-6).all(1).any()) for row in rows]


def inputs_of(records: Records) -> Tensor:
    """Return the inputs of records with or without labels: images (N, C, H, W) or texts (N, T)."""
    return records.inputs if isinstance(records, Batch) else records


@dataclass(frozen=True)
class DrawnCandidates:
    """The numbers of samples that the server of a simulation tests for membership.

    Such a server knows the samples of all clients.

    Attributes:
        per_client: the number of tested samples that are a client's own, for each client, ≥ 1.
        strangers: the number of tested images of the server's test set, which no client has, ≥ 0.
        null_size: the number of further test images, with which each tested sample is compared, ≥
            20; if the test set has fewer left, all of these.
    """

    per_client: int = 2
    strangers: int = 20
    null_size: int = 400

    def __post_init__(self) -> None:
        require(self, "be at least 1", "per_client")
        require(self, "be at least 0", "strangers")
        if self.null_size < MIN_NULL:
            raise ValueError(f"null_size must be at least {MIN_NULL}, got {self.null_size}.")

    def among(self, held: Sequence[Batch], tests: Batch) -> Candidates:
        """Return the samples to test: clients' own, and test images that no client has.

        ``held`` are the tested samples of each client. The first ``strangers`` images of ``tests``
        are tested, too, and its other images are the null samples, which cannot be members.

        Raises:
            ValueError: there are fewer test images than ``strangers`` + 20.
        """
        if len(tests) < self.strangers + 20:
            raise ValueError(
                f"strangers={self.strangers} and a null of at least 20 take as many test images, "
                f"got {len(tests)}."
            )
        batches = [*held, tests[: self.strangers]]
        records = Batch(
            torch.cat([batch.inputs for batch in batches]),
            torch.cat([batch.targets for batch in batches]),
        )
        return Candidates(records, tests[self.strangers :], "the server's own test images")
