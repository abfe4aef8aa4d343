"""An update in a file is attacked whatever wrote it, and a file of anybody's runs no code."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from flwr_leakage.cli.app import app
from flwr_leakage.cli.update_file import UpdateFile, observe_file, read_tensors
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import LocalSchedule
from flwr_leakage.tracking import read_run

SCHEDULE = LocalSchedule(0.1)
CODE = """
import torch
from torch import nn

def Net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
"""


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def trained():
    """The state before, after one step on one image, and the gradients."""
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4)
    F.cross_entropy(model(images), torch.tensor([2])).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return before, dict(model.state_dict()), gradients


BEFORE, AFTER, GRADIENTS = trained()
CHANGE = {name: AFTER[name] - BEFORE[name] for name in AFTER}


def arrays(state):
    return {name: value.numpy() for name, value in state.items()}


FILES = {
    "diff.npz": (lambda path: np.savez(path, **arrays(CHANGE)), {}),
    "diff.safetensors": (lambda path: save_file(CHANGE, path), {}),
    "diff.pt": (lambda path: torch.save(CHANGE, path), {}),
    "wrapped.pth": (
        lambda path: torch.save({f"module.{k}": v for k, v in CHANGE.items()}, path), {},
    ),
    "dxo.pt": (lambda path: torch.save({"kind": "WEIGHT_DIFF", "data": CHANGE}, path), {}),
    "list.pt": (lambda path: torch.save(list(CHANGE.values()), path), {}),
    "checkpoint.pt": (
        lambda path: torch.save({"state_dict": CHANGE, "epoch": 3}, path), {},
    ),
    "gradient.npz": (lambda path: np.savez(path, **arrays(GRADIENTS)), {"holds": "gradient"}),
    "after.pt": (lambda path: torch.save(AFTER, path), {"before": "before.pt"}),
    "after.npz": (lambda path: np.savez(path, **arrays(AFTER)), {"before": "before.pt"}),
}  # fmt: skip


def given(path, **settings):
    torch.save(BEFORE, path.parent / "before.pt")
    if "before" in settings:
        settings["before"] = path.parent / settings["before"]
    return UpdateFile(path, "mine:Net", (1, 4, 4), schedule=SCHEDULE, **settings)


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_same_update(name, tmp_path):
    write, settings = FILES[name]
    write(tmp_path / name)
    chosen, seen, _ = observe_file(
        given(tmp_path / name, **settings), GradientMap(network(), batch_norm="batch")
    )
    assert seen.update.delta.keys() == CHANGE.keys() == seen.params.keys()
    for key, value in CHANGE.items():
        assert torch.allclose(seen.update.delta[key], value, atol=1e-7)
        assert torch.equal(seen.params[key], BEFORE[key])
    assert chosen.trained == set(CHANGE)


def test_a_part_and_other_arrays_are_told(tmp_path):
    path = tmp_path / "part.npz"
    first = dict(list(arrays(CHANGE).items())[:2])
    np.savez(path, **first, steps=np.ones(1))
    chosen, seen, remarks = observe_file(given(path), GradientMap(network()))
    assert chosen.trained == {"1.weight", "1.bias"}
    assert not seen.update.delta["3.weight"].any()
    assert "holds 2 of 4 parameters" in remarks[1] and "3.weight, 3.bias" in remarks[1]
    assert remarks[2] == "1 of its arrays are none of the model's: steps."


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("run-by-a-file",))


def evil(path):
    torch.save({"model": Evil()}, path)


WRONG = {
    "a.txt": (lambda path: path.write_text("x"), "must be one of .safetensors, .npz, .pt"),
    "a.npz": (lambda path: path.write_bytes(b"PK nothing"), "no archive of arrays"),
    "a.safetensors": (lambda path: path.write_bytes(b"x" * 99), "no safetensors file"),
    "a.pt": (evil, "must hold tensors alone"),
    "b.npz": (lambda path: np.savez(path, a=np.array([{}], object)), "no archive of arrays"),
    "c.npz": (lambda path: np.savez(path, x=np.ones(3)), "must hold parameters of the model"),
    "d.npz": (
        lambda path: np.savez(path, **{"1.weight": np.ones((2, 2))}),
        r"must have shape \(8, 16\), got \(2, 2\)",
    ),
    "e.pt": (lambda path: torch.save({"a": torch.full((2,), torch.nan)}, path), "finite real"),
    "f.pt": (lambda path: torch.save({"kind": "METRICS", "data": {}}, path), "got METRICS"),
    "g.pt": (lambda path: torch.save({"kind": "WEIGHTS", "data": AFTER}, path), "--before FILE"),
    "h.pt": (lambda path: torch.save({"a": [1]}, path), "arrays by name, got builtins.list"),
    "i.pt": (lambda path: torch.save(torch.ones(2), path), "by name or in a list"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_another_file_is_refused_in_words(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, words = WRONG[name]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=words):
        observe_file(given(tmp_path / name), GradientMap(network()))
    assert not (tmp_path / "run-by-a-file").exists()


def test_missing_settings_are_named(tmp_path):
    np.savez(tmp_path / "diff.npz", **arrays(CHANGE))
    bare = UpdateFile(tmp_path / "diff.npz", "mine:Net", (1, 4, 4))
    with pytest.raises(ValueError, match="--learning-rate must be given"):
        observe_file(bare, GradientMap(network()))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_tensors(tmp_path / "none.pt")
    with pytest.raises(ValueError, match="holds must be one of"):
        UpdateFile(tmp_path / "diff.npz", "mine:Net", (1, 4, 4), holds="anything")


def invoke(*arguments):
    return CliRunner().invoke(app, ["attack", *map(str, arguments)])


def test_the_command_writes_images_and_a_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_of_a_test.py").write_text(CODE)
    np.savez(tmp_path / "diff.npz", **arrays(CHANGE))
    settings = ("--shape", "1,4,4", "--learning-rate", "0.1", "--preset", "analytic")
    made = invoke("diff.npz", "--model", "mine_of_a_test:Net", *settings)
    assert made.exit_code == 0, made.output
    assert "θ_t was taken to be what mine_of_a_test:Net is made with" in made.output
    folder = tmp_path / "leakage-diff"
    assert (folder / "report.html").exists() and list((folder / "images").iterdir())
    (objective,) = [r.value for r in read_run(folder).records if r.name == "objective"]
    assert objective < 1e-6
    for arguments, words in (
        (("diff.npz",), "takes --model MODULE:NAME and --shape C,H,W"),
        (("diff.npz", "--model", "mine_of_a_test:Net", *settings), "leakage-diff"),
        (("diff.npz", "--model", "mine_of_a_test:Two", *settings), "must have 'Two'"),
        (("diff.npz", "--model", "mine_of_a_test", "--shape", "16"), "--shape must be C,H,W"),
        (("diff.npz", "--model", "mine_of_a_test", *settings, "seed=1"), "takes options only"),
        (
            ("diff.npz", "--model", "mine_of_a_test", "--shape", "1,5,5", "-o", "b",
             "--learning-rate", "0.1"),
            "must take inputs of shape (1, 5, 5)",
        ),
    ):  # fmt: skip
        failed = invoke(*arguments)
        assert failed.exit_code == 2 and words in failed.output
