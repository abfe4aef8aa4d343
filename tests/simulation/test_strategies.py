"""Flower's strategies are refused before a run where they would not do what they promise."""

import pytest
from audits import tiny_config

from flwr_leakage._conf import conf_dir
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError

OPTIONS = sorted(path.stem for path in (conf_dir() / "strategy").glob("*.yaml"))
FEWEST = {"krum": 5, "multikrum": 6, "bulyan": 7, "fedtrimmedavg": 5}
"""Clients that the options' own settings need; one is enough for the others."""


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_built_with_the_fewest_clients_and_refused_below(tiny_data, option):
    fewest = FEWEST.get(option, 1)
    build(tiny_config(tiny_data, f"strategy={option}", f"num_clients={fewest}"))
    if fewest > 1:
        few = tiny_config(tiny_data, f"strategy={option}", f"num_clients={fewest - 1}")
        with pytest.raises(ConfigError, match=f"strategy.*, of the {fewest - 1} of num_clients"):
            build(few)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("krum num_clients=3", "num_malicious_nodes=1 takes at least 2 · 1 [+] 3 = 5 clients"),
        ("krum num_clients=8 strategy.num_malicious_nodes=3", "at least 2 · 3 [+] 3 = 9 clients"),
        ("krum num_clients=9 strategy.num_malicious_nodes=-1", "num_malicious_nodes must be ≥ 0"),
        ("multikrum num_clients=6 strategy.num_nodes_to_select=6", r"must lie in \[1, 5\].* 6"),
        ("multikrum num_clients=6 strategy.num_nodes_to_select=0", r"must lie in \[1, 5\].* 0"),
        ("bulyan num_clients=8 strategy.fraction_train=0.5", "7 clients, of the 4 of num_cl"),
        ("fedtrimmedavg num_clients=4", "beta must be 0 or at least 1/4, as it trims nobody"),
        ("fedadam strategy.tau=0", "tau must be positive, got 0"),
        ("fedadam strategy.beta_1=1.5", r"beta_1 must lie in \[0, 1\), got 1.5"),
        ("fedadam strategy.beta_2=1", r"beta_2 must lie in \[0, 1\), got 1"),
        ("fedadagrad strategy.eta=-1", "eta must be positive, got -1"),
        ("fedyogi strategy.eta_l=0", "eta_l must be positive, got 0"),
        ("fedavgm strategy.server_momentum=2", "server_momentum must lie in"),
        ("fedavgm strategy.server_learning_rate=0", "server_learning_rate must be positive"),
        ("qfedavg strategy.q=-3", "q must be ≥ 0, got -3"),
        ("qfedavg strategy.client_learning_rate=0", "client_learning_rate must be positive"),
        ("qfedavg strategy.train_loss_key=other", "must be train-loss, which the clients send"),
        ("fedavg +strategy.weighted_by_key=size", "must be num-examples or train-loss, which"),
        ("fedavg +strategy.arrayrecord_key=w", "arrayrecord_key must be arrays, which"),
        ("fedavg +strategy.configrecord_key=c", "configrecord_key must be config, which"),
        ("fedmedian strategy.min_train_nodes=-4", "min_train_nodes must be ≥ 0, got -4"),
        ("dp_fixed_clipping strategy.num_sampled_clients=9", "must be at most 3, as the noise is"),
        (
            "dp_fixed_clipping strategy.strategy.fraction_train=0.4",
            "num_sampled_clients must be at most 1, as the noise is divided by it, got 3",
        ),
        ("dp_fixed_clipping strategy.strategy.min_train_nodes=-1", "min_train_nodes must be ≥ 0"),
    ],
)
def test_what_a_strategy_cannot_do_is_an_error_before_the_run(tiny_data, overrides, said):
    with pytest.raises(ConfigError, match=f"strategy.*{said}"):
        build(tiny_config(tiny_data, *f"strategy={overrides}".split()))
