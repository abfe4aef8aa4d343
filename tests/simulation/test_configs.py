"""Every config composes and builds; a mistyped key or value is an error that names it."""

import copy
import functools

import pytest
from audits import tiny_config
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from flwr_leakage._conf import conf_dir
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.scores.base import Score
from flwr_leakage.simulation import config
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError, to_config
from flwr_leakage.simulation.nodes import instantiate, instantiate_each
from flwr_leakage.simulation.overrides import check_overrides

NEED_FILES = {
    "npz",
    "image_folder",
    "imagenette",
    "mnist_npz",
    "fashion_mnist_npz",
    "cifar10_npz",
}
NEED_PUBLIC_DATA = {"instahide_inter"}
NEED_DATA = {"own_records"}
"""Scores that read the data set; see ``test_membership``."""
BUILT = {"defense", "self_attack", "gate", "attack", "partition", "strategy", "metric", "engine"}


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """A tiny config, which is composed once."""
    return tiny_config(tmp_path_factory.mktemp("config"), "score=gradient_norm")


@pytest.fixture
def tiny(composed, tiny_data):
    """A copy of it, which a test changes."""
    return changed(composed, f"dataset.root={tiny_data}")


def changed(composed, *overrides):
    """A copy with other values, of which Hydra's grammar says what they are."""
    composed = copy.deepcopy(composed)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        *path, last = override.key_or_group.split(".")
        section = functools.reduce(lambda node, key: node.setdefault(key, {}), path, composed)
        if override.is_delete():
            del section[last]
        else:
            section[last] = override.value()
    return composed


def _options(group):
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


GROUPS = {
    folder.name: _options(folder.name)
    for folder in sorted(conf_dir().iterdir())
    if folder.is_dir() and folder.name != "experiment"
}


@pytest.mark.parametrize("i", range(max(map(len, GROUPS.values()))))
def test_every_option_composes(i, tmp_path):
    """The i-th options of all groups in one config; a group that has fewer begins anew."""
    chosen = {group: options[i % len(options)] for group, options in GROUPS.items()}
    overrides = [f"{group}={option}" for group, option in chosen.items()]
    with initialize_config_dir(str(conf_dir()), version_base=None):
        cfg = compose("config", [*overrides, f"run_dir={tmp_path}"])
    missing = OmegaConf.missing_keys(cfg)
    assert ("dataset.root" in missing) == (chosen["dataset"] in NEED_FILES)
    for key in missing:
        assert key.startswith("dataset.")
        OmegaConf.update(cfg, key, "x")
    composed = to_config(cfg, {})
    for group, option in chosen.items():
        if GROUPS[group].index(option) != i:
            continue
        if option in NEED_PUBLIC_DATA:
            with pytest.raises(ConfigError, match="public set"):
                instantiate(composed, group)
        elif group == "score" and option not in NEED_DATA:
            instantiate_each(composed, group, Score)
        elif group in BUILT and composed[group]:
            instantiate(composed, group)


@pytest.mark.parametrize("name", _options("experiment"))
def test_every_experiment_composes(name, tmp_path):
    assert config.compose([f"experiment={name}"], str(tmp_path))["choices"]["experiment"] == name


