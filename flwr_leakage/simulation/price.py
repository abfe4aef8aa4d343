"""Estimate a run's work, CPU time and disk space before it starts. Nothing is written."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from flwr_leakage.defenses.base import LocalRound
from flwr_leakage.gradient_map import local_update
from flwr_leakage.metrics import classifier_utility
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Exposure, Update
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.simulation.apps import local_model, train_locally
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import Config, ConfigError, compose, parse_overrides
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.work import Work, count_work

NOT_PRICED = "evaluation of reconstructions, messages and the report"


@dataclass(frozen=True)
class Measured:
    """CPU seconds of small parts of a run, as measured on this machine.

    Attributes:
        step: the CPU seconds of one step of a client's training.
        score: the CPU seconds of all scores of one sample.
        products: the number of products with the Jacobian that the scores of one sample took.
        test: the CPU seconds that evaluating the model on one test sample takes.
    """

    step: float
    score: float
    products: int
    test: float


@dataclass(frozen=True)
class Price:
    """The CPU seconds and bytes that a run is estimated to take.

    Attributes:
        start: the seconds of imports and of making data and network, as measured.
        training: the seconds of all training steps.
        replays: the seconds of the steps that are repeated to check updates.
        scores: the seconds of all scores that the ``scoring`` settings allow.
        tests: the seconds of the test accuracy.
        attacks: the seconds of all attacks if each takes all the time that it may; ``None`` if an
            attack has no time limit.
        disk: the bytes of the run folder.
    """

    start: float
    training: float
    replays: float
    scores: float
    tests: float
    attacks: float | None
    disk: float

    @property
    def seconds(self) -> float:
        """Return the CPU seconds of all work; those of attacks count as 0 if they have no limit."""
        return sum(
            (self.start, self.training, self.replays, self.scores, self.tests, self.attacks or 0)
        )

    def __add__(self, other: "Price") -> "Price":
        """Return the sum of two prices: of one run and then another."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return Price(*sums)


def price_runs(overrides: Sequence[str], multirun: bool = False) -> list[tuple[Work, Price]]:
    """Return the work of a run (its clients, rounds and attacks) and its price (CPU seconds and
    bytes on disk), or both for each run of a sweep.

    The experiment of every run is built, so that its errors come now. Runs that differ only in
    their seed and attacks are measured once. ``overrides`` are the Hydra overrides of the command;
    with ``multirun``, values separated by commas are a sweep.

    Raises:
        ConfigError: the config cannot be run, or the sweep is of a kind that cannot be estimated;
            see :func:`expand`.
    """
    own = [text for text in overrides if text.lstrip("+~").startswith("hydra.")]
    if own:
        raise ConfigError(f"a dry run takes no settings of Hydra's own, got {own[0]!r}.")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    found: list[tuple[Work, Price]] = []
    known: dict[str, Measured] = {}
    for job in expand(overrides) if multirun else [list(overrides)]:
        # The process began at 0 seconds, so that the price of the first run includes the imports.
        began = 0.0 if not found else time.process_time()
        try:
            config = compose(job, "outputs/not-written")
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(str(error)) from error
        experiment = build(config)
        start = time.process_time() - began
        key = _same_sample(config)
        if key not in known:
            known[key] = measure(experiment)
        work = count_work(experiment, known[key].products)
        found.append((work, _price(work, known[key], start)))
    return found


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep, as Hydra's own sweeper lists them.

    Raises:
        ConfigError: the sweep uses another sweeper, which chooses runs by earlier results, or a
            pattern (``glob``) in the place of names of options.
    """
    if any(text.startswith("hydra/sweeper=") for text in overrides):
        raise ConfigError("a dry run knows the runs of Hydra's own sweeper only, not another's.")
    parsed = parse_overrides(overrides)
    for override in parsed:
        if isinstance(override.value(), Glob):
            raise ConfigError(
                f"a dry run needs the options by name, as in {override.key_or_group}=A,B, got "
                f"{override.input_line!r}."
            )
    batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [list(job) for batch in batches for job in batch]


def measure(experiment: Experiment) -> Measured:
    """Return the measured CPU seconds of a training step, a sample's scores, and a test sample."""
    if experiment.settings.client.num_threads is not None:
        torch.set_num_threads(experiment.settings.client.num_threads)
    sizes = experiment.sizes
    largest = sizes.index(max(sizes))
    batch = experiment.client_batch(largest, 1)
    schedule = experiment.schedule.for_client(len(batch))
    step_batch = batch[: min(schedule.batch_size, len(batch))]
    one = experiment.schedule.for_client(len(step_batch))
    model, loss = local_model(experiment), experiment.gradient_map.loss
    training = _seconds(lambda: train_locally(model, step_batch, one, loss)) / one.num_steps
    score, products = 0.0, 0
    if experiment.scores:
        counted: list[int] = []
        score = _seconds(lambda: counted.append(score_one(experiment)), repeats=2)
        products = counted[-1]
    tests = list(experiment.data.test_batches(500, 500))
    test = _seconds(lambda: classifier_utility(model, tests, experiment.spec.padding), repeats=1)
    return Measured(training, score, products, test / sum(len(each) for each in tests))


