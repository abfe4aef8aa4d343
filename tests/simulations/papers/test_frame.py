"""What all experiments share: parts that are not repeated, training, judgements, pages."""

import csv
import json
import re
from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from flwr_leakage.defenses import GradientPruning
from simulations.papers import Claim, Findings, Judgement, Lab
from simulations.papers.findings import overall
from simulations.papers.i2f import noise
from simulations.papers.i2f.victim import Victim
from simulations.papers.perform import _device, perform
from simulations.papers.training import Recipe


def test_a_finished_part_is_read_back_and_another_setting_is_computed(lab):
    calls = []

    def compute():
        calls.append(1)
        return [{"value": len(calls), "none": None}]

    first = lab.part("seed=1", {"seed": 1}, compute)
    assert lab.part("seed=1", {"seed": 1}, compute) == first == [{"value": 1, "none": None}]
    assert lab.part("seed=1", {"seed": 2}, compute) == [{"value": 2, "none": None}]
    assert lab.part("seed=1", {"seed": GradientPruning(0.5)}, compute)[0]["value"] == 3
    assert lab.part("seed=1", {"seed": GradientPruning(0.9)}, compute)[0]["value"] == 4


def test_a_killed_part_leaves_nothing(lab):
    def dies():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab.part("one", {}, dies)
    assert lab.part("one", {}, lambda: [{"value": 1}]) == [{"value": 1}]


def test_a_larger_size_reads_the_blocks_of_a_smaller_one(lab, monkeypatch):
    attacked = []

    def rows(network, batch, *rest, **more):
        attacked.append(len(batch))
        return [{"perturbation": "1e-06", "image": i} for i in range(len(batch))]

    monkeypatch.setattr(noise, "attack_rows", rows)
    monkeypatch.setattr(noise, "Influence", lambda network, batch: None)
    monkeypatch.setattr(noise, "gaussian", lambda *_: {})
    panel = noise.Panel(Victim("LeNet", "digits"), "GS", 1)
    for images in (10, 23, 23):
        found = noise.noise_rows(lab, panel, noise.Noise([1e-6], images, 0, [0], [1.0]))
        assert len(found) == images
    assert attacked == [10, 10, 3]


def write_data(root, images, labels):
    root.mkdir(exist_ok=True)
    for part in ("train", "test"):
        np.savez(root / f"mnist_{part}.npz", images=images, labels=labels)


def test_other_data_files_are_another_part(lab, tmp_path):
    images, labels = np.zeros((6, 8, 8), dtype=np.uint8), np.arange(6)
    lab = replace(lab, data_root=tmp_path / "data")
    calls = []

    def rows(data):
        return lab.rows("all", {"data": data}, lambda: calls.append(1) or [{"n": len(calls)}])

    for labels_now in (labels, labels, labels[::-1]):
        write_data(tmp_path / "data", images, labels_now)
        rows("mnist/2"), rows("digits")
    assert len(calls) == 3  # the first of both, and the one whose labels changed
    for overrides in (
        ["dataset=mnist_npz"],
        [f"dataset.root={tmp_path / 'data'}", "dataset=mnist_npz"],
    ):
        given = lab if len(overrides) == 1 else replace(lab, data_root=None)
        for labels_now in (labels, labels[::-1]):
            write_data(tmp_path / "data", images, labels_now)
            given.rows("runs", {"overrides": overrides}, lambda: calls.append(1) or [])
    assert len(calls) == 7
    recipe = Recipe("LeNet", "mnist", 0)
    device = torch.device("cpu")
    assert recipe.digest(device, {"mnist": "a"}) != recipe.digest(device, {"mnist": "b"})


RECIPE = {
    "network": "ResNet8",
    "data": "digits",
    "epochs": 2,
    "options": {"width": 2},
    "checkpoints": (0, 1),
    "num_images": 40,
    "batch_size": 20,
}


def test_training_keeps_buffers_and_is_not_repeated(lab, monkeypatch):
    found = lab.trained(**RECIPE)
    assert sorted(found) == [0, 1, 2]
    assert found[0].bn1.running_mean.abs().max() == 0 < found[2].bn1.running_mean.abs().max()
    assert found[2].bn1.num_batches_tracked == 4 and not found[2].training
    assert not torch.equal(found[1].fc.weight, found[2].fc.weight)
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_: pytest.fail("trained again"))
    again = lab.trained(**RECIPE)
    assert torch.equal(again[2].fc.weight, found[2].fc.weight)


def test_the_rate_falls_at_half_and_three_quarters(lab, monkeypatch):
    rates = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD,
        "step",
        lambda self, *a: (rates.append(self.param_groups[0]["lr"]), step(self, *a))[1],
    )
    lab.trained(**{**RECIPE, "epochs": 8, "num_images": 20})
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)


def test_a_defense_changes_each_step(lab):
    free = lab.trained(**{**RECIPE, "weight_decay": 0.0, "momentum": 0.0, "epochs": 1})
    pruned = lab.trained(
        **{**RECIPE, "weight_decay": 0.0, "momentum": 0.0, "epochs": 1},
        defense=GradientPruning(0.999),
    )

    def moved(models):
        before, after = models[0].parameters(), models[1].parameters()
        return sum((a != b).sum() for a, b in zip(before, after, strict=True))

    total = sum(p.numel() for p in free[0].parameters())
    assert moved(free) > total / 2 > 0.05 * total > moved(pruned) > 0


