"""Make the Flower apps of an experiment: clients that train, and a server that audits updates.

The client app is written like any Flower app. Only two things in it are for the audit: the mod
``LeakageMod``, and the call of ``encode``, which returns a mini-batch as the defense encodes it.
"""

import copy
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_leakage.audit import ConsoleProgress, ServerAudit
from flwr_leakage.defenses.accounting import ADJACENCIES
from flwr_leakage.flower.client import ClientAudit, LeakageMod, client_id_of, encode
from flwr_leakage.flower.strategy import HonestButCurious
from flwr_leakage.losses import Loss
from flwr_leakage.metrics import classifier_utility
from flwr_leakage.records import Batch, LocalSchedule
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import Config, ConfigError
from flwr_leakage.simulation.experiment import Experiment
from flwr_leakage.simulation.machine import check_machine
from flwr_leakage.simulation.summary import describe, describe_own_configs, finish, headline
from flwr_leakage.simulation.weights import save_weights
from flwr_leakage.tracking.text import accept_any_text

ConfigOf = Callable[[Context], Config]
"""A function that returns the server's config from the context of a run."""

ExperimentOf = Callable[[Context], Experiment]
"""A function that returns a client's experiment from the client's context. It is the experiment of
the run's config; on a real node it is that of the client's own config."""


def make_client_app(experiment_of: ExperimentOf) -> ClientApp:
    """Return the app that every client runs.

    ``experiment_of`` returns the experiment of a client from its context. It is called for every
    message, and so should return the same object each time.
    """

    def audit(context: Context) -> ClientAudit:
        return experiment_of(context).client_audit(client_id_of(context))

    app = ClientApp()

    @app.train(mods=[LeakageMod(audit)])
    def train(message: Message, context: Context) -> Message:
        experiment = experiment_of(context)
        server_round = cast(int, message.content.config_records["config"]["server-round"])
        client_id = cast(int, context.node_config["partition-id"])
        batch = experiment.client_batch(client_id, server_round)
        model = local_model(experiment)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        schedule = experiment.schedule.for_client(len(batch))
        loss = train_locally(model, batch, schedule, experiment.gradient_map.loss)
        metrics = MetricRecord({"num-examples": len(batch), "train-loss": loss})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def local_model(experiment: Experiment) -> nn.Module:
    """Return a client's own copy of the model, ready to be trained.

    BatchNorm is in the mode of the experiment, and dropout is off.
    """
    model = copy.deepcopy(experiment.network)
    set_training_mode(model, experiment.gradient_map.batch_norm)
    return model


def train_locally(
    model: nn.Module, batch: Batch, schedule: LocalSchedule, loss_of: Loss = F.cross_entropy
) -> float:
    """Train a model in place on a client's samples of a round; return the last step's loss.

    ``schedule`` holds the steps, and ``loss_of`` is a function of logits and targets that returns a
    scalar.
    """
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=schedule.learning_rate,
        momentum=schedule.momentum,
        weight_decay=schedule.weight_decay,
    )
    loss = torch.zeros(())
    used = batch[: schedule.num_samples_used(len(batch))]
    for window in schedule.slices(len(batch)):
        # At the start of each epoch the defense encodes all samples of the round with new draws.
        if window.start == 0:
            inputs, targets = encode(used.inputs, used.targets)
        optimizer.zero_grad()
        loss = loss_of(model(inputs[window]), targets[window])
        loss.backward()
        optimizer.step()
    return loss.item()


