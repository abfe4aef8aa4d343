"""The client's note: what is written is read, whatever else a client writes is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.audit import ClientNote, ReplayResult
from flwr_leakage.capture import TrainingFacts
from flwr_leakage.records import Measurement
from flwr_leakage.tracking.text import plain_text

SCORE = Measurement(
    "lambda_max",
    (0.25, None),
    "1",
    "larger is safer",
    ("", "did not converge"),
    12,
    (0.01, None),
    ("within tolerance", "lower bound"),
)
NOTE = ClientNote(3, (SCORE,), 0.5, 1.5, reproducible=True, remark="own", own_config=True)
CONTENT = json.loads(NOTE.to_text())

MEASUREMENTS = st.builds(
    lambda name, values, direction, products: Measurement(
        name, tuple(values), "1", direction, tuple(str(v) for v in values), products
    ),
    st.text(max_size=5).map(plain_text),
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    st.sampled_from(["larger is safer", "smaller is safer", "larger leaks more", ""]),
    st.integers(0, 10**6),
)


@given(st.integers(0, 10**6), st.lists(MEASUREMENTS, max_size=3))
def test_what_is_sent_is_read(client_id, measurements):
    note = ClientNote(client_id, tuple(measurements), 0.25, 2.0, True, "own", True)
    assert ClientNote.from_text(note.to_text()) == note


def test_error_bars_and_states_travel_and_notes_without_them_are_read():
    assert ClientNote.from_text(NOTE.to_text()).measurements == (SCORE,)
    earlier = dict(CONTENT["measurements"][0])
    del earlier["errors"], earlier["states"]
    (read,) = ClientNote.from_text(json.dumps(CONTENT | {"measurements": [earlier]})).measurements
    assert read.values == SCORE.values and read.errors == () and read.states == ()


def _text(change=None, **measurement):
    content = CONTENT | (change or {})
    if measurement:
        content["measurements"] = [CONTENT["measurements"][0] | measurement]
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        None,
        3,
        b"{}",
        ["{}"],
        " " * 5_000_000,
        "",
        "null",
        "[]",
        "{}",
        "[" * 200_000,
        '{"a":' * 200_000,
        _text({"reproducible": 1}),
        _text({"remark": 3}),
        _text({"client-id": -1}),
        _text(errors=[-1.0, None]),
        _text(errors=[0.1]),
        _text(errors=["0.1", None]),
        _text(states=["good", "unresolved"]),
        _text(states=[["exact"], "unresolved"]),
        _text(states="exact"),
        _text({"client-id": "3"}),
        _text({"client-id": 3.0}),
        _text({"client-id": True}),
        _text({"client-id": None}),
        _text({"train-cpu-seconds": float("nan")}),
        _text({"train-cpu-seconds": float("inf")}),
        _text({"train-cpu-seconds": 10**400}),
        _text({"score-cpu-seconds": -1.0}),
        _text({"measurements": "<script>"}),
        _text({"measurements": {"a": 1}}),
        _text({"measurements": [[]]}),
        _text({"measurements": [{}]}),
        _text({"measurements": None}),
        _text(values=[float("nan"), 1]),
        _text(values=[float("-inf"), 1]),
        _text(values=[10**400, 1]),
        _text(values=["1", 1]),
        _text(values=[[1], 1]),
        _text(values=[True, 1]),
        _text(values={"a": 1}),
        _text(values=None),
        _text(values=[1, 2, 3]),
        _text(values=[1.0] * 100_000, notes=[]),
        _text({"measurements": [CONTENT["measurements"][0]] * 30_000}),
        _text(notes=["one for two"]),
        _text(notes=7),
        _text(notes=[1, 2]),
        _text(direction="upwards"),
        _text(direction=[]),
        _text(direction={}),
        _text(products="12"),
        _text(products=-1),
        _text(name=5),
        _text(name={"a": 1}),
        _text(unit=None),
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="the client's note"):
        ClientNote.from_text(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*CONTENT, *CONTENT["measurements"][0]]), inner)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_note_or_a_value_error(content):
    try:
        note = ClientNote.from_text(json.dumps(content))
    except ValueError:
        return
    assert ClientNote.from_text(note.to_text()) == note


def test_long_texts_are_cut_and_texts_that_no_file_can_hold_are_mended():
    note = ClientNote.from_text(_text(name="n" * 5000, unit="\ud800", notes=["x" * 5000, ""]))
    (measurement,) = note.measurements
    assert len(measurement.name) == 100
    assert len(measurement.notes[0]) == 500
    measurement.unit.encode()


def test_what_a_terminal_would_obey_is_spelled_out():
    escape, mark = chr(27), chr(0x202E)
    note = ClientNote.from_text(_text({"remark": f"{escape}[2J{mark}x"}, name=f"{mark}score"))
    assert note.remark == "\\u001b[2J\\u202ex"
    assert note.measurements[0].name == "\\u202escore"


def test_too_many_values_are_named_with_their_number():
    with pytest.raises(ValueError, match="at most 20,000 values, got 100,001"):
        ClientNote.from_text(_text(values=[1.0] * 100_000, notes=[]))


def test_what_repeats_is_read_once_and_what_is_long_is_not_kept():
    def note(sentence):
        facts = TrainingFacts("SGD", 0.1, num_steps=1, batch_size=4, loss="cross_entropy")
        replay = ReplayResult("undone", None, sentence)
        return ClientNote(3, training=facts, replay=replay).to_text()

    first, second = (ClientNote.from_text(note("as ever")) for _ in range(2))
    assert first == second and first.replay == ReplayResult("undone", None, "as ever")
    assert first.training is second.training and first.replay is second.replay
    first, second = (ClientNote.from_text(note("as ever" * 1000)) for _ in range(2))
    assert first == second and first.replay is not second.replay


@pytest.mark.parametrize("part", ["[]", "{}", "3", "null", 3, {}, [], "[" * 100_000, "x"])
@pytest.mark.parametrize("name", ["training", "replay"])
def test_a_part_of_another_form_is_refused(name, part):
    with pytest.raises(ValueError, match="the client's note cannot be read"):
        ClientNote.from_text(_text({name: part}))
