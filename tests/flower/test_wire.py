"""The record that carries a client's note."""

import pytest
from flwr.app import ConfigRecord

from flwr_leakage.audit import ClientNote
from flwr_leakage.flower.wire import pack_note, unpack_note
from flwr_leakage.records import Measurement

SCORE = Measurement(
    "lambda_max", (0.25, None), "1", "larger is safer", ("", "did not converge"), 12
)
NOTE = ClientNote(3, (SCORE,), 0.5, 1.5, reproducible=True, remark="own", own_config=True)


def test_what_is_packed_is_unpacked():
    assert unpack_note(pack_note(NOTE)) == NOTE


@pytest.mark.parametrize("record", [{}, {"note": 3}, {"note": b"{}"}, {"note": ["{}"]}])
def test_a_record_without_a_text_is_refused(record):
    with pytest.raises(ValueError, match="the client's note must be a text"):
        unpack_note(ConfigRecord(record))
