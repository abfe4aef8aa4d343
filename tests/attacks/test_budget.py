"""CPU seconds of an attack, shared out."""

import math
import time

from flwr_leakage.attacks.budget import UNLIMITED, Budget


def test_a_part_is_a_share_of_what_is_left():
    budget = Budget.of(1000.0)
    part = budget.part(0.25)
    assert time.process_time() < part.ends < budget.ends
    assert 200 < part.left <= 250
    assert UNLIMITED.part(0.5).left == math.inf


def test_only_what_fits_is_affordable():
    assert Budget.of(1000.0).affordable(50, 1.0) == 50
    assert 900 < Budget.of(1000.0).affordable(5000, 1.0) <= 1000
    assert UNLIMITED.affordable(7, 1e9) == 7
    assert Budget.of(0.0).affordable(5, 1.0) == 0
    assert UNLIMITED.affordable(5, 0.0) == 5
