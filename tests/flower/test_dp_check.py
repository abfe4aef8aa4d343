"""The check of Flower's privacy settings against Flower itself."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.client.mod import LocalDpMod as LegacyLocalDpMod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.server import strategy as legacy
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedMedian,
)
from torch import nn

from flwr_leakage.defenses.accounting import canary, canary_epsilon, gaussian_epsilon
from flwr_leakage.flower import InlineGrid, check_privacy
from flwr_leakage.flower.dp_check import Finding

SHIPPED = {"clipping_norm": 1.0, "sensitivity": 1e-4, "epsilon": 10.0, "delta": 1e-5}
"""The settings that a deployed platform ships."""


def about(findings: list[Finding], level: str) -> list[Finding]:
    return [f for f in findings if f.level == level]


@pytest.mark.parametrize("kind", [LocalDpMod, LegacyLocalDpMod])
def test_the_shipped_settings_protect_nothing(kind):
    finding, *_ = check_privacy(mods=[kind(**SHIPPED)], num_clients=10, num_rounds=1)
    assert (finding.level, finding.stated_epsilon, finding.delta) == ("weaker", 10.0, 1e-5)
    std = 1e-4 * math.sqrt(2 * math.log(1.25e5)) / 10
    assert finding.noise_multiplier == pytest.approx(std / 2)
    assert finding.epsilon == pytest.approx(gaussian_epsilon(2 / std, 1e-5))
    assert finding.epsilon > 8e8
    for part in ("LocalDpMod, weaker than it says", "2e+04 times less", "shows ε = 10", "57 dB"):
        assert part in str(finding)


def test_settings_that_fit_keep_what_they_say():
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=0.9, delta=1e-5)
    finding, *_ = check_privacy(mods=[mod], num_clients=10, num_rounds=1)
    assert finding.level == "guarantee"
    assert finding.epsilon < 0.9
    spent, *_ = check_privacy(mods=[mod], num_clients=10, num_rounds=50)
    assert spent.level == "weaker"
    assert spent.epsilon == pytest.approx(
        gaussian_epsilon(50**0.5 / finding.noise_multiplier, 1e-5)
    )


def test_the_formula_beyond_its_range_is_told():
    # At ε = 30 the classical σ is too small, even for the right sensitivity.
    mod = LocalDpMod(clipping_norm=0.5, sensitivity=1.0, epsilon=30.0, delta=1e-5)
    finding, *_ = check_privacy(mods=[mod], num_clients=10, num_rounds=1)
    assert finding.level == "weaker"
    assert finding.epsilon > 30
    assert "holds for ε < 1 only" in finding.message


@pytest.mark.parametrize(("setting", "value"), [("sensitivity", 0.0), ("delta", 0.0)])
def test_settings_that_mean_nothing_are_told(setting, value):
    mod = LocalDpMod(**SHIPPED | {setting: value})
    findings = check_privacy(mods=[mod], num_clients=10, num_rounds=1)
    assert about(findings, "none")
    assert not about(findings, "guarantee")


def _release(mod, dimension=(200, 100), index=None, clients=1):
    """What the clients of an app with this mod send; each plays a canary of its own."""
    app = ClientApp()

    @app.train(mods=[mod])
    def train(message, context):
        state = message.content["arrays"].to_torch_state_dict()
        moved = canary(state, 5.0, context.node_config["partition-id"], seed=1)
        content = {
            "arrays": ArrayRecord({k: v + moved[k] for k, v in state.items()}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    grid = InlineGrid(app, clients)
    torch.manual_seed(0)
    state = nn.Linear(*dimension, bias=False).state_dict()
    content = {"arrays": ArrayRecord(state), "config": ConfigRecord({"server-round": 1})}
    replies = grid.send_and_receive(
        [Message(RecordDict(content), node, MessageType.TRAIN) for node in grid.get_node_ids()]
    )
    return state, [
        reply.content["arrays"].to_torch_state_dict()["weight"] - state["weight"]
        for reply in replies
    ]


def test_the_noise_is_what_the_mod_really_adds():
    np.random.seed(0)
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=0.5, epsilon=2.0, delta=1e-3)
    state, (update,) = _release(mod)
    clipped = canary(state, 1.0, 0, seed=1)["weight"]
    measured = float((update - clipped).std())
    finding, *_ = check_privacy(mods=[mod], num_clients=1, num_rounds=1)
    assert finding.noise_multiplier * 2 == pytest.approx(measured, rel=0.02)


def test_canaries_in_flower_show_what_the_settings_give():
    """Each client plays a canary; the sum of what they send is as private as 1/(σ√k) says."""
    np.random.seed(0)
    count, std = 40, 1 / 40**0.5
    sensitivity = std * 2 / math.sqrt(2 * math.log(1.25e5))
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=sensitivity, epsilon=2.0, delta=1e-5)
    state, updates = _release(mod, clients=count)
    total = torch.stack(updates).sum(0).flatten().double()
    directions = torch.stack(
        [canary(state, 1.0, i, seed=1)["weight"].flatten().double() for i in range(count)]
    )
    estimate = canary_epsilon(directions @ total / total.norm(), total.numel())
    low, high = (gaussian_epsilon(mu, 1e-5) for mu in (0.6, 1.4))
    assert low < estimate.epsilon < high


FIXED = DifferentialPrivacyClientSideFixedClipping
WRAPPERS = {
    "client, fixed": (lambda s: FIXED(s, 1.0, 0.5, 20), [fixedclipping_mod]),
    "server, fixed": (lambda s: DifferentialPrivacyServerSideFixedClipping(s, 1.0, 0.5, 20), []),
    "client, adaptive": (
        lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 1.0, 20),
        [adaptiveclipping_mod],
    ),
    "server, adaptive": (
        lambda s: DifferentialPrivacyServerSideAdaptiveClipping(s, 1.0, 20),
        [],
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_central_privacy_is_none_against_the_server(name):
    wrap, mods = WRAPPERS[name]
    findings = check_privacy(wrap(FedAvg()), mods, num_clients=20, num_rounds=10)
    assert any("against the server" in f.message for f in about(findings, "none"))
    (kept,) = about(findings, "guarantee")
    # An adaptive clip's noisy count is paid for by less noise on the update: together the same.
    assert kept.noise_multiplier == pytest.approx(1.0)
    assert kept.epsilon == pytest.approx(gaussian_epsilon(10**0.5, 1e-5))
    assert ("adaptive" in name) == any("clip shrinks" in f.message for f in findings)


def test_the_legacy_strategies_are_read_alike():
    wrapper = legacy.DifferentialPrivacyServerSideFixedClipping(legacy.FedAvg(), 1.0, 0.5, 20)
    (kept,) = about(check_privacy(wrapper, num_clients=20, num_rounds=10), "guarantee")
    assert kept.epsilon == pytest.approx(gaussian_epsilon(10**0.5, 1e-5))


def test_fewer_clients_than_the_noise_is_made_for_are_told():
    wrapper = FIXED(FedAvg(fraction_train=0.1), 1.0, 0.5, 100)
    findings = check_privacy(wrapper, [fixedclipping_mod], num_clients=100, num_rounds=1)
    (weaker,) = about(findings, "weaker")
    assert weaker.noise_multiplier == pytest.approx(0.1)
    assert "10 clients are asked: the noise is 10 times too small" in weaker.message


@pytest.mark.parametrize(
    ("inner", "averages"), [(FedAvg(), True), (FedMedian(), False), (FedAdam(), False)]
)
def test_noise_for_an_average_needs_an_average(inner, averages):
    findings = check_privacy(FIXED(inner, 1.0, 0.5, 20), num_clients=20, num_rounds=1)
    assert averages != any("the strategy averages" in f.message for f in findings)


def test_mods_and_strategies_that_do_not_fit_are_told():
    findings = check_privacy(
        FIXED(FedAvg(), 1.0, 0.5, 20), [adaptiveclipping_mod], num_clients=20, num_rounds=1
    )
    assert any("AdaptiveClipping, got Diff" in f.message for f in about(findings, "condition"))


def test_an_app_without_noise_has_no_guarantee():
    for strategy, mods in [(FedAvg(), []), (None, [fixedclipping_mod])]:
        findings = check_privacy(strategy, mods, num_clients=20, num_rounds=1)
        assert findings[-1].level == "none"
        assert findings[-1].epsilon == math.inf
        assert "nothing that was checked adds noise" in str(findings[-1])


def test_flowers_adaptive_clip_runs_away_from_its_target():
    """The reason for the finding: all updates are clipped, and the clip shrinks still further.

    Andrew et al. (2021, equation 1) let it grow then, as no update lies below it.
    """
    wrapper = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.0, 4, 0.1)
    before = wrapper.clipping_norm
    wrapper._geometric_update(wrapper._noisy_fraction(4, 4))
    assert wrapper.clipping_norm < before
    wrapper._geometric_update(wrapper._noisy_fraction(0, 4))
    wrapper._geometric_update(wrapper._noisy_fraction(0, 4))
    assert wrapper.clipping_norm > before


@pytest.mark.parametrize(
    "settings", [{"num_clients": 0}, {"num_rounds": 0}, {"delta": 0.0}, {"delta": 1.0}]
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="got"):
        check_privacy(**{"num_clients": 1, "num_rounds": 1} | settings)
