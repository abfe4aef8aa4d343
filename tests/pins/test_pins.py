"""Every attack from outside: from a problem to its images, its verdicts and its words.

A pin is what an attack gave when it was written (:mod:`tests.pins.write`). A change inside the
attacks must keep all of them, or say why one is written anew.
"""

import pytest

from tests.pins.cases import CASES
from tests.pins.outcome import attacked, outcome, wrongly_proven
from tests.pins.pinned import differences, read


@pytest.fixture(scope="module")
def pins():
    return read()


def test_every_case_has_a_name_of_its_own_and_a_pin(pins):
    keys = [case.key for case in CASES]
    assert len(set(keys)) == len(keys)
    assert set(pins) == set(keys)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key.replace(" ", "-"))
def test_pin(case, pins, request):
    if case.name.startswith("refused"):  # for the words of the code, and not of its types
        request.getfixturevalue("unchecked")
    result, truth = attacked(case)
    came = outcome(result, truth, case)
    wrong = wrongly_proven(result, truth, case)
    assert not wrong, f"{case.key}: proven images are wrong, their ratios are {wrong} dB"
    found = differences(pins[case.key], came)
    assert not found, f"{case.key}:\n  " + "\n  ".join(found) + f"\n  all of it: {came}"
