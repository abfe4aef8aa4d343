"""What the report says of records that the server tested."""

import pytest

from flwr_leakage.members.verdict import FORGEABLE
from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.index import Index
from flwr_leakage.report.membership import members_told, membership_section


def test_a_record_that_the_samples_span_counts_as_found_by_algebra_alone():
    rows = [
        (-1, "evidence", 2.0),
        *((sample, "corrected", 1e-9) for sample in range(3)),
        *((sample, "p_value", 1e-9) for sample in range(3)),
        (0, "exact", 1.0),
        (1, "composite", 1.0),
        *((sample, "tail", 1.0) for sample in range(3)),
    ]
    index = Index(
        [
            LeakageRecord("r", 1, 0, sample, "membership", f"membership_{name}", value)
            for sample, name, value in rows
        ]
    )
    section = membership_section(index)
    assert section is not None and section.called == 2
    verdicts = {row[0]: row[1] for row in section.table.rows}
    assert verdicts == {
        "0": "it or an equal copy was used, by algebra",
        "1": "a near copy or mixture of used records, or made from the update",
        "2": "it or a near copy was probably used, by statistics",
    }
    p_values = {row[0]: row[2] for row in section.table.rows}
    assert p_values["0"] == "not needed" and section.table.rows[0][0] == "0"
    assert p_values["2"] == "below 0.001, of a fitted tail"
    assert "1 record is spanned by what was used" in " ".join(section.sentences)
    told = "2 of 3 tested records, or near copies, found used"
    assert members_told(index, with_link=False) == told


@pytest.mark.parametrize("reason", ["one step", f"one step; without labels {FORGEABLE}"])
def test_without_a_test_of_gradients_the_answer_says_that_a_record_may_have_been_made(reason):
    rows = [(-1, "evidence", 2.0), (0, "corrected", 1e-9), (0, "p_value", 1e-9), (0, "exact", 1.0)]
    index = Index(
        [
            LeakageRecord("r", 1, 0, sample, "membership", f"membership_{name}", value, note=reason)
            for sample, name, value in rows
        ]
    )
    section = membership_section(index)
    assert section is not None and section.called == 1
    told = " ".join(section.sentences)
    assert ("also by algebra: what is found tells of a person only" in told) is (
        FORGEABLE in reason
    )
