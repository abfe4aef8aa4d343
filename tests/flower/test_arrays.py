"""Arrays of a reply: what fits is read exactly, what does not is refused by name."""

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from flwr_leakage.flower import arrays
from flwr_leakage.flower.arrays import (
    Expected,
    MalformedArraysError,
    _read,
    differing,
    read_arrays,
    write_arrays,
)
from flwr_leakage.gradient_map import GradientMap


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


NETWORK = _network()
MAP = GradientMap(NETWORK)
STATE = NETWORK.state_dict()


def _record(**change):
    return {**ArrayRecord(STATE), **{name.replace("_", ".", 1): a for name, a in change.items()}}


def _raw(data, shape=(3,), dtype="float32", stype="numpy.ndarray"):
    return Array(dtype, shape, stype, data)


def _saved(array, **kwargs):
    buffer = io.BytesIO()
    np.save(buffer, array, **kwargs)
    return buffer.getvalue()


def _zipped():
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    return buffer.getvalue()


def _header(shape, descr="'<f4'"):
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def test_what_is_written_is_read():
    params, buffers = read_arrays(ArrayRecord(STATE), MAP)
    assert list(params) == [name for name, _ in NETWORK.named_parameters()]
    assert list(buffers) == [name for name, _ in NETWORK.named_buffers()]
    record = write_arrays(ArrayRecord(STATE), params, buffers)
    assert list(record) == list(STATE)
    state = record.to_torch_state_dict()
    for name, value in STATE.items():
        assert torch.equal(state[name], value)
        assert state[name].dtype == value.dtype


def test_what_is_read_is_a_copy():
    record = ArrayRecord(STATE)
    params, _ = read_arrays(record, MAP)
    params["0.weight"].zero_()
    again, _ = read_arrays(record, MAP)
    assert torch.equal(again["0.weight"], STATE["0.weight"])


def test_the_order_of_a_reply_does_not_matter():
    params, _ = read_arrays(dict(reversed(ArrayRecord(STATE).items())), MAP)
    assert list(params) == [name for name, _ in NETWORK.named_parameters()]


def test_averaged_counters_are_cast_back():
    counter = Array(np.array(2.5))
    _, buffers = read_arrays(_record(**{"1_num_batches_tracked": counter}), MAP)
    assert buffers["1.num_batches_tracked"].dtype == torch.int64


def test_a_counter_that_is_no_number_is_refused():
    counter = Array(np.array(np.nan))
    with pytest.raises(MalformedArraysError, match="num_batches_tracked' holds 1 entries"):
        read_arrays(_record(**{"1_num_batches_tracked": counter}), MAP)


def test_withheld_entries_are_those_that_the_server_sent():
    sent = ArrayRecord(STATE)
    record = write_arrays(sent, {"0.bias": torch.ones(3)}, {})
    assert record["0.bias"].numpy().tolist() == [1, 1, 1]
    assert record["1.running_var"].data == sent["1.running_var"].data
    assert list(record) == list(STATE)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
