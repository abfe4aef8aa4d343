"""Apps that know nothing of the audit, and runs of them."""

from functools import partial

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from trained import Loop, network, pixels

from flwr_leakage.flower import InlineGrid, audit, observe, run_inline
from flwr_leakage.flower.wire import RECORD_KEY, unpack_note
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.tracking import read_run

audited = partial(audit, share="everything")
"""The one line of a client whose owner lets all results travel, so that tests can read them."""


class Counting(FedAvg):
    """A strategy with a ``start`` and attributes of its own, as in Flower's advanced example."""

    started = 0

    def start(self, *args, **kwargs):
        self.started += 1
        return super().start(*args, **kwargs)


def client_app(around=lambda app: app, mods=(), stateful=False, **settings):
    app = around(ClientApp())

    @app.train(mods=list(mods))
    def train(message, context):
        loop = Loop(**{"model": network(batch_norm=settings.get("batch_norm", False))} | {
            name: value for name, value in settings.items() if name != "batch_norm"
        })  # fmt: skip
        if "images" not in settings:
            loop.images = (pixels(seed=context.node_config["partition-id"]) - 0.5) / 0.5
        loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        if stateful and "head" in context.state:
            loop.model[-1].load_state_dict(context.state["head"].to_torch_state_dict())
        model = loop.run()
        context.state["head"] = ArrayRecord(model[-1].state_dict())
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": 12}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"accuracy": 0.5, "num-examples": 12})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def run(folder, app, num_rounds=1, strategy=None, model=None, **settings):
    """The result of ``start``, the run, and the strategy."""
    chosen = strategy or Counting(fraction_evaluate=1.0)
    model = model or network()
    observed = observe(chosen, model, folder, attack=settings.pop("attack", None), **settings)
    found = []
    server = ServerApp()

    @server.main()
    def main(grid, context):
        arrays = ArrayRecord(network().state_dict() if isinstance(model, GradientMap)
                             else model.state_dict())  # fmt: skip
        found.append(observed.start(grid, arrays, num_rounds=num_rounds))

    run_inline(server, app, 2)
    return found[0], read_run(folder), observed


def checks(data):
    return [r for r in data.records if r.name == "replay_residual"]


def changing(seen=None, **settings):
    """An app whose training changes with the round."""

    def train(message, context):
        server_round = message.content["config"]["server-round"]
        now = {name: of(server_round) for name, of in settings.items()}
        count = now.pop("count", 12)
        metrics = {"num-examples": count} if count else {"train-loss": 0.5}
        loop = Loop(**{"images": (pixels() - 0.5) / 0.5} | now)
        loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        content = {
            "arrays": ArrayRecord(loop.run().state_dict()),
            "metrics": MetricRecord(metrics),
        }
        return Message(RecordDict(content), reply_to=message)

    app = ClientApp()
    app.train()(train)
    return audited(app, **(seen or {}))


def falling(server_round):
    return lambda p: torch.optim.SGD(p, lr=0.1 / server_round)


def notes(app, num_rounds=3):
    """What one client tells beside its update, round by round."""
    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    told = []
    for server_round in range(1, num_rounds + 1):
        config = ConfigRecord({"server-round": server_round, "clipping_norm": 1e6})
        content = RecordDict({"arrays": ArrayRecord(network().state_dict()), "config": config})
        message = grid.create_message(content, "train", node, str(server_round))
        (reply,) = grid.send_and_receive([message])
        assert not reply.has_error()
        told.append(unpack_note(reply.content[RECORD_KEY]))
    return told
