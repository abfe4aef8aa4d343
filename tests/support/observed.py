"""A tiny app with BatchNorm, and a run of it with or without an observer."""

import random

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from torch import nn
from torch.nn import functional as F

from flwr_leakage.audit import ServerAudit
from flwr_leakage.flower import HonestButCurious, InlineGrid
from flwr_leakage.flower.inline_grid import SERVER_NODE_ID
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Reconstruction

SPEC = InputSpec(shape=(1, 4, 4), num_classes=3, mean=(0.5,), std=(0.5,))
SCHEDULE = LocalSchedule(learning_rate=0.1, batch_size=4)


def network() -> nn.Module:
    """Convolution, BatchNorm, linear layer: 47 parameters and 5 buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def client_app(*mods, on_train=None, on_evaluate=None) -> ClientApp:
    """One step on four images of the partition; ``on_…`` may change a reply."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        model = network()
        state, now = message.content["arrays"].to_torch_state_dict(), model.state_dict()
        model.load_state_dict({name: value.to(now[name].dtype) for name, value in state.items()})
        partition = context.node_config["partition-id"]
        draws = torch.Generator().manual_seed(partition)
        optimizer = torch.optim.SGD(model.parameters(), lr=SCHEDULE.learning_rate)
        loss = F.cross_entropy(
            model(torch.randn(4, 1, 4, 4, generator=draws)), torch.tensor([0, 1, 2, partition % 3])
        )
        loss.backward()
        optimizer.step()
        metrics = MetricRecord({"num-examples": 4 + partition % 3, "train-loss": loss.item()})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        reply = Message(content, reply_to=message)
        return on_train(reply, partition) if on_train else reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        partition = context.node_config["partition-id"]
        metrics = MetricRecord({"num-examples": 3, "loss": 0.1 * partition})
        reply = Message(RecordDict({"metrics": metrics}), reply_to=message)
        return on_evaluate(reply, partition) if on_evaluate else reply

    return app


class Memory:
    """A tracker that remembers."""

    def __init__(self):
        self.records, self.events, self.images, self.closed = [], [], [], False

    def log(self, record):
        self.records.append(record)

    def event(self, event):
        self.events.append(event)

    def image(self, *image):
        self.images.append(image)

    def close(self):
        self.closed = True


def careless_attack(job, progress=None):
    """An attack that draws from, and seeds, every process-wide generator."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    random.random(), np.random.rand(), torch.rand(1)
    answer = Batch(torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0]))
    return [Reconstruction(answer, 0.5) for _ in job.observations]


def audit(tracker, **settings) -> ServerAudit:
    """An audit of the tiny app."""
    gradient_map = GradientMap(network(), batch_norm="batch")
    return ServerAudit(gradient_map, SPEC, SCHEDULE, tracker, **settings)


def serve(strategy, app: ClientApp, num_clients: int, num_rounds: int = 2, arrays=None, **start):
    """Run a strategy; return its result and the state of every process-wide generator after it."""
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    results = []
    server = ServerApp()

    @server.main()
    def main(grid, context):
        first = ArrayRecord(network().state_dict()) if arrays is None else arrays
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        results.append(strategy.start(grid, first, num_rounds=num_rounds, **start))

    grid = InlineGrid(app, num_clients)
    server(grid, Context(1, SERVER_NODE_ID, {}, RecordDict(), {}))
    states = (
        random.getstate(),
        np.random.get_state()[1].tobytes(),
        torch.get_rng_state().numpy().tobytes(),
    )
    return results[0], states


def observe(strategy, tracker=None, **settings) -> HonestButCurious:
    """The strategy with an observer around it that attacks with a careless attack."""
    chosen = {key: settings.pop(key) for key in ("bad_replies", "reproducible") if key in settings}
    watched = audit(tracker or Memory(), **{"attack": careless_attack, **settings})
    return HonestButCurious(strategy, watched, **chosen)


def content(result) -> dict:
    """All that a run gives: arrays as bytes with dtype and shape, and every metric of a round."""
    return {
        "arrays": {name: (a.dtype, tuple(a.shape), a.data) for name, a in result.arrays.items()},
        "train": {r: dict(m) for r, m in result.train_metrics_clientapp.items()},
        "evaluate": {r: dict(m) for r, m in result.evaluate_metrics_clientapp.items()},
    }
