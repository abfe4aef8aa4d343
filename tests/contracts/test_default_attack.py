"""Whoever names no attack gets the same one everywhere, and the docs name it."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import yaml
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import flwr_leakage
from flwr_leakage._conf import DEFAULT_ATTACK, conf_dir
from flwr_leakage.attacks import Strongest
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.cli.app import app, attack_kept
from flwr_leakage.flower import audit, observe, observe_legacy, run_inline
from flwr_leakage.tracking import read_run

ROOT = Path(__file__).parents[2]


def test_it_is_the_portfolio():
    assert isinstance(load_preset(DEFAULT_ATTACK), Strongest)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (observe, "attack"), (observe_legacy, "attack"), (attack_kept, "attack"),
        (flwr_leakage.attack, "preset"),
    ],
)  # fmt: skip
def test_every_call_has_it_for_its_default(call, argument):
    assert inspect.signature(call).parameters[argument].default == DEFAULT_ATTACK


def test_a_simulation_attacks_by_it():
    defaults = yaml.safe_load((conf_dir() / "config.yaml").read_text())["defaults"]
    assert {"attack": DEFAULT_ATTACK} in defaults


def test_the_command_says_so():
    shown = CliRunner().invoke(app, ["attack-kept", "--help"], env={"COLUMNS": "200"})
    assert re.search(rf"--attack .*default: {DEFAULT_ATTACK}", shown.output)


def test_examples_and_docs_name_no_weaker_one_for_self_attacks_gates_and_observers():
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")]
    files += (ROOT / "simulations" / "examples").rglob("*.py")
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"""attack=["']?idlg|load_preset\(.?["']idlg""", text), file


def test_one_line_finds_a_batch_that_the_engine_copies_exactly(tmp_path):
    """The former default found nothing in it."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 4))
    client, server = audit(ClientApp(), truth=tmp_path / "truth"), ServerApp()

    @client.train()
    def train(message, context):
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        images = torch.randint(256, (4, 1, 8, 8), generator=torch.Generator().manual_seed(0)) / 255
        optimizer.zero_grad()
        F.cross_entropy(network(images), torch.tensor([0, 1, 2, 3])).backward()
        optimizer.step()
        arrays, metrics = ArrayRecord(network.state_dict()), MetricRecord({"num-examples": 4})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid, context):
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        observed = observe(strategy, network, tmp_path / "run", truth=tmp_path / "truth")
        observed.start(grid, ArrayRecord(network.state_dict()), num_rounds=1)

    run_inline(server, client, 1)
    data = read_run(tmp_path / "run")
    assert [r.value > 60 for r in data.records if r.name == "psnr"] == [True] * 4
    assert any("exact_batch: solved 1" in event.message for event in data.events)
