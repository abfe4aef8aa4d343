from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attacked import observe
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from flwr_leakage.attacks import Attack, AttackJob, GradientInversion, Restarts, Strongest
from flwr_leakage.attacks.presets import load_preset, preset_names
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ResNet8
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel

FOLDER = Path(__file__).parents[2] / "conf" / "attack"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "none")


def test_all_files_are_presets():
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_hydra_and_the_loader_build_the_same(name):
    node = OmegaConf.load(FOLDER / f"{name}.yaml")
    built = instantiate(node, _convert_="all")
    assert isinstance(built, Attack)
    assert built == load_preset(name)


def test_unknown_names_and_settings_fail():
    with pytest.raises(ValueError, match="dlg"):
        load_preset("dgl")
    node = OmegaConf.load(FOLDER / "dlg.yaml")
    node.restart = 3
    with pytest.raises(Exception, match="restart"):
        instantiate(node, _convert_="all")


def shortened(attack):
    if isinstance(attack, Strongest):
        attacks = {name: shortened(part) for name, part in attack.attacks.items()}
        return replace(attack, attacks=attacks)
    if isinstance(attack, Restarts):
        return replace(attack, attack=shortened(attack.attack))
    if isinstance(attack, GradientInversion):
        iterations = min(attack.optimizer.iterations, 300)
        return replace(attack, optimizer=replace(attack.optimizer, iterations=iterations))
    return attack


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_solves_a_small_case(name, gradient_map, spec):
    if name == "analytic":
        gradient_map = GradientMap(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    if name == "feature_recursion":
        torch.manual_seed(0)
        gradient_map = GradientMap(ResNet8(spec.shape, spec.num_classes, width=16))
    across = torch.linspace(0.1, 0.9, 8)
    image = spec.normalize((across[:, None] * across.sqrt()).reshape(1, *spec.shape))
    batch = Batch(image, torch.tensor([1]))
    observation = observe(gradient_map, batch, LocalSchedule(0.1))
    attack = shortened(load_preset(name))
    (result,) = attack(AttackJob(gradient_map, spec, [observation], ThreatModel()))
    assert result.error == ""
    assert result.batch.targets.tolist() == [1]
    error = float((result.batch.inputs - image).square().mean())
    assert error < 0.5 * float(image.square().mean())
