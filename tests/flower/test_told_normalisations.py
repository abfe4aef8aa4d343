"""Each client is attacked under its own normalisation, whether it can tell it or not."""

import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from trained import Loop, network, pixels

from flwr_leakage.flower import audit, observe, run_inline
from flwr_leakage.records import Batch, InputSpec, Reconstruction
from flwr_leakage.tracking import read_run

HALF, NONE = ((0.5,), (0.5,)), ((0.0,), (1.0,))
LEVELS = pixels()
SMOOTH = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def app(*held):
    """Clients that train on what each holds."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        loop = Loop(images=held[context.node_config["partition-id"]], batch_size=12)
        loop.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        content = {
            "arrays": ArrayRecord(loop.run().state_dict()),
            "metrics": MetricRecord({"num-examples": 12}),
        }
        return Message(RecordDict(content), reply_to=message)

    return audit(app)


def assumed(folder, held, num_rounds=1):
    """The spec of each attack, by client, and the events."""
    found = {}

    def attack(job, progress=None):
        for seen in job.observations:
            found.setdefault(seen.client_id, []).append(job.spec)
        grey = Batch(torch.zeros(12, *job.spec.shape), torch.zeros(12, dtype=torch.long))
        return [Reconstruction(grey, 0.5) for _ in job.observations]

    count = len(held)
    every = {"min_train_nodes": count, "min_available_nodes": count}
    strategy = observe(FedAvg(fraction_evaluate=0.0, **every), network(), folder, attack=attack)
    server = ServerApp()

    @server.main()
    def main(grid, context):
        strategy.start(grid, ArrayRecord(network().state_dict()), num_rounds=num_rounds)

    run_inline(server, app(*held), count)
    return found, read_run(folder).events


def test_each_client_is_attacked_under_the_normalisation_that_it_tells(tmp_path):
    found, events = assumed(tmp_path / "run", [LEVELS, (LEVELS - 0.5) / 0.5])
    assert [(one.mean, one.std) for one in found[0]] == [NONE]
    assert [(one.mean, one.std) for one in found[1]] == [HALF]
    assert not events


def test_who_tells_none_is_attacked_under_that_of_all_others(tmp_path):
    half = (LEVELS - 0.5) / 0.5
    found, _ = assumed(tmp_path / "run", [half, (SMOOTH - 0.5) / 0.5, half])
    assert all((one.mean, one.std) == HALF and one.known for one in found[1])
    assert len(found[1]) == 1


@pytest.mark.parametrize("others", [[], [LEVELS, (LEVELS - 0.5) / 0.5]], ids=["none", "two"])
def test_who_tells_none_is_attacked_under_all_where_the_others_tell_several_or_none(
    tmp_path, others
):
    found, events = assumed(tmp_path / "run", [SMOOTH, *others])
    assert found[0][0] == InputSpec((1, 6, 6), 3, (0.5,), (0.25,), box=False)
    tried = {(one.mean, one.std) for one in found[0]}
    assert {HALF, NONE, ((0.1307,), (0.3081,))} <= tried
    assert ["told no normalisation; by fit" in event.message for event in events] == [True]
