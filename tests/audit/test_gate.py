"""What a gate lets pass: limits hold for the riskiest sample with its error bar."""

import pytest

from flwr_leakage.audit.attack import Attempt
from flwr_leakage.audit.evaluate import Outcome
from flwr_leakage.audit.gate import Gate
from flwr_leakage.audit.self_attack import SelfAttacked
from flwr_leakage.defenses import GaussianNoise, MixUp
from flwr_leakage.records import Measurement

LEAKS = "larger leaks more"


def score(*values, direction=LEAKS, errors=()):
    return Measurement("risk", values, "1", direction, errors=errors)


def attacked(psnr, blind=12.0, problem=""):
    metrics = (Measurement("psnr", psnr, "dB", LEAKS),
               Measurement("blind_psnr", (blind,) * len(psnr), "dB", ""))  # fmt: skip
    return SelfAttacked(Attempt([], 0.0, 0.0), Outcome(metrics, ()), problem)


@pytest.mark.parametrize(
    ("measured", "passes"),
    [
        (score(1.0, 2.9), True),
        (score(1.0, 3.1), False),
        (score(1.0, 2.9, errors=(0.0, 0.2)), False),
        (score(5.0, 3.1, direction="larger is safer"), True),
        (score(5.0, 2.9, direction="larger is safer"), False),
        (score(5.0, 3.1, direction="larger is safer", errors=(0.0, 0.2)), False),
        (score(5.0, 2.9, direction="smaller is safer"), False),
        (score(None, None), False),
        (score(1.0, None), False),
        (score(1.0, direction=""), False),
    ],
)
def test_a_limit_of_a_score(measured, passes):
    assert Gate(scores={"risk": 3.0}).judge([measured], None).passes is passes


def test_what_was_not_measured_passes_only_where_the_owner_says_so():
    for given in ([], [score(None)]):
        assert not Gate(scores={"risk": 3.0}).judge(given, None).passes
        assert Gate(scores={"risk": 3.0}, unmeasured="send").judge(given, None).passes
    assert not Gate(scores={"risk": 3.0}, unmeasured="send").judge([score(4.0, None)], None).passes
    unexplained = Gate(scores={"risk": 3.0}).judge([score(1.0)], None, ["off by 0.4"])
    assert not unexplained.passes
    assert "off by 0.4" in unexplained.reasons[0]


@pytest.mark.parametrize(
    ("gate", "psnr", "passes"),
    [
        (Gate(psnr=20.0), (15.0, 19.0), True),
        (Gate(psnr=20.0), (15.0, 21.0), False),
        (Gate(grade="partly"), (14.0, 15.0), True),
        (Gate(grade="partly"), (14.0, 19.0), False),
        (Gate(grade="nothing"), (11.0, 14.0), False),
        (Gate(grade="recognisable"), (19.0, 30.0), True),
        (Gate(grade="recognisable"), (19.0, 50.0), False),
    ],
)
def test_a_limit_of_the_self_attack(gate, psnr, passes):
    assert gate.judge([], attacked(psnr)).passes is passes


def test_an_attack_without_an_answer_is_no_evidence_of_safety():
    failed = attacked((None,), problem="no linear layer")
    judged = Gate(psnr=20.0).judge([], failed)
    assert not judged.passes
    assert "no linear layer" in judged.reasons[0]
    assert not Gate(psnr=20.0).judge([], None).passes


@pytest.mark.usefixtures("unchecked")
def test_settings_that_cannot_be_meant():
    with pytest.raises(ValueError, match="needs a limit"):
        Gate()
    with pytest.raises(ValueError, match="MixUp, which changes samples"):
        Gate(psnr=20.0, stronger=(GaussianNoise(0.1), MixUp()))
    with pytest.raises(ValueError, match="grade must be one of"):
        Gate(grade="exact")
