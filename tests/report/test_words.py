"""Numbers and names as a person writes them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.report.index import count, label, number


@given(st.floats(-1e300, 1e300))
def test_number_keeps_three_digits(value):
    written = number(value).replace("−", "-").replace(",", "")
    if "×" in written:
        mantissa, power = written.split(" × 10")
        power = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        written = f"{mantissa}e{power}"
    if abs(value) > 1e-300:  # denormal numbers have fewer digits than three
        assert float(written) == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(
    ("value", "written"),
    [(None, "–"), (math.nan, "–"), (0.0, "0"), (9.999, "10.0"), (0.00012, "1.20 × 10⁻⁴"),
     (-3.14159, "−3.14"), (123456.0, "123,456"), (1.5e7, "1.50 × 10⁷")],
)  # fmt: skip
def test_number_examples(value, written):
    assert number(value) == written


def test_label_and_count():
    assert label("lambda_max") == "λmax"
    assert label("train_cpu_seconds") == "train CPU seconds"
    assert label("some_new_score") == "some new score"
    assert (count(1, "reply", "replies"), count(2, "reply", "replies")) == ("1 reply", "2 replies")
