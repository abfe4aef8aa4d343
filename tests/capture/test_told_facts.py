"""Facts that a stranger told: whatever it writes is a training, or a ValueError."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flwr_leakage.audit import ClientNote
from flwr_leakage.capture import TrainingFacts, differences
from flwr_leakage.records import InputSpec, LocalSchedule

FACTS = TrainingFacts(
    "SGD", 0.1, num_steps=2, batch_size=4, loss="cross_entropy", shape=(1, 6, 6), num_classes=3,
    mean=(0.5,), std=(0.5,),
)  # fmt: skip
CONTENT = json.loads(json.dumps(FACTS.to_dict()))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31 - 1, 2**63, 10**400, -(10**400)])
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800")
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
CHANGES = st.dictionaries(st.sampled_from(sorted(CONTENT)), ANYTHING, min_size=1, max_size=3)


def read(content):
    note = json.loads(ClientNote(3).to_text()) | {"training": json.dumps(content)}
    return ClientNote.from_text(json.dumps(note)).training


def test_what_is_told_is_read():
    assert read(CONTENT) == FACTS


@given(CHANGES, st.sets(st.sampled_from(sorted(CONTENT)), max_size=2))
def test_facts_are_of_a_training_or_refused(changes, missing):
    content = {name: value for name, value in (CONTENT | changes).items() if name not in missing}
    try:
        facts = read(content)
    except ValueError:
        return
    if not facts.unscheduled:
        assert facts.schedule().num_steps <= 10**6
    if facts.shape and facts.num_classes and facts.mean:
        facts.spec()
    differences(facts, LocalSchedule(0.1), InputSpec((1, 6, 6), 3), "batch")


@given(ANYTHING)
def test_what_is_no_note_is_refused(content):
    with pytest.raises(ValueError):
        ClientNote.from_text(json.dumps(content))


@given(st.dictionaries(st.sampled_from(["replay", "training", "measurements", "client-id"]),
                       ANYTHING | ANYTHING.map(json.dumps), min_size=1))  # fmt: skip
def test_a_note_with_other_parts_is_read_or_refused(changes):
    try:
        note = ClientNote.from_text(json.dumps(json.loads(ClientNote(3).to_text()) | changes))
    except ValueError:
        return
    note.to_text().encode()
    assert note.says() == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["learning_rate", "num_steps", "batch_size", "momentum", "weight_decay"]),
       ANYTHING)  # fmt: skip
def test_a_schedule_is_one_or_a_value_error(unchecked, name, value):
    try:
        schedule = LocalSchedule(**{"learning_rate": 0.1, name: value})
    except ValueError:
        return
    assert schedule.learning_rate > 0 and 0 <= schedule.momentum < 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["shape", "num_classes", "mean", "std"]), ANYTHING)
@example("shape", [2**63, 1, 1])
@example("shape", [2**33, 1, 1])
def test_a_spec_is_one_or_a_value_error(unchecked, name, value):
    given = {"shape": (2, 4, 4), "num_classes": 3, "mean": (0.5,), "std": (0.5,), name: value}
    try:
        spec = InputSpec(**given)
    except ValueError:
        return
    assert len(spec.mean) == len(spec.std) == spec.shape[0]


def test_an_integer_that_nobody_prints_is_named(unchecked):
    with pytest.raises(ValueError, match="too long to print"):
        LocalSchedule(10**5000)
