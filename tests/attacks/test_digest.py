"""Finished attacks are read back for the same question only; what cannot be told is not kept."""

import importlib
import sys
from dataclasses import replace

import pytest
import torch
from attacked import observe, tiny_network
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import LBFGS, AttackJob, GradientInversion, Parallel
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, ThreatModel

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
ATTACK = GradientInversion(optimizer=LBFGS(iterations=3), batching="loop")
SCALE = 1.0


def scaled_loss(logits, targets):
    return SCALE * F.cross_entropy(logits, targets)


class Scaled(nn.Sequential):
    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


def job(gradient_map):
    batch = Batch(torch.zeros(1, *SPEC.shape), torch.tensor([1]))
    seen = observe(GradientMap(tiny_network()), batch, LocalSchedule(0.1))
    return AttackJob(gradient_map, SPEC, [seen], ThreatModel())


def kept(gradient_map, folder, **settings):
    """Objective of an attack whose results are kept in a folder."""
    attack = Parallel(ATTACK, folder=str(folder))
    return attack(replace(job(gradient_map), **settings))[0].objective


def count(folder):
    return len(list(folder.iterdir())) if folder.exists() else 0


def test_the_same_question_made_anew_is_answered_by_the_file(tmp_path, monkeypatch):
    first = kept(GradientMap(tiny_network(), scaled_loss), tmp_path)
    monkeypatch.setattr(GradientInversion, "__call__", None)  # nothing is attacked any more
    assert kept(GradientMap(tiny_network(), scaled_loss), tmp_path) == first
    assert count(tmp_path) == 1


def test_settings_of_the_job_count(tmp_path):
    for settings in ({}, {"seed": 1}, {"max_seconds": 9.0}, {"threat": ThreatModel("known")}):
        kept(GradientMap(tiny_network()), tmp_path, **settings)
    assert count(tmp_path) == 4


def test_a_loss_by_another_global_variable_is_another_question(tmp_path, monkeypatch):
    first = kept(GradientMap(tiny_network(), scaled_loss), tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 5.0)
    assert kept(GradientMap(tiny_network(), scaled_loss), tmp_path) != first
    assert count(tmp_path) == 2


def test_a_network_whose_class_was_changed_is_another_question(tmp_path, monkeypatch):
    first = kept(GradientMap(Scaled(*tiny_network())), tmp_path)
    monkeypatch.setattr(Scaled, "factor", 5.0)
    assert kept(GradientMap(Scaled(*tiny_network())), tmp_path) != first
    assert count(tmp_path) == 2


def test_an_edited_file_of_the_user_is_another_question(tmp_path, monkeypatch):
    """Even where the edit is in a file that the network's own file imports, and changes nothing."""
    code, folder = tmp_path / "code", tmp_path / "kept"
    code.mkdir()
    (code / "own_layers.py").write_text("FACTOR = 2.0\n")
    (code / "own_network.py").write_text(
        "from torch import nn\n"
        "from own_layers import FACTOR\n"
        "class Own(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return FACTOR * super().forward(x)\n"
    )
    monkeypatch.syspath_prepend(code)
    own = importlib.import_module("own_network")
    gradient_map = GradientMap(own.Own(*tiny_network()))
    try:
        kept(gradient_map, folder)
        kept(gradient_map, folder)
        assert count(folder) == 1
        (code / "own_layers.py").write_text("FACTOR = 2.0  # edited\n")
        kept(gradient_map, folder)
        assert count(folder) == 2
    finally:
        for name in ("own_layers", "own_network"):
            del sys.modules[name]


def in_no_file():
    """A function that can be pickled, as its module is known, but whose code was typed in."""
    module = type(sys)("typed_in")
    exec("def loss(a, b):\n    return (a.sum() - b.sum()) ** 2\n", module.__dict__)
    return module


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda a, b: 5 * F.cross_entropy(a, b), "lambda"),
        (torch.jit.trace(F.mse_loss, (torch.ones(1),) * 2), "ScriptFunction cannot be pickled"),
        (in_no_file().loss, "the code of typed_in is in no file"),
    ],
)
def test_what_cannot_be_told_is_attacked_but_neither_kept_nor_read(
    loss, reason, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "typed_in", module := in_no_file())
    gradient_map = GradientMap(tiny_network(), module.loss if "typed_in" in reason else loss)
    alone = ATTACK(job(gradient_map))[0]
    with pytest.warns(UserWarning, match=f"No finished attack is kept in .*{reason}"):
        found = Parallel(ATTACK, folder=str(tmp_path / "kept"))(job(gradient_map))[0]
    assert (found.objective, found.error) == (
        pytest.approx(alone.objective, nan_ok=True),
        alone.error,
    )
    assert count(tmp_path / "kept") == 0


def test_a_model_that_fails_at_random_inputs_is_not_kept(tmp_path):
    with pytest.warns(UserWarning, match="No finished attack is kept"):
        kept(GradientMap(tiny_network(), only_zeros), tmp_path / "kept")
    assert count(tmp_path / "kept") == 0


def only_zeros(logits, targets):
    if len(logits) > 1:
        raise RuntimeError("one sample at a time")
    return F.cross_entropy(logits, targets)
