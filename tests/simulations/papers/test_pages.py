"""The committed pages of the papers' experiments: what their numbers and judgements rest on."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from simulations.papers import Claim, Judgement
from simulations.papers.configured import CONF
from simulations.papers.findings import FEWEST, overall
from simulations.papers.page import claim_table, write_index

RESULTS = Path(__file__).parents[3] / "simulations" / "results"
FOUND = {path.parent.name: json.loads(path.read_text()) for path in RESULTS.glob("*/findings.json")}
JUDGED = (Judgement.HOLDS, Judgement.UNDECIDED, Judgement.DOES_NOT_HOLD)


def claims_of(found):
    """As ``Claim`` once more, which refuses a judgement without a number and its interval."""
    return [Claim(**{**c, "judgement": Judgement(c["judgement"])}) for c in found["claims"]]


def test_every_experiment_has_its_page():
    assert sorted(FOUND) == sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(FOUND))
def test_no_judgement_without_an_interval(name):
    claims = claims_of(FOUND[name])
    for claim in claims:
        if claim.judgement in JUDGED:
            # The one claim about printed numbers alone has no spread.
            assert claim.n >= FEWEST or "by arithmetic" in claim.text, claim.text
            assert claim.low <= claim.high and math.isfinite(claim.low + claim.high), claim.text
    text = (RESULTS / name / f"{name}.md").read_text()
    assert f"Judgement: **{overall([c.judgement for c in claims]).value}** (" in text


@pytest.mark.parametrize("name", sorted(FOUND))
def test_a_page_is_of_the_committed_settings_and_says_what_was_found(name):
    found = FOUND[name]
    size = yaml.safe_load((CONF / f"experiment/{name}.yaml").read_text())["sizes"]["cpu"]
    assert found["size"] == "cpu"
    assert {key: found["settings"].get(key) for key in size} == size
    text = (RESULTS / name / f"{name}.md").read_text()
    assert claim_table(claims_of(found)) in text and found["command"] in text
    with (RESULTS / name / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(found["rows"])
    for line, row in zip(table, found["rows"], strict=True):
        assert {k: v for k, v in line.items() if v} == {
            k: str(v) for k, v in row.items() if v not in (None, "")
        }


def test_the_index_is_that_of_the_pages(tmp_path):
    for name in FOUND:
        (tmp_path / name).mkdir()
        shutil.copy(RESULTS / name / "findings.json", tmp_path / name)
    assert write_index(tmp_path).read_text() == (RESULTS / "README.md").read_text()