def make_server_app(config_of: ConfigOf, console: Console, own_configs: bool = False) -> ServerApp:
    """Return the app of the server: it trains, attacks, and writes the run folder and its report.

    ``config_of`` returns the config of a run from the server's context. Progress is shown on
    ``console``. ``own_configs`` says that clients may run by their own configs; the first line that
    the run prints then says so.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = config_of(context)
        experiment = build(config)
        settings = experiment.settings
        if settings.server.num_threads is not None:
            torch.set_num_threads(settings.server.num_threads)
        wait_for_nodes(grid, settings.num_clients, settings.server.wait_seconds)
        check_machine(experiment)
        accept_any_text()
        progress = ConsoleProgress(console)
        describe(config, experiment)
        progress.line(headline(config, experiment, own_configs))
        tracker = experiment.tracker(progress.line)
        audit = experiment.server_audit(tracker, Path(settings.run_dir).name, progress)
        for caveat in experiment.caveats():
            audit.warn(0, -1, caveat)
        strategy = HonestButCurious(
            experiment.strategy(), audit, bad_replies=settings.server.bad_replies, reproducible=True
        )
        try:
            strategy.start(
                grid=grid,
                initial_arrays=ArrayRecord(experiment.network.state_dict()),
                num_rounds=settings.num_rounds,
                train_config=ConfigRecord({"learning-rate": experiment.schedule.learning_rate}),
                evaluate_fn=partial(evaluate_global_model, experiment, audit),
            )
        finally:
            progress.close()
            tracker.close()
            if audit.own_config_clients:
                describe_own_configs(config, audit.own_config_clients)
            finish(Path(settings.run_dir), console)

    return app


def wait_for_nodes(grid: Grid, num_clients: int, seconds: float) -> None:
    """Wait until Flower has a node for every client, at most for ``seconds``.

    Without this, Flower's strategies would wait forever for missing nodes.

    Raises:
        ConfigError: there are fewer nodes than ``num_clients`` after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while (connected := len(list(grid.get_node_ids()))) < num_clients:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"num_clients={num_clients} must be at most the number of nodes, got {connected} "
                f"after server.wait_seconds={seconds:g}: start more SuperNodes, or simulate them "
                f"by --federation-config 'num-supernodes={num_clients}'."
            )
        time.sleep(0.5)


def set_training_mode(model: nn.Module, batch_norm: str) -> None:
    """Set a model's BatchNorm layers to a mode: ``batch`` (train mode) or ``running`` (eval mode).

    All other layers are set to eval mode, so that dropout is left out, as it is in scores.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train(batch_norm == "batch")


def evaluate_global_model(
    experiment: Experiment, audit: ServerAudit, server_round: int, arrays: ArrayRecord
) -> MetricRecord:
    """Record and return the global model's test accuracy and loss, and save its weights.

    ``arrays`` are the global model's ``state_dict``. ``server_round`` is 0 before training. Weights
    are saved in the last round and every ``server.weights_every`` rounds.
    """
    model = copy.deepcopy(experiment.network)
    state = arrays.to_torch_state_dict()
    model.load_state_dict({k: v.to(model.state_dict()[k].dtype) for k, v in state.items()})
    every, last = experiment.settings.server.weights_every, experiment.settings.num_rounds
    if server_round == last or (every is not None and server_round % every == 0):
        try:
            save_weights(Path(experiment.settings.run_dir), server_round, model.state_dict())
        except OSError as error:  # a full disk must not end the training
            audit.warn(server_round, -1, f"the global model's weights were not saved: {error}")
    batches = experiment.data.test_batches(500, experiment.settings.server.test_samples)
    found = classifier_utility(model, batches, experiment.spec.padding)
    audit.utility(server_round, "test_accuracy", found.accuracy)
    audit.utility(server_round, "test_loss", found.loss, "nat")
    # No ε is recorded if clients run by their own configs, as the server does not know their
    # defenses.
    if server_round and not audit.own_config_clients:
        for adjacency in ADJACENCIES:
            epsilon = experiment.epsilon(server_round, adjacency)
            if epsilon is not None and math.isfinite(epsilon):
                name = f"dp_epsilon_{adjacency.replace('-', '_')}"
                audit.utility(server_round, name, epsilon)
        if server_round == 1 and (told := experiment.privacy(last)):
            audit.inform(server_round, -1, told)
    return MetricRecord(
        {"accuracy": found.accuracy, "loss": found.loss, "num-examples": found.num_examples}
    )