@pytest.mark.parametrize("model", _options("model"))
def test_every_model_builds_an_experiment(tmp_path, model):
    of_texts = {"text_transformer": "python_docs", "text_decoder": "python_docs_next_token"}
    data = of_texts.get(model, "embedded_mnist")
    experiment = build(tiny_config(tmp_path, f"dataset={data}", f"model={model}"))
    assert sum(p.numel() for p in experiment.network.parameters()) > 0


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("num_round=3", "did you mean 'num_rounds'?"),
        ("client.learning_rat=3", "did you mean 'learning_rate'?"),
        ("defense=prunning", "did you mean 'pruning'?"),
        ("attack.attack=3", "did you mean 'attacks'?"),
        ("defense=none,gausian", "did you mean 'gaussian'?"),
        ("foo", "an override is group=option or key=value, got 'foo'; `flwr-leakage list`"),
        ("pruning", "do you mean defense=pruning?"),
        ("experiment=i2f_bound", "the papers' experiments run from a clone of the project only"),
    ],
)
def test_a_mistyped_override_names_what_exists(argument, said):
    assert said in check_overrides([argument])


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "defense=none,pruning,gaussian"],
        ["defense=pruning", "defense.prune_ratio=0.5"],
        ["experiment=single_digit", "engine=ray", "engine.num_cpus=2"],
        ["attack=none", "+attack.count=2", "hydra.run.dir=/x", "--cfg", "job"],
        ["selection.clients=[0,1]"],
        *([f"dataset={option}", "dataset.root=x"] for option in sorted(NEED_FILES)),
        ["dataset=npz", "dataset.root=x", "dataset.name=y"],
    ],
)
def test_what_is_right_passes(arguments):
    assert check_overrides(arguments) == ""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_clients=ten", "num_clients"),
        ("num_rounds=0", "num_rounds must be at least 1, got 0"),
        ("client.learning_rate=-1", "client: learning_rate must be positive"),
        ("client.num_examples=0", "client.num_examples"),
        ("threat.labels=knwon", "threat.labels must be 'known' or 'inferred', got 'knwon'"),
        ("model.batch_norm=eval", "model.batch_norm must be 'batch' or 'running', got 'eval'"),
        ("model.initialization=xaver", "model.initialization must be .* or 'xavier', got 'xaver'"),
        ("selection.every=0", "selection: every must be at least 1"),
        ("partition.num_partitions=2", "partition must give one part"),
        ("server.test_samples=0", "server.test_samples must be at least 1"),
        ("client.num_examples=21", "client.num_examples must be at most 20, .* got 21"),
        ("selection.clients=[1,3]", r"selection.clients must name .* 0 … 2, .* got \[1, 3\]"),
        ("selection.clients=[]", "selection.clients must name some of the clients 0 … 2"),
        ("threat.rounds=2", "threat.rounds must be 1 unless client.same_samples=true.* got 2"),
        ("num_clients=2.5", "num_clients must be an integer, got 2.5"),
        ("seed=99999999999999999999", "seed must lie in .*, got 99999999999999999999"),
        ("client.num_threads=0", "client.num_threads must be at least 1, got 0"),
        ("client.max_samples=0", "client.max_samples must be at least 1, got 0"),
        ("client.learning_rate=nan", "client.learning_rate must be a number, got nan"),
        ("client.same_samples=3", "client.same_samples must be true or false, got 3"),
        ("server.num_threads=0", "server.num_threads must be at least 1, got 0"),
        ("server.attack_max_seconds=0", "server.attack_max_seconds must be positive or null"),
        ("server.what_if_max_seconds=0", "server.what_if_max_seconds must be positive or null"),
        ("server.attack_workers=two", "server.attack_workers: it must be a number or ray"),
        ("server.attack_workers=0", "server.attack_workers must be at least 1, got 0"),
        ("server.wait_seconds=-1", "server.wait_seconds must be finite and ≥ 0, got -1"),
        ("scoring.send=maybe", "scoring.send must be true or false, got 'maybe'"),
        ("selection.clients=[a]", "selection.clients.0 must be an integer, got 'a'"),
        ("attack.optimizer.iterations=1e3", "attack.optimizer.iterations must be an integer"),
        ("strategy.fraction_train=2.0", "strategy.fraction_train must lie in .*, got 2.0"),
        ("strategy.fraction_train=0", "strategy.fraction_train must lie in .*, got 0"),
        ("strategy.fraction_evaluate=-1", "strategy.fraction_evaluate must lie in .*, got -1"),
        ("strategy.min_train_nodes=9", "strategy.min_train_nodes must be at most num_clients=3"),
        ("strategy.min_available_nodes=4", "strategy.min_available_nodes must be at most num_cl"),
        ("server.wait_seconds=inf", "server.wait_seconds must be finite and ≥ 0, got inf"),
        ("server.attack_max_seconds=inf", "server.attack_max_seconds must be positive or null"),
        ("~client.num_examples", "client.num_examples must be given"),
        ("defense._target_=flwr_leakage.nothing", "defense._target_ cannot be imported"),
        ("+engine.name=ray", "there is no key 'name' in 'engine'"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_key(tiny, override, said):
    with pytest.raises(ConfigError, match="(?s)" + said):
        build(changed(tiny, override))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["strategy=fedadam", "strategy.eta=nan"], "strategy.eta must be a number, got nan"),
        (["strategy=fedadam", "strategy.eta=inf"], "strategy.eta must be finite, got inf"),
        (["defense=pruning", "defense.prune_ratio=abc"], "defense.prune_ratio must be a number"),
        (
            ["strategy=dp_fixed_clipping", "strategy.strategy.fraction_train=2"],
            "strategy.strategy.fraction_train must lie in",
        ),
        (["partition=sizes", "partition.sizes=[1,2]"], "one size for each of 3 clients, got 2"),
        (["partition=sizes", "partition.sizes=[1,2,3,4]"], "one size for each of 3 .* got 4"),
        (["engine=ray", "engine.client_cpus=1.5"], "engine.client_cpus must be an integer"),
    ],
)
def test_a_wrong_value_of_another_option_names_its_key(tiny_data, overrides, said):
    with pytest.raises(ConfigError, match=said):
        build(tiny_config(tiny_data, *overrides))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+foo=1", "there is no key 'foo' at the top level"),
        ("+sead=1", r"at the top level \(did you mean 'seed'\?\)"),
        *(
            (f"+{section}.foo=1", f"there is no key 'foo' in '{section}'")
            for section in (
                "dataset", "partition", "model", "model.network", "strategy", "defense", "scoring",
                "attack", "attack.optimizer", "threat", "selection", "metric", "metric.lpips",
                "client", "server", "engine",
            )
        ),
        ("+node=5", "there is no key 'node' at the top level"),
        ("+node.remark=hi", "there is no key 'node' at the top level"),
        ("+score.foo=1", "score.foo must be Score, got 1"),
        ("+tracker.foo=1", "tracker must be a section with a _target_"),
    ],
)  # fmt: skip
def test_a_key_that_nobody_reads_is_an_error_that_names_it(tiny, override, said):
    with pytest.raises(ConfigError, match=said):
        build(changed(tiny, override))


