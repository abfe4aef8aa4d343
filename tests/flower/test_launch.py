"""How a pair of apps is started on either engine."""

import flwr.simulation
import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_leakage.flower import InlineGrid, RayEngine, run_inline, run_ray


def test_the_server_app_runs_once_and_reaches_every_client():
    client_app, server_app, partitions, servers = ClientApp(), ServerApp(), [], []

    @client_app.train()
    def train(message, context):
        partitions.append(context.node_config["partition-id"])
        return Message(RecordDict(), reply_to=message)

    @server_app.main()
    def main(grid, context):
        servers.append(context)
        nodes = grid.get_node_ids()
        messages = [Message(RecordDict(), node, MessageType.TRAIN) for node in nodes]
        assert len(list(grid.send_and_receive(messages))) == 3

    run_inline(server_app, client_app, 3)
    assert partitions == [0, 1, 2]
    assert len(servers) == 1
    assert servers[0].run_config == {}


def apps_that_note_their_run_config():
    client_app, server_app, seen = ClientApp(), ServerApp(), []

    @client_app.train()
    def train(message, context):
        seen.append(dict(context.run_config))
        return Message(RecordDict(), reply_to=message)

    @server_app.main()
    def main(grid, context):
        seen.append(dict(context.run_config))
        nodes = grid.get_node_ids()
        list(
            grid.send_and_receive(
                [Message(RecordDict(), node, MessageType.TRAIN) for node in nodes]
            )
        )

    return server_app, client_app, seen


def test_both_apps_find_the_run_config():
    server_app, client_app, seen = apps_that_note_their_run_config()
    run_inline(server_app, client_app, 2, {"local-epochs": 1})
    assert seen == [{"local-epochs": 1}] * 3


def test_an_error_of_the_server_app_reaches_the_caller():
    server_app = ServerApp()

    @server_app.main()
    def main(grid, context):
        raise ValueError("no such strategy")

    with pytest.raises(ValueError, match="no such strategy"):
        run_inline(server_app, ClientApp(), 1)


@pytest.fixture
def simulations(monkeypatch):
    calls = []
    monkeypatch.setattr(
        flwr.simulation, "run_simulation", lambda *args, **kwargs: calls.append((args, kwargs))
    )
    return calls


def test_ray_is_told_its_resources(simulations, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    server_app, client_app = ServerApp(), ClientApp()
    run_ray(server_app, client_app, 7, num_cpus=3, client_cpus=2, client_gpus=0.5)
    ((arguments, settings),) = simulations
    assert arguments == (server_app, client_app, 7)
    backend = settings["backend_config"]
    assert backend["client_resources"] == {"num_cpus": 2, "num_gpus": 0.5}
    assert backend["init_args"]["num_cpus"] == 3


def test_on_ray_both_apps_find_the_run_config_too(simulations):
    server_app, client_app, seen = apps_that_note_their_run_config()
    run_ray(server_app, client_app, 1, {"local-epochs": 1}, num_cpus=1)
    ((sent_server, sent_client, _), _) = simulations[0]
    context = Context(1, 1, {}, RecordDict(), {})
    sent_server(InlineGrid(sent_client, 1), context)
    assert seen == [{"local-epochs": 1}] * 2
    assert context.run_config == {}  # Flower refuses a context that comes back changed


def test_all_of_the_machines_cpus_are_used_by_default(simulations, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    run_ray(ServerApp(), ClientApp(), 1, client_cpus=5)
    assert simulations[0][1]["backend_config"]["init_args"]["num_cpus"] == 5


@pytest.mark.parametrize("client_cpus", [0, 3])
def test_a_client_that_would_wait_forever_is_refused(simulations, client_cpus):
    with pytest.raises(ValueError, match=rf"client_cpus must lie in \[1, 2\], got {client_cpus}"):
        run_ray(ServerApp(), ClientApp(), 1, num_cpus=2, client_cpus=client_cpus)
    assert not simulations


@pytest.mark.parametrize("share", [-1.0, float("nan"), float("inf")])
def test_a_share_of_a_gpu_is_a_number(share):
    with pytest.raises(ValueError, match="client_gpus must be ≥ 0, got"):
        RayEngine(num_cpus=1, client_gpus=share)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="client_gpus must be at most 0, the GPUs of this machine"):
        RayEngine(num_cpus=1, client_gpus=0.5)
