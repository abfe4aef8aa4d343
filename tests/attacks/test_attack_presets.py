import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attacked import observe, preset, tiny_network
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from hydra.version import getbase
from omegaconf import OmegaConf
from torch import nn

from flwr_leakage.attacks import (
    Attack,
    AttackJob,
    GradientInversion,
    Strongest,
    TotalVariation,
    presets,
)
from flwr_leakage.attacks.presets import load_preset, preset_names
from flwr_leakage.defenses import Defense, GaussianNoise, GradientPruning
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import ResNet8
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, ThreatModel
from flwr_leakage.simulation.overrides import check_overrides

FOLDER = Path(__file__).parents[2] / "conf" / "attack"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "none")


def test_all_files_are_presets():
    assert preset_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_hydra_and_the_loader_build_the_same(name):
    with initialize_config_dir(str(FOLDER.parent), version_base=None):
        cfg = compose("config", [f"attack={name}"])
    built = instantiate(cfg.attack, _convert_="all")
    assert isinstance(built, Attack)
    assert built == preset(name)


def test_unknown_names_and_settings_fail():
    with pytest.raises(ValueError, match="dlg"):
        load_preset("dgl")
    node = OmegaConf.load(FOLDER / "dlg.yaml")
    node.restart = 3
    with pytest.raises(Exception, match="restart"):
        instantiate(node, _convert_="all")


@pytest.mark.parametrize(
    ("name", "overrides", "part", "value"),
    [
        ("huang", ["priors.total_variation.weight=0.05"], "priors[total_variation].weight", 0.05),
        ("huang", ["dtype=float64"], "dtype", "float64"),
        ("fedavg", ["attacks.euclidean.order.starts=2"], "attacks[cosine].order.starts", 2),
        ("strongest", ["~attacks.ordered"], "attacks",
         ["text", "patches", "analytic", "exact_batch", "feature_matching", "feature_recursion",
          "batch_images", "dense_gauss_newton", "gauss_newton", "posterior", "least_absolute",
          "finish", "denoising", "gauss_newton_multistart", "gauss_newton_smooth",
          "inverting_gradients"]),
        ("strongest", ["attacks.gauss_newton.products=5"], "attacks[gauss_newton].products", 5),
        ("idlg", ["+normalize_by=running"], "normalize_by", "running"),
    ],
)  # fmt: skip
def test_overrides_reach_every_part(name, overrides, part, value):
    found = load_preset(name, overrides)
    for step in part.replace("[", ".").replace("]", "").split("."):
        found = found[step] if isinstance(found, dict) else getattr(found, step)
    assert (list(found) if isinstance(found, dict) else found) == value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("priors.total_variaton.weight=0.05", r"no 'total_variaton' among \['total_variation'"),
        ("optimiser.iterations=3", r"no 'optimiser' among \[.*'optimizer'"),
        ("priors.total_variation.weight.x=1", r"no 'x' among \[\]"),
        ("optimizer.iterations=0", "iterations must be at least 1, got 0"),
        ("+restarts=3", "restarts"),
        ("box", "box"),
    ],
)
def test_a_wrong_override_is_an_error_that_names_it(override, said):
    with pytest.raises(ValueError, match=said):
        load_preset("huang", [override])


def test_defaults_lists_and_interpolations_work(tmp_path, monkeypatch):
    shutil.copytree(FOLDER.parent, tmp_path / "conf")
    (tmp_path / "conf" / "attack" / "mine.yaml").write_text(
        "defaults:\n  - idlg\n  - _self_\nmax_rows: ${attack.optimizer.history}\n"
        "optimizer:\n  history: 7\n"
    )
    monkeypatch.setattr(presets, "conf_dir", lambda: tmp_path / "conf")
    mine = load_preset("mine", ["optimizer.iterations=3"])
    assert (mine.optimizer.history, mine.max_rows, mine.optimizer.iterations) == (7, 7, 3)
    assert replace(mine, optimizer=load_preset("idlg").optimizer, max_rows=64) == load_preset(
        "idlg"
    )


def test_an_app_under_hydra_is_not_disturbed():
    with initialize_config_dir(str(FOLDER.parent), version_base="1.2"):
        running, version = GlobalHydra.instance().hydra, getbase()
        load_preset("huang", ["box=false"])
        with pytest.raises(ValueError, match="nothing"):
            load_preset("huang", ["nothing=1"])
        assert GlobalHydra.instance().hydra is running
        assert getbase() == version
        compose("config", ["attack=huang"])
    assert not GlobalHydra.instance().is_initialized()
    load_preset("huang")
    assert not GlobalHydra.instance().is_initialized()