def score_one(experiment: Experiment) -> int:
    """Score one sample of the smallest client, as the client does in a run.

    Return the number of products with the Jacobian that the scores took.
    """
    smallest = experiment.sizes.index(min(experiment.sizes))
    gradient_map, schedule = experiment.gradient_map, experiment.schedule
    params, buffers = gradient_map.params, gradient_map.buffers
    private = experiment.client_batch(smallest, 1)
    schedule = schedule.for_client(len(private))
    private = private[: schedule.num_samples_used(len(private))]
    draws = Reproducible.from_seed(experiment.settings.seed, purpose="price")
    defended = experiment.defense.on_batch(private, experiment.spec.num_classes, draws)
    with torch.no_grad():
        delta = local_update(gradient_map, params, defended, schedule, buffers)
    raw = Update(delta, buffers, schedule, len(private))
    around = LocalRound(gradient_map, params, buffers, private, defended, len(private))
    released = experiment.defense.on_update(raw, draws, around)
    exposure = Exposure(params, buffers, private, defended, raw, released)
    found = compute_scores(experiment.scores, gradient_map, exposure, samples=[0])
    return sum(each.products for result in found.values() for each in result)


def _price(work: Work, measured: Measured, start: float) -> Price:
    training = work.steps * measured.step
    # Ranking is assumed to take as long as training once on the ranked samples.
    ranking = work.ranked * measured.step / work.batch_size
    scores = ranking + work.scored * measured.score
    # The scores take all CPU time that the plan grants, a share of the training's. They take more
    # only for the samples that are scored at any cost.
    if work.score_share is not None:
        scores = max(work.scored * measured.score, work.score_share * training)
    return Price(
        start=start,
        training=training,
        # A replay's step is assumed to take as long as a training step.
        replays=work.replay_steps * measured.step,
        scores=scores,
        tests=work.tested * measured.test,
        attacks=work.attack_seconds,
        disk=work.disk,
    )


def _seconds(call: Callable[[], object], repeats: int = 10, limit: float = 1.0) -> float:
    """Return the mean CPU seconds of at most ``repeats`` calls of a function, after a first call
    that is not counted.

    No call begins after ``limit`` CPU seconds. If the first call alone takes longer, its time is
    returned.
    """
    began = time.process_time()
    call()
    if time.process_time() - began > limit:
        return time.process_time() - began
    began, done = time.process_time(), 0
    while done < repeats and time.process_time() - began < limit:
        call()
        done += 1
    return (time.process_time() - began) / done


def _same_sample(config: Config) -> str:
    """Return a text that is equal for two configs if costs measured for one also hold for the
    other.
    """
    keys = ("model", "dataset", "partition", "client", "defense", "score", "num_clients")
    return json.dumps({key: config[key] for key in keys}, default=str) + str(
        torch.get_num_threads()
    )
