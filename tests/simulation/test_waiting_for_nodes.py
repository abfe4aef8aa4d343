"""The server waits for a node for every client, but not forever."""

import pytest
from audits import tiny_config
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console

from flwr_leakage.flower.inline_grid import InlineGrid
from flwr_leakage.simulation import apps
from flwr_leakage.simulation.apps import make_server_app, wait_for_nodes
from flwr_leakage.simulation.config import ConfigError


class LateGrid(InlineGrid):
    """One more node each time that somebody looks."""

    looks = 0

    def get_node_ids(self):
        self.looks += 1
        return super().get_node_ids()[: self.looks]


def test_nodes_that_come_late_are_waited_for(monkeypatch):
    monkeypatch.setattr(apps.time, "sleep", lambda seconds: None)
    grid = LateGrid(ClientApp(), 4)
    wait_for_nodes(grid, 4, 60.0)
    assert grid.looks == 4


def test_fewer_nodes_than_clients_end_the_run_before_it_starts(tiny_data):
    config = tiny_config(tiny_data, "server.wait_seconds=0")
    server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(ConfigError, match=r"num_clients=3 .* got 2 .*num-supernodes=3"):
        make_server_app(lambda _: config, Console(quiet=True))(InlineGrid(ClientApp(), 2), server)
    assert not (tiny_data / "run").exists()