def test_a_priors_weight_is_swept_from_the_command_line():
    override = "attack.priors.total_variation.weight=0.05"
    assert check_overrides(["-m", "attack=huang", override]) == ""
    assert "did you mean 'total_variation'?" in check_overrides(
        ["attack=huang", override.replace("variation", "variaton")]
    )
    with initialize_config_dir(str(FOLDER.parent), version_base=None):
        cfg = compose("config", ["attack=huang", override])
    built = instantiate(cfg.attack, _convert_="all")
    assert built == load_preset("huang", [override.removeprefix("attack.")])
    assert built.priors["total_variation"] == TotalVariation(0.05)


def test_lists_of_parts_are_refused_with_the_reason():
    inversion, strongest = GradientInversion(), Strongest({"inversion": GradientInversion()})
    # Set afterwards, past the tests' type checker, which users do not have.
    object.__setattr__(inversion, "priors", [TotalVariation(1.0)])
    with pytest.raises(ValueError, match="priors must be a mapping by name, got a list"):
        inversion.__post_init__()
    object.__setattr__(strongest, "attacks", [GradientInversion()])
    with pytest.raises(ValueError, match="attacks must be a mapping by name"):
        strongest.__post_init__()


def shortened(attack):
    if isinstance(attack, Strongest):
        attacks = {name: shortened(part) for name, part in attack.attacks.items()}
        return replace(attack, attacks=attacks)
    if isinstance(attack, GradientInversion):
        iterations = min(attack.optimizer.iterations, 300)
        return replace(attack, optimizer=replace(attack.optimizer, iterations=iterations))
    return attack


def relu_resnet(spec):
    torch.manual_seed(0)
    return ResNet8(spec.shape, spec.num_classes, width=16)


def pooled(spec):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(spec.shape[0], 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        nn.Linear(96, spec.num_classes),
    )


class Patched(nn.Module):
    """Four patches with trained positions, as in a vision transformer."""

    def __init__(self, spec):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(1, 16, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 4, 16))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, spec.num_classes))

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(tokens).mean(1)


CASES = {
    "undefended": (lambda spec: tiny_network(), Defense()),
    "linear network": (
        lambda spec: nn.Sequential(nn.Flatten(), nn.Linear(64, spec.num_classes)),
        Defense(),
    ),
    "ReLU network with BatchNorm": (relu_resnet, Defense()),
    "max pooling": (pooled, Defense()),
    "pruned": (lambda spec: tiny_network(), GradientPruning(0.5)),
    "noisy": (lambda spec: tiny_network(), GaussianNoise(0.1)),
    "patches": (Patched, Defense()),
}
"""What an attack may be made for: a network, and a defense that it adapts to."""


def solves(attack, network, defense, spec):
    """Whether the attack finds the label and halves the error of a grey image."""
    across = torch.linspace(0.1, 0.9, 8)
    image = spec.normalize((across[:, None] * across.sqrt()).reshape(1, *spec.shape))
    gradient_map = GradientMap(network)
    seen = observe(gradient_map, Batch(image, torch.tensor([1])), LocalSchedule(0.1))
    draws = Reproducible.from_seed(0)
    seen = replace(seen, update=defense.on_update(seen.update, draws))
    (result,) = attack(AttackJob(gradient_map, spec, [seen], ThreatModel()))
    if result.batch is None or result.batch.targets.tolist() != [1]:
        return False
    error = (result.batch.inputs - image).square().mean()
    grey = (spec.normalize(torch.full_like(image, 0.5)) - image).square().mean()
    return bool(error < 0.5 * grey)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "text"])
def test_every_preset_solves_a_small_case(name, spec):
    attack = shortened(preset(name))
    assert any(solves(attack, make(spec), defense, spec) for make, defense in CASES.values()), (
        f"{name} solves none of: {', '.join(CASES)}"
    )


def test_a_preset_that_adapts_solves_what_it_adapts_to(spec):
    make, defense = CASES["pruned"]
    assert solves(shortened(preset("pruning_aware")), make(spec), defense, spec)
