"""Infer how many samples of each class a client has whose images are too many to reconstruct.

A simulation also attacks the update of one step on a few images of such a client.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.labels.rehearsed import (
    DUMMIES,
    KINDS,
    SAMPLES,
    LabelEstimate,
    Rehearsals,
    rehearse,
    rehearsed_steps,
)
from flwr_leakage.attacks.problem import pose
from flwr_leakage.audit.attack import Attempt, attempt
from flwr_leakage.audit.evaluate import Outcome, evaluate
from flwr_leakage.audit.grant import disclose
from flwr_leakage.audit.needs import OPERATIONS_PER_SECOND, Trials
from flwr_leakage.audit.truth import Truth
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator, Reference
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, ThreatModel, Update
from flwr_leakage.values import require

PROBE_SIZES, PROBE_SECONDS = (1, 4, 16), 3.0
"""The numbers of images of the probes (attacks on one step over a few of a client's images), and
the CPU seconds of the attack on each. The values bound the cost: a run's probes take at most nine
seconds, plus the step that an attack is in when its time ends.
"""

MAX_SAMPLES = 2000
"""The number of samples that stand for those of a larger client where only class frequencies count.
The value bounds the memory: checks of the loss allocate a row of logits for each sample.
"""


@dataclass(frozen=True)
class LargeClients:
    """The settings of an audit for updates of too many images to reconstruct, with limits of cost.

    The number of samples of each class is inferred from the update that the client sent. Where the
    truth is known, a *probe* is made besides: the update of one step on a few of the client's
    images. The audit's attack is run on the probe, which takes no part in the training.

    Attributes:
        min_examples: the least number of samples of a client whose class counts are inferred, ≥ 1.
            For a smaller client, the attack on its images infers the labels.
        every: the number of rounds from one inference to the next, ≥ 1, from the first round on.
        label_seconds: the CPU seconds that the inference may take in a round.
        probe_sizes: the numbers of images of the probes, ascending; empty for no probe. A run
            probes one client, the first one that is too large to be attacked.
        probe_seconds: the CPU seconds that the attack on each probe may take.
    """

    min_examples: int = 17
    every: int = 10
    label_seconds: float = 30.0
    probe_sizes: Sequence[int] = PROBE_SIZES
    probe_seconds: float = PROBE_SECONDS

    def __post_init__(self) -> None:
        object.__setattr__(self, "probe_sizes", tuple(self.probe_sizes))
        require(self, "be at least 1", "min_examples", "every")
        require(self, "be positive and finite", "label_seconds", "probe_seconds")
        if min(self.probe_sizes, default=1) < 1:
            raise ValueError(f"probe_sizes must be at least 1, got {min(self.probe_sizes)}.")

    def includes(self, server_round: int, num_examples: int) -> bool:
        """Return whether class counts are inferred in a round for a client of ``num_examples``
        samples.
        """
        return num_examples >= self.min_examples and (server_round - 1) % self.every == 0


@dataclass
class LabelRound:
    """The inference, in one round, of how many samples of each class clients have.

    The inference uses rehearsals: a rehearsal repeats a client's training on dummy samples with
    known labels, and so tells how an update follows from class counts. Clients that train alike
    share rehearsals.

    Attributes:
        settings: the settings of the audit for large clients.
        seed: the seed of the rehearsals.
        budget: the CPU seconds that are left in this round.
    """

    settings: LargeClients
    seed: int
    budget: Budget = field(init=False)
    _known: dict[str, Rehearsals | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = Budget.of(self.settings.label_seconds)

    def infer(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        seen: Observation,
        optimizer: str,
        trials: Trials,
    ) -> LabelEstimate:
        """Return an estimate, by rehearsals, of the number of samples of each class behind an
        update.

        A rehearsal repeats the training on dummy samples with known labels. ``optimizer`` is the
        class name of the client's optimizer, and ``trials`` measures how long a forward pass takes.

        Raises:
            ValueError: the update cannot be attacked, its training cannot be repeated, or repeating
                it takes more CPU seconds than are left in the round.
        """
        schedule = seen.update.schedule
        steps = rehearsed_steps(schedule.num_steps)
        alike = replace(schedule, num_steps=steps)
        key = json.dumps([vars(alike), optimizer, vars(spec), gradient_map.batch_norm], default=str)
        if key not in self._known:
            # A gradient costs three forward passes. Each dummy sample is made in twelve steps, each
            # with a gradient; the rest are the gradients of the repeated trainings.
            passes = 3 * (12 * DUMMIES * (len(KINDS) + 1) + len(KINDS) * max(SAMPLES, 4 * steps))
            seconds = passes * trials.needs(gradient_map, spec).operations / OPERATIONS_PER_SECOND
            if self.budget.is_spent or seconds > 4 * self.budget.left:
                raise ValueError(
                    f"{self.settings.label_seconds:g} CPU seconds a round are not enough for it "
                    f"(label_seconds)"
                )
        # The number of samples is the client's own claim, and checks of the loss allocate as many
        # rows of logits. So it is limited here, and only the estimate uses the claim.
        told = seen.update.num_examples
        few = replace(seen.update, num_examples=min(told, MAX_SAMPLES))
        problem = pose(gradient_map, spec, replace(seen, update=few), ThreatModel())
        if key not in self._known:
            try:
                found: Rehearsals | str = rehearse(
                    problem, optimizer, seed=self.seed, max_seconds=self.budget.left
                )
            except ValueError as error:
                found = str(error)
            self._known[key] = found
        known = self._known[key]
        if isinstance(known, str):
            raise ValueError(known)
        return known.estimate(problem, told)


@dataclass(frozen=True)
class Probed:
    """The result of attacking a probe: the update of one step on a few images, which was never
    sent.

    Attributes:
        size: the number of images.
        attempt: the attack's answer and cost.
        outcome: the comparison of the answer with the true images.
    """

    size: int
    attempt: Attempt
    outcome: Outcome


def probes(
    gradient_map: GradientMap, seen: Observation, truth: Truth, sizes: Sequence[int]
) -> Iterator[tuple[Observation, Truth]]:
    """Yield, for each size, the update of one step on that number of a client's images, and the
    images.

    The step is one of SGD on the client's first images, from the parameters and with the learning
    rate of the client's update ``seen``. The update is rounded like the difference of two models.
    Sizes above the client's own number of images are left out.
    """
    rate = seen.update.schedule.learning_rate
    for size in sizes:
        if size > len(truth.private):
            continue
        private = truth.private[:size]
        with torch.no_grad():
            gradient = gradient_map(seen.params, private, seen.buffers)
            delta = {k: (v - rate * gradient[k]) - v for k, v in seen.params.items()}
        update = Update(delta, {}, LocalSchedule(rate, 1, size), size)
        yield replace(seen, update=update), Truth(private, private)


def attack_probe(
    attack: Attack, job: AttackJob, truth: Truth, evaluator: Evaluator | None, reference: Reference
) -> Probed:
    """Return the result of attacking a probe, an update of one step, the only observation of
    ``job``.

    The attack is given those facts about ``truth``, the probe's images, that the job's threat model
    grants.
    """
    (seen,) = job.observations
    disclosed = disclose(seen, job.threat, job.gradient_map, truth)
    made = attempt(attack, replace(job, observations=[replace(seen, disclosed=disclosed)]))
    outcome = evaluate(made.answers[0], truth, evaluator, job.spec, reference)
    return Probed(len(truth.private), made, outcome)
