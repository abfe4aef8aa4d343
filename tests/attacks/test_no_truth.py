"""No code path of an attack reaches the truth."""

import ast
import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from attacked import observe, preset

import flwr_leakage.attacks
from flwr_leakage.attacks import LBFGS, AttackJob, GradientInversion
from flwr_leakage.attacks.finish import Denoising, Finish
from flwr_leakage.attacks.presets import preset_names
from flwr_leakage.records import Batch, Disclosure, LocalSchedule, ThreatModel

SOURCES = sorted(Path(flwr_leakage.attacks.__file__).parent.rglob("*.py"))


class Poisoned(Disclosure):
    """A disclosure that must not be read."""

    def __init__(self):
        pass

    @property
    def targets(self):
        raise AssertionError("an attack read targets that its threat model does not grant")

    @property
    def statistics(self):
        raise AssertionError("an attack read statistics that its threat model does not grant")


@pytest.mark.parametrize(
    "threat",
    [ThreatModel(batch_norm=knowledge) for knowledge in ("none", "running", "derived")],
    ids=lambda threat: threat.batch_norm,
)
def test_an_attack_reads_nothing_that_is_not_granted(threat, gradient_map, spec, observations):
    attack = GradientInversion(optimizer=LBFGS(iterations=3), batching="loop")
    earlier = replace(observations[1], disclosed=Poisoned())
    poisoned = replace(observations[0], disclosed=Poisoned(), earlier=(earlier,))
    clean = replace(observations[0], earlier=(observations[1],))
    found = [attack(AttackJob(gradient_map, spec, [seen], threat))[0] for seen in (poisoned, clean)]
    assert torch.equal(found[0].batch.inputs, found[1].batch.inputs)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_infers_labels_without_reading_them(name, gradient_map, spec, images):
    batch = Batch(images[:1], torch.tensor([2]))
    seen = replace(observe(gradient_map, batch, LocalSchedule(0.1)), disclosed=Poisoned())
    attack = preset(name)
    for part in getattr(attack, "attacks", {name: attack}).values():
        if isinstance(part, Denoising):
            continue  # it takes no job of its own
        if isinstance(part, Finish):
            part = part.attack
        if isinstance(part, GradientInversion):
            optimizer = replace(part.optimizer, iterations=2)
            part = replace(part, optimizer=optimizer, batching="loop")
        results = part(AttackJob(gradient_map, spec, [seen], ThreatModel(), max_seconds=1.0))
        assert "does not grant" not in results[0].error


@pytest.mark.parametrize("name", preset_names())
def test_an_attack_takes_nothing_but_what_a_server_sees(name):
    parameters = list(inspect.signature(type(preset(name)).__call__).parameters)
    assert parameters == ["self", "job", "progress"]
    assert [field.name for field in fields(AttackJob)] == [
        "gradient_map", "spec", "observations", "threat", "seed", "restarts", "max_seconds",
        "posed",  # what `pose` makes of the four above
    ]  # fmt: skip


def names_of(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_sources_name_no_truth_and_read_disclosures_in_one_place(path):
    names = set(names_of(ast.parse(path.read_text())))
    assert not names & {"Exposure", "Truth", "TruthSource", "private", "defended"}
    assert not any(
        name.startswith(f"flwr_leakage.{room}")
        for name in names
        for room in ("metrics", "data", "flower", "tracking", "defenses")
    )
    assert ("disclosed" in names) == (path.name == "problem.py") or path.name == "one_call.py"