def test_the_names_of_the_chosen_options_are_no_section(tiny_data):
    with pytest.raises(ConfigError, match="there is no key 'choices' at the top level"):
        tiny_config(tiny_data, "+choices.foo=1")


LBFGS = "flwr_leakage.attacks.LBFGS"
NONE = "flwr_leakage.defenses.NoDefense"
IID = "flwr_leakage.data.IidPartition"


@pytest.mark.parametrize(
    ("key", "target", "expected"),
    [
        ("defense", LBFGS, "Defense, "),
        ("score.gradient_norm", LBFGS, r"Score, called with \(client, seed\), "),
        ("attack", NONE, r"Attack, called with \(job\), "),
        ("attack", IID, r"Attack, called with \(job\), "),
        ("strategy", LBFGS, "Strategy, "),
        ("partition", LBFGS, r"Partition, called with \(labels, generator\), "),
        ("metric", LBFGS, "Evaluator, "),
        ("scoring", LBFGS, "ScorePlan, "),
        ("threat", LBFGS, "ThreatModel, "),
        ("selection", LBFGS, r"Selection, called with \(observations\), "),
        ("tracker", LBFGS, "Tracker, "),
        ("dataset", NONE, "tuple, "),
        ("model.network", LBFGS, "Module, "),
    ],
)
def test_a_target_of_another_kind_is_told_by_its_key(tiny, key, target, expected):
    config = changed(tiny, f"{key}={{_target_: {target}}}")
    got = target.rpartition(".")[2]
    with pytest.raises(ConfigError, match=f"^{key}._target_ must give {expected}got .*{got}"):
        build(config)