def test_other_dtypes_of_real_numbers_are_cast(dtype):
    params, _ = read_arrays(_record(**{"0_bias": Array(np.array([1, 2, 3], dtype))}), MAP)
    assert params["0.bias"].dtype == torch.float32
    assert params["0.bias"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (Array(np.zeros(4, np.float32)), r"shape \(3,\), got \(4,\)"),
        (Array(np.zeros((3, 1), np.float32)), r"shape \(3,\), got \(3, 1\)"),
        (Array(np.array([0, np.nan, np.inf], np.float32)), "2 entries that are NaN or infinite"),
        (Array(np.array([0, 0, 1e300])), "1 entries that are NaN or infinite"),
        (Array(np.zeros(3, np.complex64)), "real numbers, got torch.complex64"),
        (Array(np.zeros(3, bool)), "real numbers, got torch.bool"),
        (Array(np.array(["a", "b", "c"])), "cannot be read"),
        (Array(np.zeros(3, "datetime64[s]")), "cannot be read"),
        (Array(np.zeros(3, [("a", "f4")])), "cannot be read"),
        (_raw(_saved(np.zeros(4, np.float32))), r"shape \(3,\), got \(4,\)"),
        (_raw(_saved(np.zeros(1, np.float32))), r"shape \(3,\), got \(1,\)"),
        (_raw(_saved(np.array([1, None, 2], object), allow_pickle=True)), "cannot be read"),
        (_raw(_zipped()), "cannot be read"),
        (_raw(b"PK\x03\x04 no zip"), "cannot be read"),
        (_raw(b""), "cannot be read"),
        (_raw(b"no array"), "cannot be read"),
        (_raw(_saved(np.zeros(3, np.float32))[:-1]), "cannot be read"),
        (_raw(_header("(3,)", "'<f9'") + bytes(27)), "cannot be read"),
        (_raw(_header("(1000000000000000,)") + bytes(12)), "cannot be read"),
        (_raw(_header("(3,") + bytes(12)), "cannot be read"),
        (_raw(_header("(-3,)") + bytes(12)), "cannot be read"),
        (_raw(_saved(np.zeros(3)), stype="pickle"), "cannot be read"),
    ],
)
def test_an_array_that_does_not_fit_is_refused_by_name(array, said):
    with pytest.raises(MalformedArraysError, match=f"(?s)'0.bias'.*{said}"):
        read_arrays(_record(**{"0_bias": array}), MAP)
    with pytest.raises(MalformedArraysError, match=f"(?s)'0.bias'.*{said}"):
        Expected(MAP).check(_record(**{"0_bias": array}))


@pytest.mark.parametrize(
    ("bias", "narrow"),
    [(STATE["0.bias"].numpy(), ()), (np.ones(3), ()), (np.ones(3, np.float16), ("0.bias",))],
)
def test_a_reply_that_nobody_attacks_is_checked_as_one_that_is_read(bias, narrow, monkeypatch):
    record, read = _record(**{"0_bias": Array(bias)}), []
    monkeypatch.setattr(arrays, "_read", lambda *given: read.append(given) or _read(*given))
    assert Expected(MAP).check(record) == narrow
    assert bool(read) == (bias.dtype != np.float32)  # one array by one where not all are plain


def test_a_model_with_a_switch_is_read_array_by_array():
    model = nn.Linear(2, 2)
    model.register_buffer("switch", torch.tensor(True))
    with pytest.raises(MalformedArraysError, match=r"real numbers, got torch\.bool"):
        Expected(GradientMap(model)).check(ArrayRecord(model.state_dict()))


def test_tensors_are_compared_with_the_arrays_of_their_names():
    state = {**STATE, "half": torch.ones(2, dtype=torch.bfloat16)}
    transposed = _raw(_saved(np.asfortranarray(STATE["0.weight"].numpy())), (3, 2))
    held = {**ArrayRecord(STATE), "0.weight": transposed, "half": Array(np.ones(2, np.float32))}
    assert differing(held, state) == []
    changed = {**state, "0.bias": state["0.bias"] + 1e-6, "more": torch.zeros(1)}
    assert differing(held, changed) == ["0.bias", "more"]


def test_missing_and_unknown_entries_are_named():
    arrays = _record(backdoor=Array(np.zeros(1)))
    del arrays["1.running_var"]
    with pytest.raises(MalformedArraysError, match=r"missing: \['1.running_var'\], unknown: \['ba"):
        read_arrays(arrays, MAP)


@pytest.mark.parametrize(
    "values",
    [
        np.float32(1.5),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=np.float64).reshape(2, 3),
        np.zeros((0, 4), np.float32),
    ],
    ids=lambda values: f"{values.dtype.str}{values.shape}{values.flags.c_contiguous}",
)
def test_reading_without_parsing_the_header_gives_what_numpy_gives(values):
    array = Array(np.asarray(values))
    like = torch.zeros(np.shape(values))
    found = arrays._values(array, like)
    assert found.dtype == array.numpy().dtype
    np.testing.assert_array_equal(found, array.numpy())