def test_augmentation_and_seed_change_the_weights(lab):
    plain = lab.trained(**RECIPE)[2].fc.weight
    assert not torch.equal(plain, lab.trained(**RECIPE, augment=True)[2].fc.weight)
    assert not torch.equal(plain, lab.trained(**RECIPE, seed=1)[2].fc.weight)


def test_what_does_not_exist_is_named(lab):
    with pytest.raises(ValueError, match=r"network must be one of .*'LeNet'.*got 'Lenet'"):
        lab.trained(**{**RECIPE, "network": "Lenet"})
    with pytest.raises(ValueError, match="data_root=FOLDER, got none"):
        lab.data("cifar10")
    with pytest.raises(ValueError, match=r"checkpoints must lie in 0 … 2, got \[3\]"):
        lab.trained(**{**RECIPE, "checkpoints": (3,)})


def test_no_judgement_without_an_interval_and_none_without_a_reason():
    with pytest.raises(ValueError, match="number and its interval"):
        Claim("It grows (Table 1).", "0.5", 0.4, None, None, 5, Judgement.HOLDS)
    with pytest.raises(ValueError, match="must give a reason"):
        Claim("It grows (Table 1).", "0.5", None, None, None, 0, Judgement.NOT_COMPARABLE)
    with pytest.raises(ValueError, match="one number"):
        Claim("It grows (Table 1).", "0.5", 0.4, 0.3, 0.5, 9, Judgement.HOLDS_IN_PART, "why")


def test_one_judgement_of_an_experiment_follows_from_its_claims():
    holds, in_part, undecided, fails, none = Judgement
    assert overall([holds, holds, none]) is holds
    assert overall([holds, undecided]) is overall([holds, fails]) is in_part
    assert overall([undecided, fails, none]) is fails
    assert overall([undecided, none]) is undecided
    assert overall([none]) is overall([]) is none


@dataclass(frozen=True)
class Doubling:
    """A title.

    Words.

    Attributes:
        factor: of it.
    """

    factor: int

    def run(self, lab: Lab) -> Findings:
        rows = lab.part("all", {"factor": self.factor}, lambda: [{"x": 1, "2x | y": self.factor}])
        claim = Claim("It doubles (Fig. 1).", "2", 2.0, 1.9, 2.1, 7, Judgement.HOLDS)
        figure, axes = plt.subplots()
        axes.plot([0, 1])
        return Findings(rows, (claim,), {"line": figure}, "nothing.")


def test_a_page_says_what_its_command_prints(tmp_path):
    given = {
        "settings": {"factor": 2},
        "device": "cpu",
        "results": str(tmp_path / "results"),
        "cache": str(tmp_path / "cache"),
    }
    overrides = ["experiment=doubling", "size=cpu", "lab.data_root=/secret", "+paper.factor=2"]
    overrides += ["lab.cache=/elsewhere", "lab.results=/elsewhere"]
    page = perform(Doubling(2), "doubling", "cpu", overrides=overrides, **given)
    text = page.read_text()
    assert text.startswith("# A title\n\nWords.\n")
    assert "+experiment=doubling size=cpu lab.data_root=… +paper.factor=2\n" in text
    assert "secret" not in text and "| **holds** |" in text and "1.9 … 2.1" in text
    assert "(line.png)" in text and (page.parent / "line.png").stat().st_size > 1000
    table = list(csv.DictReader((page.parent / "table.csv").open()))
    assert table == [{"x": "1", "2x | y": "2"}]
    kept = json.loads((page.parent / "findings.json").read_text())
    assert kept["claims"][0]["judgement"] == "holds" and kept["rows"] == [{"x": 1, "2x | y": 2}]
    index = (tmp_path / "results/README.md").read_text()
    assert "Judgement: **holds** (1 holds)." in text and "1 experiments: 1 holds." in index
    counts = r"\| \*\*holds\*\* \| 1 \| 0 \| 0 \| 0 \| 0 \| 7"
    assert re.search(r"\(doubling/doubling.md\) \| A title \| cpu " + counts, index)
    for size in ("smoke", "thorough"):
        perform(Doubling(2), "doubling", size, overrides=overrides, **given)
        assert (tmp_path / f"results/doubling-{size}/doubling.md").is_file()
    index = (tmp_path / "results/README.md").read_text()
    assert "(doubling-thorough/doubling.md) | A title | thorough |" in index
    assert "1 claims: 1 holds. At size cpu: 1 holds." in index and "smoke" not in index


class CountingThreads:
    """A title."""

    def run(self, lab: Lab) -> Findings:
        return Findings([{"threads": torch.get_num_threads()}], (), {}, "nothing.")


def test_an_experiment_computes_on_one_thread_whatever_the_process_has(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        folders = {"results": str(tmp_path), "cache": str(tmp_path)}
        page = perform(CountingThreads(), "threads", "cpu", {}, [], "cpu", **folders)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert json.loads((page.parent / "findings.json").read_text())["rows"] == [{"threads": 1}]


@pytest.mark.parametrize("name", ["banana", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_an_error_before_any_work(name):
    with pytest.raises(ValueError, match=f"device must be one that this machine has, .* {name!r}"):
        _device(name)