def test_what_a_function_returns_is_of_the_kind_too(tiny):
    config = {**tiny, "defense": {"_target_": "builtins.len", "_args_": [[1, 2]]}}
    with pytest.raises(
        ConfigError, match=r"^defense\._target_ must give Defense, got builtins\.int"
    ):
        build(config)


def test_a_key_that_a_class_reads_may_be_added_to_its_section(tiny):
    built = build(changed(tiny, "+attack.max_rows=3"))
    assert built.attack.attack.max_rows == 3


def test_a_model_needs_no_more_than_its_network(tiny):
    experiment = build(changed(tiny, "~model.initialization", "~model.batch_norm"))
    assert experiment.gradient_map.batch_norm == "running"


def test_what_a_class_declares_has_its_defaults_there(tiny):
    assert build(changed(tiny, "~threat.labels")).threat.labels == "inferred"
    sent = build(tiny).client_audit().score_plan.send
    assert sent is tiny["scoring"]["send"] is True


def test_attacks_are_tried_in_the_order_of_their_file(tiny_data):
    chosen = ["attack=strongest", "server.attack_max_seconds=9"]
    built = build(config.compose(chosen, str(tiny_data)))
    assert list(built.attack.attack.attacks) == list(load_preset("strongest").attacks)
    assert built.settings.server.attack_max_seconds == 9


def test_the_same_config_is_built_once_and_any_other_anew(tiny):
    first = build(tiny)
    assert build(dict(reversed(tiny.items()))) is first
    assert build({**tiny, "run_dir": "elsewhere"}) is not first


def test_a_client_that_the_partition_gives_too_few_samples_is_named(tiny_data):
    skewed = ["partition=dirichlet", "partition.alpha=0.05", "client.num_examples=20"]
    with pytest.raises(ConfigError, match=r"at most \d+, .* gives client \d, got 20"):
        build(tiny_config(tiny_data, *skewed))


@pytest.mark.parametrize("knowledge", ["exact", "derived", "running"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (["model=lenet"], "model without BatchNorm"),
        (["model=resnet8", "model.batch_norm=running"], "model.batch_norm=running"),
    ],
)
def test_statistics_that_no_client_uses_cannot_be_known(tiny_data, knowledge, model, said):
    with pytest.raises(ConfigError, match=f"threat.batch_norm must be none .*{said}.*{knowledge}"):
        build(tiny_config(tiny_data, *model, f"threat.batch_norm={knowledge}"))


def test_statistics_that_clients_use_can_be_known(tiny_data):
    chosen = ["model=resnet8", "model.batch_norm=batch", "threat.batch_norm=exact"]
    assert build(tiny_config(tiny_data, *chosen)).threat.batch_norm == "exact"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["defense=mixup", "client.batch_size=4"], "defense that encodes batches"),
        (["defense=pruning_instahide", "client.batch_size=4"], "defense that encodes batches"),
        (["client.batch_size=2"], "client.batch_size=2 and client.num_examples=4"),
    ],
)
def test_rounds_that_differ_are_not_attacked_jointly(tiny_data, overrides, said):
    rounds = ["threat.rounds=2", "client.same_samples=true", "client.num_examples=4"]
    with pytest.raises(ConfigError, match=f"threat.rounds must be 1 .*{said}"):
        build(tiny_config(tiny_data, *rounds, *overrides))


def test_a_data_set_without_its_folder_is_an_error_that_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"dataset.root must be given: dataset.root=VALUE"):
        tiny_config(tmp_path, "dataset=cifar10_npz")


def test_a_defense_that_does_not_fit_the_data_is_refused_before_training(tiny_data):
    with pytest.raises(ConfigError, match="defense"):
        build(tiny_config(tiny_data, "defense=mixup"))
