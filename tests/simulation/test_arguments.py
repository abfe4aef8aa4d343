"""A section fits the signature of what reads it, or the error names the key."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import pytest

from flwr_leakage.simulation.arguments import check_node, check_section, check_value
from flwr_leakage.simulation.config import ConfigError


class Part(Protocol):
    """Nothing that can be checked at run time."""


@dataclass(frozen=True)
class Whole:
    count: int
    share: float = 0.5
    parts: Sequence[Part] = ()
    names: Mapping[str, int] | None = None
    mode: Literal["fast", "slow"] = "fast"


WHOLE = {"_target_": f"{__name__}.Whole", "count": 1}


def _takes_any(count: int, **settings: object) -> None:
    """For a section that may hold anything else."""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, int), (1, float), (1.5, float), (float("inf"), float), (True, bool), ("a", str),
        (None, int | None), ("a", Path), ([1, 2], tuple[int, ...]), ([1, 2.5], tuple[int, float]),
        ([], list), ({"a": 1}, dict[str, int]), ("fast", Literal["fast", "slow"]),
        (3, Part), (3, "Unknown"), (3, Callable[[int], int]), ({"_target_": "builtins.dict"}, int),
    ],
)  # fmt: skip
def test_what_fits_passes(value, expected):
    check_value("key", value, expected)


@pytest.mark.parametrize(
    ("value", "expected", "said"),
    [
        (2.0, int, "key must be an integer, got 2.0"),
        (True, int, "key must be an integer, got True"),
        (True, float, "key must be a number, got True"),
        ("1e-3x", float, "key must be a number, got '1e-3x'"),
        (float("nan"), float, "key must be a number, got nan"),
        (1, bool, "key must be true or false, got 1"),
        (None, int, "key must be an integer, got None"),
        (3, str | None, "key must be a text or null, got 3"),
        ("a", Sequence[int], "key must be a list of integers, got 'a'"),
        ([1, "a"], Sequence[int], "key.1 must be an integer, got 'a'"),
        ([1, "a"], Sequence[int] | None, "key.1 must be an integer, got 'a'"),
        ([1], tuple[int, int], "key must be a list of integers, got"),
        ({"a": "b"}, Mapping[str, int], "key.a must be an integer, got 'b'"),
        ("medium", Literal["fast", "slow"], "key must be 'fast' or 'slow', got 'medium'"),
        (3, Path, "key must be Path, got 3"),
        ([{"_target_": "builtins.nothing"}], Sequence[Part], "key.0._target_ cannot be imported"),
    ],
)
def test_what_does_not_fit_is_named(value, expected, said):
    with pytest.raises(ConfigError) as error:
        check_value("key", value, expected)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cuont": 2}, "there is no key 'cuont' in 'whole' (did you mean 'count'?)"),
        ({"count": None}, "whole.count must be an integer, got None"),
        ({"parts": [WHOLE | {"mood": 1}]}, "there is no key 'mood' in 'whole.parts.0'"),
        ({"names": {"a": 1.5}}, "whole.names.a must be an integer, got 1.5"),
        ({"_target_": None}, "whole._target_ cannot be imported"),
        ({"_target_": f"{__name__}.WHOLE"}, "whole._target_ must be callable, got"),
    ],
)
def test_a_node_is_checked_by_its_targets_signature_all_the_way_down(change, said):
    with pytest.raises(ConfigError) as error:
        check_node("whole", WHOLE | change)
    assert said in str(error.value)


def test_a_whole_node_passes():
    parts = [WHOLE, WHOLE | {"count": 2, "names": {"a": 1}}]
    check_node("whole", WHOLE | {"parts": parts, "mode": "slow", "_convert_": "all"})


def test_what_is_missing_is_named_unless_the_caller_gives_it_or_it_is_left_open():
    without = {"_target_": f"{__name__}.Whole"}
    with pytest.raises(ConfigError, match=r"whole.count must be given: whole.count=VALUE"):
        check_node("whole", without)
    check_node("whole", without, given=["count"])
    check_node("whole", without | {"_partial_": True})
    with pytest.raises(ConfigError, match="there is no key 'count'"):
        check_node("whole", WHOLE, given=["count"])


def test_a_section_without_a_target_is_refused():
    with pytest.raises(ConfigError, match="whole must be a section with a _target_"):
        check_node("whole", {"count": 1})


def test_a_section_may_be_read_by_several_and_by_one_that_takes_any_key():
    check_section("both", {"count": 1, "real": 2.0}, [Whole, complex])
    check_section("any", {"count": 1, "other": "x"}, [_takes_any])
    with pytest.raises(ConfigError, match=r"any\.count must be an integer"):
        check_section("any", {"count": "x"}, [_takes_any])
