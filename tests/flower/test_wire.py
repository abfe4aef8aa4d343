"""The client's note: what is written is read, whatever else a client writes is refused."""

import json

import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.flower.wire import ClientNote
from flwr_leakage.records import Measurement

SCORE = Measurement(
    "lambda_max", (0.25, None), "1", "larger is safer", ("", "did not converge"), 12
)
NOTE = ClientNote(
    3, (SCORE,), train_cpu_seconds=0.5, score_cpu_seconds=1.5, reproducible=True, remark="own"
)

MEASUREMENTS = st.builds(
    lambda name, values, direction, products: Measurement(
        name, tuple(values), "1", direction, tuple(str(v) for v in values), products
    ),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    st.sampled_from(["larger is safer", "smaller is safer", "larger leaks more", ""]),
    st.integers(0, 10**6),
)


@given(st.integers(0, 10**6), st.lists(MEASUREMENTS, max_size=3))
def test_what_is_sent_is_read(client_id, measurements):
    note = ClientNote(client_id, tuple(measurements), 0.25, 2.0, True, "own")
    assert ClientNote.from_record(note.to_record(with_measurements=True)) == note


def test_scores_travel_only_when_asked_for():
    record = NOTE.to_record(with_measurements=False)
    assert "lambda_max" not in str(dict(record))
    assert ClientNote.from_record(record) == ClientNote(3, (), 0.5, 1.5, True, "own")


def _record(change=None, **measurement):
    content = NOTE.to_json() | (change or {})
    if measurement:
        content["measurements"][0] |= measurement
    return ConfigRecord({"note": json.dumps(content)})


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord({}),
        ConfigRecord({"note": 3}),
        ConfigRecord({"note": b"{}"}),
        ConfigRecord({"note": ["{}"]}),
        ConfigRecord({"note": " " * 5_000_000}),
        ConfigRecord({"note": ""}),
        ConfigRecord({"note": "null"}),
        ConfigRecord({"note": "[]"}),
        ConfigRecord({"note": "{}"}),
        ConfigRecord({"note": "[" * 200_000}),
        ConfigRecord({"note": '{"a":' * 200_000}),
        _record({"reproducible": 1}),
        _record({"remark": 3}),
        _record({"client-id": -1}),
        _record({"client-id": "3"}),
        _record({"client-id": 3.0}),
        _record({"client-id": True}),
        _record({"client-id": None}),
        _record({"train-cpu-seconds": float("nan")}),
        _record({"train-cpu-seconds": float("inf")}),
        _record({"train-cpu-seconds": 10**400}),
        _record({"score-cpu-seconds": -1.0}),
        _record({"measurements": "<script>"}),
        _record({"measurements": {"a": 1}}),
        _record({"measurements": [[]]}),
        _record({"measurements": [{}]}),
        _record({"measurements": None}),
        _record(values=[float("nan"), 1]),
        _record(values=[float("-inf"), 1]),
        _record(values=[10**400, 1]),
        _record(values=["1", 1]),
        _record(values=[[1], 1]),
        _record(values=[True, 1]),
        _record(values={"a": 1}),
        _record(values=None),
        _record(values=[1, 2, 3]),
        _record(notes=["one for two"]),
        _record(notes=7),
        _record(notes=[1, 2]),
        _record(direction="upwards"),
        _record(direction=[]),
        _record(direction={}),
        _record(products="12"),
        _record(products=-1),
        _record(name=5),
        _record(name={"a": 1}),
        _record(unit=None),
    ],
)
def test_anything_else_is_refused(record):
    with pytest.raises(ValueError, match="the client's note"):
        ClientNote.from_record(record)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*NOTE.to_json(), *NOTE.to_json()["measurements"][0]]), inner
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_note_or_a_value_error(content):
    try:
        note = ClientNote.from_record(ConfigRecord({"note": json.dumps(content)}))
    except ValueError:
        return
    assert ClientNote.from_record(note.to_record(with_measurements=True)) == note


def test_long_texts_are_cut_and_texts_that_no_file_can_hold_are_mended():
    note = ClientNote.from_record(_record(name="n" * 5000, unit="\ud800", notes=["x" * 5000, ""]))
    (measurement,) = note.measurements
    assert len(measurement.name) == 100
    assert len(measurement.notes[0]) == 500
    measurement.unit.encode()
