"""Test records for membership in each update, by a server that has them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members import Membership, Records, examine_observation
from flwr_leakage.records import Batch, InputSpec, Observation

MAX_SAMPLES = 10_000
"""Most samples behind an update that is tested. Their number is a client's own word, and checks of
the loss allocate logits of as many."""


@dataclass(frozen=True)
class Candidates:
    """The records whose membership is tested, and others that cannot be members.

    Neither is written anywhere: a run keeps the candidates' numbers alone.

    Attributes:
        records: the records in question, as the model takes them: a batch with labels, or inputs
            (N, C, H, W) where the labels are not known.
        null: records that no client has, drawn like the records in question, such as the server's
            own test data. p-values are calibrated only if they are drawn alike. At least 20 are
            needed. Some hundreds allow small p-values, and let the test choose its statistic where
            algebra is not enough.
        null_origin: the source of the null records, in words, for the report.
    """

    records: Records
    null: Records
    null_origin: str = "records of the server's own"

    def __post_init__(self) -> None:
        for name in ("records", "null"):
            value = getattr(self, name)
            if not isinstance(value, Tensor | Batch) or inputs_of(value).ndim != 4:
                raise ValueError(
                    f"{name} must be a Batch or inputs (N, C, H, W), got {type(value).__name__}."
                )
        if not len(inputs_of(self.records)):
            raise ValueError("records must hold at least one record, got none.")

    def examine(
        self, gradient_map: GradientMap, spec: InputSpec, seen: Observation, seed: int
    ) -> Membership:
        """Test the records for membership in the observed update.

        Raises:
            ValueError: the records do not fit the model, or the update tells nothing.
        """
        shape = tuple(inputs_of(self.records).shape[1:])
        # this is checked before memory for a shape that a client told is allocated
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
        )

    def are_among(self, private: Batch) -> list[bool]:
        """Return whether each record is a private sample, pixel by pixel; for simulations."""
        own = private.inputs.flatten(1)
        rows = inputs_of(self.records).flatten(1).to(own)
        return [bool(torch.isclose(own, row, atol=1e-6).all(1).any()) for row in rows]


def inputs_of(records: Records) -> Tensor:
    """Return the inputs (N, C, H, W) of records with or without labels."""
    return records.inputs if isinstance(records, Batch) else records


@dataclass(frozen=True)
class DrawnCandidates:
    """The choice of records that the server of a simulation tests; it knows those of all clients.

    Attributes:
        per_client: private samples of each client that are tested in every update, ≥ 1.
        strangers: images of the server's test set that are tested beside them, ≥ 0.
        null_size: further images of that test set, among which each record is ranked, ≥ 20; fewer
            if the set has fewer.
    """

    per_client: int = 2
    strangers: int = 20
    null_size: int = 400

    def __post_init__(self) -> None:
        for name, least in (("per_client", 1), ("strangers", 0), ("null_size", 20)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")

    def among(self, held: Sequence[Batch], tests: Batch) -> Candidates:
        """Return the candidates from clients' samples and from test images that no client has.

        Args:
            held: samples of each client.
            tests: first the strangers, then the null; as many as there are.

        Raises:
            ValueError: there are fewer test images than the strangers and 20 of the null.
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
