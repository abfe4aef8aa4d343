"""The drawings: whole rounds, plain signs, the same text for the same numbers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.report.drawing import (
    BAND,
    Dot,
    Panel,
    rounds_chart,
    scatter_chart,
    story_chart,
    thin_out,
)
from flwr_leakage.report.grades import GRADES


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(2, 20))
def test_thinned_out_dots_keep_both_ends(values, limit):
    kept = thin_out(values, limit)
    assert len(kept) == min(limit, len(values))
    assert (kept[0], kept[-1]) == (min(values), max(values))
    assert set(kept) <= set(values)


def test_charts_follow_the_page_and_repeat_exactly():
    by_round = {1: [1.0, 2.0, 1000.0], 2: [5.0]}
    first = rounds_chart(by_round, "a", 'what "it" <shows>', "dB")
    assert first == rounds_chart(by_round, "a", 'what "it" <shows>', "dB")
    assert "var(--accent)" in first and "#0" not in first
    assert "&lt;shows&gt;" in first and "<metadata" not in first and "<script" not in first
    assert 'id="a-' in first and "url(#a-clip0)" in first  # no name depends on rounding
    assert "mathdefault" not in first  # labels of a logarithmic axis are plain text


def test_values_near_each_other_stand_in_full_at_the_axis():
    chart = rounds_chart({1: [2.30501], 2: [2.30503], 3: [2.30502]}, "a", "d")
    written = re.findall(r'id="a-ytick_.*?<text[^>]*>([^<]*)<', chart, flags=re.DOTALL)
    assert written and all(tick.startswith("2.305") for tick in written)
    assert not any("+" in text for text in re.findall(r"<text[^>]*>([^<]*)<", chart))


def test_the_story_chart_shares_its_rounds_and_shows_accuracy_as_percentages():
    panels = [
        Panel(
            0, {1: [Dot(100.0, "exact")], 3: [Dot(90.0, "exact")]}, {"a": {1: [14.0]}}, {1: [12.0]}
        ),
        Panel(1, {1: [Dot(20.0, "recognisable"), Dot(13.0, "")]}, {"b<": {1: [13.0]}}, {1: [12.0]}),
    ]
    chart = story_chart({0: [0.1], 1: [0.5]}, panels, "s", "d")
    texts = re.findall(r"<text[^>]*>([^<]*)<", chart)
    assert {"0", "25", "50", "75", "100", "accuracy, %", "client 0", "client 1"} <= set(texts)
    assert {"blind guess, median", "median if a", "median if b", "round of training"} <= set(texts)
    assert texts.count("round of training") == 1
    bands = [text for text in texts if text in GRADES]
    assert bands == [*GRADES, *GRADES[1:]]
    assert "hollow: cut off by time" not in texts
    ended = story_chart({}, [Panel(0, {1: [Dot(20.0, "partly", ended=True)]})], "s", "d")
    assert "hollow: cut off by time" in ended and "graded partly" in ended
    under = {"a": {1: [14.0], 2: [15.0]}}
    dots = {1: [Dot(20.0, "exact")]}
    told = [story_chart({}, [Panel(0, dots, under, {}, {"a": rounds})], "s", "d")
            for rounds in (set(), {2}, {1, 2})]  # fmt: skip
    assert ["hollow: cut off by time" in each for each in told] == [False, True, True]
    assert len(set(told)) == 3  # the marks of the medians differ, too
    pooled = story_chart({}, [Panel(None, {1: [Dot(20.0, "")]})], "s", "d")
    assert "attacked images" in pooled and "recognisable<" not in pooled


@pytest.mark.parametrize("decibels", [48.2, 120.0])
def test_whatever_is_exact_is_drawn_at_one_height(decibels):
    def heights(psnr):
        panel = Panel(0, {1: [Dot(psnr, "exact")]}, {}, {1: [12.0]})
        return re.findall(r'<use [^>]*y="([\d.]+)"', story_chart({}, [panel], "s", "d"))

    assert heights(decibels) == heights(48.1308036086791 + BAND / 2)


@pytest.mark.parametrize("unit", ["<script>", "$x^$", "dB", "1", ""])
def test_no_foreign_sign_enters_a_chart(unit):
    chart = rounds_chart({1: [1.0]}, "a", "d", unit)
    written = re.findall(r"<text[^>]*>([^<]*)<", chart)
    assert not any(sign in text for text in written for sign in "<>$^&")


@pytest.mark.parametrize("rounds", [[1], [1, 3], list(range(40))])
def test_rounds_on_the_axis_are_whole_numbers(rounds):
    chart = rounds_chart({server_round: [20.0, 30.0] for server_round in rounds}, "a", "d")
    written = re.findall(r'id="a-xtick_.*?<text[^>]*>([^<]*)<', chart, flags=re.DOTALL)
    assert written and all(int(tick) in [-1, *rounds, 40] for tick in written)


@pytest.mark.parametrize("pairs", [[(1.0, 1.0)], [(0.0, 0.0)] * 2, [(-1.0, 2.0), (1e9, -3.0)]])
def test_scatter_chart_draws_degenerate_data(pairs):
    assert scatter_chart(pairs, "a", "d").startswith("<svg")
