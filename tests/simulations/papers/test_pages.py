"""The committed pages of the papers' experiments: what their numbers and judgements rest on."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest
import yaml

from simulations.papers import Claim, Judgement
from simulations.papers.configured import CONF, sized
from simulations.papers.findings import FEWEST, overall
from simulations.papers.page import claim_table, folder_of, write_index

RESULTS = Path(__file__).parents[3] / "simulations" / "results"
FOUND = {path.parent.name: json.loads(path.read_text()) for path in RESULTS.glob("*/findings.json")}
JUDGED = (Judgement.HOLDS, Judgement.UNDECIDED, Judgement.DOES_NOT_HOLD)


def claims_of(found):
    """As ``Claim`` once more, which refuses a judgement without a number and its interval."""
    return [Claim(**{**c, "judgement": Judgement(c["judgement"])}) for c in found["claims"]]


def test_every_experiment_has_its_page():
    usual = [found["name"] for found in FOUND.values() if found["size"] == "cpu"]
    assert sorted(usual) == sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
    assert all(folder == folder_of(one["name"], one["size"]) for folder, one in FOUND.items())


@pytest.mark.parametrize("folder", sorted(FOUND))
def test_no_judgement_without_an_interval(folder):
    claims, name = claims_of(FOUND[folder]), FOUND[folder]["name"]
    for claim in claims:
        if claim.judgement in JUDGED:
            # The one claim about printed numbers alone has no spread.
            assert claim.n >= FEWEST or "by arithmetic" in claim.text, claim.text
            assert claim.low <= claim.high and math.isfinite(claim.low + claim.high), claim.text
    text = (RESULTS / folder / f"{name}.md").read_text()
    assert f"Judgement: **{overall([c.judgement for c in claims]).value}** (" in text


@pytest.mark.parametrize("folder", sorted(FOUND))
def test_a_page_is_of_the_committed_settings_and_says_what_was_found(folder):
    found, name = FOUND[folder], FOUND[folder]["name"]
    config = yaml.safe_load((CONF / f"experiment/{name}.yaml").read_text())
    size = sized({**config, "size": found["size"], "paper": {}})
    assert found["size"] in ("cpu", "thorough")
    assert {key: found["settings"].get(key) for key in size} == size
    text = (RESULTS / folder / f"{name}.md").read_text()
    assert claim_table(claims_of(found)) in text and found["command"] in text
    with (RESULTS / folder / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(found["rows"])
    for line, row in zip(table, found["rows"], strict=True):
        assert {k: v for k, v in line.items() if v} == {
            k: str(v) for k, v in row.items() if v not in (None, "")
        }


def test_the_index_is_that_of_the_pages(tmp_path):
    for folder in FOUND:
        (tmp_path / folder).mkdir()
        shutil.copy(RESULTS / folder / "findings.json", tmp_path / folder)
    assert write_index(tmp_path).read_text() == (RESULTS / "README.md").read_text()
