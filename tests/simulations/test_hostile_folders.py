"""A folder from a stranger is data: gadgets, links, bombs and texts against every command."""

import inspect
import os

import pytest

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.foreign import FOLDER_GROUPS, _calls, _packaged, path_arguments
from simulations.benchmarks.hostile_entries import TEXTS, entries
from simulations.benchmarks.hostile_folders import MOST, Outcome, attempt, honest_run, place
from simulations.benchmarks.hostile_gadgets import gadgets

if not hasattr(os, "fork"):
    pytest.skip("commands run in forks here", allow_module_level=True)

READERS = ["report", "compare", "export", "client"]
GADGETS = list(gadgets(conf_dir(), conf_dir()))
# Each text stands in a table of its own in the benchmark; here all stand in one folder.
ENTRIES = [name for name in entries() if not name.startswith(tuple(TEXTS))]


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return honest_run(tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture(scope="module")
def plain(honest, tmp_path_factory):
    """What the commands do with an honest folder: the measure of all others."""
    found = {}
    for verbs in ((*READERS, "attack-kept"), ("attack-kept",)):
        made = place(tmp_path_factory.mktemp("plain"), honest, "none")
        found[verbs] = attempt(verbs, made.run, made.foreign, made.ran, 120, honest)
        assert "1 round attacked" in found[verbs].output
        assert _harmless(found[verbs], found[verbs])
    return found


def _harmless(outcome: Outcome, plain: Outcome) -> bool:
    """Nothing ran, no file outside was opened, memory is bounded, and no text left alive."""
    assert not outcome.ran, outcome.output
    assert not outcome.opened, outcome.output
    assert outcome.peak - plain.peak < MOST, outcome.output
    assert not outcome.alive, outcome.output
    assert outcome.ended == "in order", outcome.output
    return True


@pytest.mark.parametrize("name", GADGETS)
def test_a_config_of_a_folder_calls_nothing(name, honest, plain, tmp_path):
    made = place(tmp_path, honest, f"gadget: {name}")
    verbs = ("attack-kept",)
    assert _harmless(attempt(verbs, *vars(made).values(), 120, honest), plain[verbs])


@pytest.mark.parametrize("name", ENTRIES)
def test_what_lies_in_a_folder_is_bounded_and_inside_of_it(name, honest, plain, tmp_path):
    made = place(tmp_path, honest, f"entry: {name}")
    verbs = (*READERS, "attack-kept")
    assert _harmless(attempt(verbs, *vars(made).values(), 120, honest), plain[verbs])


@pytest.mark.parametrize("where", ["in settings", "in records"])
def test_texts_are_obeyed_by_no_program_that_shows_them(where, honest, plain, tmp_path):
    made = place(tmp_path, honest, "none")
    for name in TEXTS:
        entries()[f"{name} {where}"](made.run, made.foreign)
    verbs = (*READERS, "attack-kept")
    assert _harmless(attempt(verbs, *vars(made).values(), 120, honest), plain[verbs])


@pytest.mark.parametrize("name", TEXTS)
def test_a_folder_may_be_named_anything(name, honest, plain, tmp_path):
    made = place(tmp_path, honest, f"entry: {name} as a folder")
    verbs = ("export", "client")
    assert _harmless(attempt(verbs, *vars(made).values(), 120, honest), plain[("attack-kept",)])


def test_arguments_that_name_a_place_are_annotated_as_paths():
    """Else a folder's config could name one outside of it."""
    words = ("path", "root", "folder", "dir", "file", "backbone", "weights", "cache")
    targets = {
        section["_target_"]
        for group, content in _packaged()
        if group in FOLDER_GROUPS
        for _, _, section in _calls(content)
        if "_target_" in section
    }
    assert len(targets) > 100
    named = {
        (target, name)
        for target in targets
        for name in inspect.signature(_found(target)).parameters
        if any(word in name for word in words)
    }
    told = {(target, name) for target in targets for name in path_arguments(target)}
    # Names within a root: the loader itself refuses what leads out of it.
    within = {
        ("flwr_leakage.data.image_folder", "train_folder"),
        ("flwr_leakage.data.image_folder", "test_folder"),
    }
    assert named - within <= told
    assert ("flwr_leakage.metrics.Lpips", "backbone") in told


def _found(target):
    import hydra

    return hydra.utils.get_object(target)
