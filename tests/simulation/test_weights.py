"""Weights of a run are saved and started from, buffers included."""

import pytest
import torch
from audits import run, tiny_config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flwr_leakage.simulation import weights as module
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError
from flwr_leakage.tracking import read_run

NETWORK = [
    "model=resnet8",
    "model.network.width=1",
    "model.batch_norm=batch",
    "selection.max_examples=1",
]
TRAINING = ["client.num_examples=4", "client.batch_size=4"]


def test_a_run_goes_on_from_the_weights_of_another(tiny_data):
    config = tiny_config(tiny_data, *NETWORK, *TRAINING, "server.weights_every=1")
    run(config)
    folder = tiny_data / "run/weights"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"round_{i:04d}.safetensors" for i in range(3)
    ]
    last = load_file(folder / "round_0002.safetensors")
    assert last["bn1.num_batches_tracked"] == 2 and last["bn1.running_mean"].any()
    drawn = build(config).network.state_dict()
    start = load_file(folder / "round_0000.safetensors")
    assert all(torch.equal(start[name], value) for name, value in drawn.items())
    weights = f"model.weights={folder / 'round_0002.safetensors'}"
    resumed = build(tiny_config(tiny_data, *NETWORK, *TRAINING, weights, name="next"))
    state = resumed.network.state_dict()
    assert state.keys() == last.keys()
    assert all(torch.equal(state[name], value) for name, value in last.items())


def test_weights_that_find_no_room_end_no_training(tiny_data, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"torn")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    config = tiny_config(tiny_data, "server.weights_every=1")
    run(config)
    data = read_run(config["run_dir"])
    assert data.closed
    said = [event for event in data.events if "were not saved" in event.message]
    assert [event.server_round for event in said] == [0, 1, 2]
    assert all("No space left" in event.message for event in said)
    assert not list((tiny_data / "run/weights").iterdir())


def test_a_file_that_does_not_fit_is_named(tiny_data):
    file = tiny_data / "other.safetensors"
    save_file({"fc.weight": torch.zeros(3)}, file)
    for path, said in ((file, "the network's 2 entries"), (tiny_data / "no", "does not exist")):
        with pytest.raises(ConfigError, match=f"model.weights: weights must .*{said}"):
            build(tiny_config(tiny_data, f"model.weights={path}"))
    not_one = tiny_data / "tiny_train.npz"
    with pytest.raises(ConfigError, match=r"model.weights: weights must be a safetensors file"):
        build(tiny_config(tiny_data, f"model.weights={not_one}"))


def test_a_real_node_reads_no_file_that_the_run_names(tiny_data):
    config = tiny_config(tiny_data, f"model.weights={tiny_data / 'no'}")
    assert build(config, remark="its own").network is not None
