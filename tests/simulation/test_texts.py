"""A federation of clients whose samples are texts."""

import json
import re

import pytest
from audits import run, values

from flwr_leakage.report.page import conclusion
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError, compose
from flwr_leakage.simulation.later import attack_kept_of_run
from flwr_leakage.tracking import read_run

TEXTS = [
    "dataset=python_docs",
    "dataset.length=8",
    "dataset.vocabulary=200",
    "model.network.width=32",
    "partition.sizes=[1,2]",
    "num_clients=2",
    "num_rounds=1",
    "server.test_samples=10",
    "server.attack_max_seconds=null",
    "selection.every=1",
    "score=gradient_norm",
]


def config(folder, *overrides):
    return compose([*TEXTS, *overrides], str(folder / "run"))


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    return run(config(tmp_path_factory.mktemp("texts")), page=True)


def test_the_default_attack_recovers_the_texts_of_small_clients(audited):
    assert values(audited, "token_accuracy") == dict.fromkeys(values(audited, "exact_text"), 1.0)
    assert len(values(audited, "exact_text")) == 3
    assert set(values(audited, "identification_rank").values()) == {1.0}
    assert not [event for event in audited.events if event.level != "info"]
    scored = [value for value in values(audited, "gradient_norm").values() if value is not None]
    assert scored and min(scored) > 0


def test_texts_of_a_model_of_the_next_token_are_recovered(tmp_path):
    data = run(compose([TEXTS[0] + "_next_token", *TEXTS[1:]], str(tmp_path / "run")))
    assert set(values(data, "exact_text").values()) == {1.0}
    assert set(values(data, "named_tokens").values()) == {1.0}
    assert min(v for v in values(data, "gradient_norm").values() if v is not None) > 0
    assert not [event for event in data.events if event.level != "info"]
    assert not [record for record in data.records if record.name in ("class", "label_accuracy")]
    (accuracy, *_) = [r.value for r in data.records if r.name == "test_accuracy"]
    assert 0 <= accuracy < 0.2


def test_drawn_texts_are_tested_for_membership(tmp_path):
    data = run(config(tmp_path, "membership=drawn", "model.network.width=64"))
    told = {"exact": set(), "truth": set()}
    for record in data.records:
        kind = record.name.removeprefix("membership_")
        if record.kind == "membership" and kind in told and record.value == 1:
            told[kind].add((record.client_id, record.sample))
    assert told["truth"] and told["exact"] == told["truth"]
    assert not [event for event in data.events if "not tested" in event.message]


def test_texts_attacked_later_are_kept_like_those_attacked_at_once(tmp_path, audited):
    kept = run(config(tmp_path, "server.attack_later=true"))
    assert not kept.texts
    attack_kept_of_run(kept.folder, 1, None, [])
    assert attack_kept_of_run(kept.folder, 1, None, []) == 0
    after = read_run(kept.folder)
    told = {(t.client_id, t.sample, t.role): t.ids for t in audited.texts}
    assert told == {(t.client_id, t.sample, t.role): t.ids for t in after.texts}
    assert len(after.texts) == len(told)


def test_records_hold_ids_and_words(audited):
    texts = {(text.client_id, text.sample, text.role): text for text in audited.texts}
    assert {role for _, _, role in texts} == {"original", "reconstruction", "named"}
    data = build(audited_config(audited)).data
    batch = data.client_batch(1, 1, 2)
    for sample, ids in enumerate(batch.inputs.tolist()):
        own = tuple(token for token in ids if token)
        for role in ("original", "reconstruction"):
            assert texts[1, sample, role].ids == own
            assert texts[1, sample, role].words == tuple(data.train.words[i] for i in own)
    assert set(texts[1, -1, "named"].ids) == set(batch.inputs.unique().tolist()) - {0}


def audited_config(data):
    return json.loads((data.folder / "run.json").read_text())["config"]


def test_the_page_speaks_of_texts_and_shows_them(audited):
    page = (audited.folder / "report.html").read_text()
    assert '<h2 id="texts">' in page and page.count("<mark>") > 2 * 3
    shown = re.sub(r"<(style|script|code|svg)\b.*?</\1>", "", page, flags=re.S)
    visible = re.sub(r"<[^>]*>", " ", shown)
    assert "Contains private training texts" in visible
    assert not re.search(r"\b(images?|pictures?)\b", visible.split("What was tested")[0])
    assert "see 3 of the 3 attacked texts" in conclusion(audited.folder)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("model=linear", "model must take the dataset's token ids, got linear"),
        ("defense=mixup", "MixUp mixes or differentiates continuous inputs"),
        ("defense=instahide", "InstaHide mixes or differentiates continuous inputs"),
        ("defense=soteria", "Soteria mixes or differentiates continuous inputs"),
        ("+defense@what_if.mixed=mixup", "what_if.mixed: MixUp mixes"),
        ("score=psnr_bound", "score.psnr_bound must be no score of pixels"),
        ("score=own_records", "score.own_records must not be OwnRecords, which tests images"),
    ],
)
def test_what_is_made_for_images_is_refused_before_work_starts(
    tmp_path, override, match, unchecked
):
    given = [each for each in TEXTS if not (override.startswith("model") and "model" in each)]
    given = [each for each in given if not (override.startswith("score") and "score" in each)]
    with pytest.raises(ConfigError, match=match):
        build(compose([*given, override], str(tmp_path / "run")))


def test_an_encoder_is_no_model_of_the_next_token(tmp_path):
    given = ["dataset=python_docs_next_token", "model=text_transformer", *TEXTS[1:]]
    with pytest.raises(ConfigError, match=r"got \(200,\): choose model=text_decoder"):
        build(compose(given, str(tmp_path / "run")))


def test_a_model_of_texts_takes_no_images(tmp_path):
    with pytest.raises(ConfigError, match="model must take the dataset's images"):
        build(compose(["dataset=embedded_mnist", "model=text_transformer"], str(tmp_path / "run")))


@pytest.mark.parametrize("defense", ["pruning", "gaussian", "clipping", "dp_sgd"])
def test_defenses_of_updates_take_texts(tmp_path, defense):
    data = run(config(tmp_path, f"defense={defense}", "what_if=null"))
    assert len([r for r in data.records if r.name == "train_cpu_seconds"]) == 2
