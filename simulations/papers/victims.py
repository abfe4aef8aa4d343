"""One gradient of a defended client, its attack, and the measures: what Huang's tables are of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Lpips
from flwr_leakage.params import Params
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import (
    Batch,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)
from simulations.papers.findings import Row

Cell = str | int | float

STRONGEST = ThreatModel(labels="known", batch_norm="exact")
"""Huang et al. 2021, section 5.1: private labels and the private batch's statistics are given."""


def observe(
    gradient_map: GradientMap,
    encoded: Batch,
    defense: Defense,
    seed: int,
    client_id: int,
    server_round: int = 1,
    buffers: Params | None = None,
) -> Observation:
    """What a server sees of a client that sends one defended gradient.

    Everything that a threat model may grant is disclosed; an attack gets of it what its own says.

    Args:
        gradient_map: of the client, with the parameters that the server sent.
        encoded: what the client trains on.
        defense: changes the gradient.
        seed: of the defense's draws.
        client_id: part of the draws' seed too.
        server_round: likewise.
        buffers: that the attacker knows as the server's, if they are others than the model's.
    """
    params, own = gradient_map.params, gradient_map.buffers
    gradient = gradient_map(params, encoded, own)
    raw = {name: -value.detach() for name, value in gradient.items()}
    update = Update(raw, {}, LocalSchedule(1.0, 1, len(encoded)), len(encoded))
    draws = Reproducible.from_seed(
        seed, server_round=server_round, client_id=client_id, purpose="observed defense"
    )
    around = LocalRound(gradient_map, params, own, encoded, encoded)
    released = defense.on_update(update, draws, around)
    statistics = None
    if gradient_map.uses_batch_statistics:
        statistics = gradient_map.statistics(params, encoded.inputs, own)
    return Observation(
        server_round,
        client_id,
        params,
        buffers or own,
        released,
        Disclosure(encoded.targets, statistics),
    )


def observe_batches(
    gradient_map: GradientMap,
    samples: Batch,
    batch_size: int,
    defense: Defense,
    seed: int,
    server_round: int = 1,
    buffers: Params | None = None,
) -> list[Observation]:
    """The gradient of each batch of the samples, in their order."""
    return [
        observe(
            gradient_map,
            samples[first : first + batch_size],
            defense,
            seed,
            first,
            server_round,
            buffers,
        )
        for first in range(0, len(samples), batch_size)
    ]


def reconstruct(
    attack: Attack,
    gradient_map: GradientMap,
    spec: InputSpec,
    observations: Sequence[Observation],
    threat: ThreatModel,
    seed: int,
) -> list[Reconstruction]:
    """Attack all observations in one job."""
    return attack(AttackJob(gradient_map, spec, observations, threat, seed))


@dataclass(frozen=True)
class Measures:
    """PSNR, SSIM and LPIPS of every sample, matched with the truth.

    Attributes:
        lpips: the perceptual distance, or ``None`` to leave it out.
    """

    lpips: Lpips | None

    def of(
        self, answer: Reconstruction, truth: Batch, spec: InputSpec, **beside: Cell
    ) -> list[Row]:
        """One row a sample; ``None`` where there is no reconstruction.

        Args:
            answer: the attack's.
            truth: what it is measured against, in model space.
            spec: the normalisation.
            beside: further cells of each row.
        """
        found = Evaluator(lpips=self.lpips).evaluate(answer, truth, spec)
        # LPIPS is named after its backbone.
        values = {
            "lpips" if m.name.startswith("lpips") else m.name: m.values for m in found.measurements
        }
        names = [name for name in ("lpips", "psnr", "ssim", "label_accuracy") if name in values]
        return [
            {**beside, "sample": i, **{name: values[name][i] for name in names}}
            for i in range(len(truth))
        ]

    def in_batches(
        self, inputs: Tensor, truth: Batch, batch_size: int, spec: InputSpec, **beside: Cell
    ) -> list[Row]:
        """As ``of``, where images are matched only with those of their own gradient.

        Args:
            inputs: reconstructed, as many as of the truth.
            truth: what they are measured against, in model space.
            batch_size: of each gradient, in the order of both.
            spec: the normalisation.
            beside: further cells of each row.
        """
        rows: list[Row] = []
        for chunk in torch.arange(len(truth)).split(batch_size):
            answer = answer_of(inputs[chunk], truth.targets[chunk])
            found = self.of(answer, truth[chunk], spec, **beside)
            rows += [{**row, "sample": len(rows) + i} for i, row in enumerate(found)]
        return rows


def answer_of(images: Tensor, targets: Tensor) -> Reconstruction:
    """Images as an attack's answer, to be measured."""
    return Reconstruction(Batch(images, targets), float("nan"))


def grey(spec: InputSpec, count: int) -> Tensor:
    """What an attacker has without any gradient: pixels of 0.5 (B, C, H, W), in model space."""
    return spec.normalize(torch.full((count, *spec.shape), 0.5))
