"""Random states are put back where a part that is not this package's own may draw."""

import random

import pytest
from observed import Memory

from flwr_leakage.attacks import Analytic
from flwr_leakage.audit import Selection, ServerAudit
from flwr_leakage.audit.progress import SilentProgress
from flwr_leakage.flower.undisturbed import guarded
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker


class Own(Selection):
    """Anybody's."""


class Shown(SilentProgress):
    """Anybody's."""


def audit(folder, **settings):
    spec, schedule = InputSpec((1, 8, 8), 2), LocalSchedule(0.1)
    tracker = settings.pop("tracker", None) or JsonlTracker(folder)
    model = GradientMap(LeNet(spec.shape, 2))
    return ServerAudit(model, spec, schedule, tracker, **settings)


@pytest.mark.parametrize(
    "settings",
    [{"attack": Analytic()}, {"tracker": Memory()}, {"selection": Own()}, {"progress": Shown()}],
    ids=lambda settings: next(iter(settings)),
)
def test_what_is_foreign_may_draw(tmp_path, settings):
    state = random.getstate()
    guarded(audit(tmp_path, **settings), 1, random.random)
    assert random.getstate() == state


def test_what_is_our_own_costs_no_copies_of_the_states(tmp_path, monkeypatch):
    monkeypatch.setattr("random.getstate", lambda: pytest.fail("a state was copied"))
    assert guarded(audit(tmp_path), 1, lambda: 3) == 3
