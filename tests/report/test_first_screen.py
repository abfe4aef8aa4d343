"""The first screen: the verdict in a sentence, few words, a map that hatches what was not tried."""

import re
from dataclasses import replace

import pytest
import torch
from report_page import report
from told import blind, metric, objective, spared

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import attempts, fates
from flwr_leakage.report.first_screen import MAX_LABELS, heat_map, tiles
from flwr_leakage.report.index import Index
from flwr_leakage.report.large_clients import large_clients_section
from flwr_leakage.report.membership import membership_section
from flwr_leakage.report.remedies import remedies
from flwr_leakage.report.verdict import limits_told
from flwr_leakage.tracking import JsonlTracker, write_metadata

CUT = LeakageRecord("r", 1, 0, -1, "attack", "stopped_by_budget", 1.0)
MANY = [each for c in range(0, 24, 2) for each in (metric(1, c, 0, 60.0), blind(1, c, 0))]


def graded(psnr, client=0, server_round=1, sample=0):
    return [
        metric(server_round, client, sample, psnr),
        blind(server_round, client, sample),
        objective(server_round, client, 0.1),
    ]


def ranked(rank, sample):
    return [*graded(11.0, sample=sample),
            metric(1, 0, sample, rank, "identification_rank", "of 101 images")]  # fmt: skip


KINDS = {
    "leak": graded(60.0),
    "many leak": MANY,
    "images": [*graded(60.0), LeakageRecord("r", 1, 0, 0, "client", "image", 1.0)],
    "partly": [each for client in (0, 3, 5) for each in graded(14.0, client)],
    "quiet": graded(11.0),
    "identified": [each for sample in range(3) for each in ranked(1.0, sample)],
    "cut off": [*graded(11.0), CUT],
    "refused": [objective(1, 0, None, "the network has a layer that no attack reads. " * 20)],
    "without truth": [objective(1, client, 0.1) for client in range(6)],
    "not attacked": [spared(1, client, 30, "30 images, more than allowed") for client in range(9)],
    "nothing": [],
}  # fmt: skip


@pytest.mark.parametrize("records", KINDS.values(), ids=KINDS)
def test_the_verdict_is_one_sentence_and_what_to_do_five_lines(records):
    index, metadata = Index(records), {"config": {"server": {"attack_max_seconds": 0.02}}}
    found = advise(index, metadata, remedies(index, metadata))
    assert 4 < len(found.headline.split()) <= 20
    assert re.fullmatch(r"[^.]+(?:\d\.\d[^.]*)?\.", found.headline)
    assert 1 <= len(found.lines) <= 5
    assert all(len(text) <= 160 for line in found.lines for text in (line.text, *line.items))


@pytest.mark.parametrize("records", KINDS.values(), ids=KINDS)
def test_a_page_has_600_visible_words_at_most_and_loses_none(tmp_path, records):
    tracker = JsonlTracker(tmp_path)
    write_metadata(tmp_path, {"num_rounds": 9}, 0, {"run": "a name " * 200})
    for record in records:
        tracker.log(record)
        if record.name == "psnr":
            where = (record.server_round, record.client_id, record.sample)
            for role in ("original", "reconstruction"):
                tracker.image(*where, role, torch.zeros(1, 4, 4))
    for number in range(9):
        caveat = f"caveat {number} " + "has words " * 50
        tracker.event(RunEvent("r", 0, -1, "warning", caveat))
    tracker.close()
    _, page = report(tmp_path)
    assert 60 < len(page.visible.split()) <= 600
    assert all(f"caveat {number}" in page.text for number in range(9))
    assert page.visible.count("caveat") == 3
    index = Index(records)
    advice = advise(index, {"config": {"num_rounds": 9}}, [])
    for sentence in (step.text for step in advice.steps):
        assert " ".join(sentence.split()) in page.text


def test_the_map_has_the_worst_grade_of_each_update_and_leaves_the_rest_free():
    records = [*graded(11.0), *graded(60.0, sample=1), *graded(14.0, 2), objective(2, 0, None, "x")]
    records += [spared(2, 2, 9, "too many"), spared(1, 7, 9, "too many")]
    index = Index(records)
    found = heat_map(index, attempts(index), fates(index), rounds_done=3)
    assert [name for name, _ in found.rows] == ["client 0", "client 2", "client 7"]
    assert [name for name, _ in found.columns] == ["1", "2", "3"]
    assert [name for name, _ in found.legend] == ["exact", "partly", "tried", "untried"]
    assert re.findall(r'class="g-(\w+)" d="([^"]*)"', found.svg) == [
        ("exact", "M0 0h1v1h-1z"), ("partly", "M0 1h1v1h-1z"), ("tried", "M1 0h1v1h-1z"),
    ]  # fmt: skip
    assert 'viewBox="0 0 3 3"' in found.svg
    assert "1 exact, 1 partly, 1 tried, without a grade." in found.svg
    assert heat_map(Index([]), [], fates(Index([])), 2) is None


def test_the_map_tells_nothing_found_from_an_attack_that_was_cut_off():
    index = Index([*graded(11.0), *graded(11.0, 2), CUT])
    found = heat_map(index, attempts(index), fates(index), rounds_done=1)
    assert found.legend == (("nothing", "nothing"), ("cut", "bar below: cut off by time"))
    assert '<path class="g-cut" d="M0 0.7h1v.3h-1z"/>' in found.svg


def test_the_map_marks_an_attack_that_was_cut_off_whatever_its_grade():
    index = Index([*graded(14.0), *graded(14.0, 2), CUT])
    found = heat_map(index, attempts(index), fates(index), rounds_done=1)
    assert [name for name, _ in found.legend] == ["partly", "cut"]
    assert "2 partly, 1 bar below: cut off by time." in found.svg


def test_what_to_do_names_more_time_and_a_pause_where_time_cut_attacks_off():
    index = Index([*graded(60.0), *graded(11.0, 1), replace(CUT, client_id=1)])
    lines = [line.text for line in advise(index, {}, []).lines]
    assert lines[0] == "Stop, or leave out who is seen."
    assert lines[2].startswith("In that run, give the attack more time")
    assert lines[3].startswith("Go on only")
    assert "more time" not in str(advise(Index(graded(60.0)), {}, []).lines)
    first = advise(Index([*graded(11.0), CUT]), {}, []).lines[0]
    assert first.text.startswith("Pause the training until")


def test_an_attack_s_own_note_tells_that_labels_were_inferred():
    note = "labels inferred, batch norm none, local schedule known, single view"
    objective = LeakageRecord("r", 1, 0, -1, "attack", "objective", 1e-9, "1", "", note)
    right = LeakageRecord("r", 1, 0, 0, "metric", "label_accuracy", 1.0)
    assert shown([*graded(60.0), right, objective])[1][0] == "1 of 1"
    assert shown([*graded(60.0), right])[1][1] == "the attacker was given them"


def test_whoever_was_not_attacked_and_whose_labels_leak_are_not_forgotten():
    other = LeakageRecord("r", 1, 5, -1, "client", "not_attacked", 40.0, "", "", "too many")
    labels = [
        LeakageRecord("r", 1, 0, i, kind, name, 1.0, "", "", note)
        for i, note in enumerate(("cat", "dog", "cow", "hen", "pig"))
        for kind, name in (("metric", "label_accuracy"), ("client", "class"))
    ]
    index = Index([*graded(60.0), *labels, other])
    lines = [line.text for line in advise(index, {"threat": "labels inferred"}, []).lines]
    assert lines[0].startswith("Stop. Leaving out client 0 is not enough")
    assert lines[1] == (
        "Decide whether labels may be known: 5 of 5 were inferred, and a guess has 1. If not, "
        "test a defense that hides them."
    )
    assert len(lines) <= 5
    few = Index([*graded(60.0), *labels[:4], other])  # chance gives 2 of 2 to a guess that has 1
    assert "labels" not in advise(few, {"threat": "labels inferred"}, []).lines[1].text


def test_the_defense_of_the_training_stands_on_the_first_screen():
    index, metadata = Index(graded(14.0)), {"defense": "gaussian"}
    limits = limits_told(index, fates(index), attempts(index), metadata)
    assert limits.startswith("Defense: gaussian. ")
    strong = {**metadata, "config": {"defense": {"_target_": "x.Noise", "noise_std": 0.05}}}
    limits = limits_told(index, fates(index), attempts(index), strong)
    assert limits.startswith("Defense: gaussian (noise std 0.05). ")
    told = (
        "A stronger defense than gaussian: audit(app, defense=…); no other one was measured here."
    )
    assert told in advise(index, metadata, []).lines[1].items


def test_the_map_marks_a_client_whose_labels_were_inferred_though_no_image_was_attacked():
    labels = LeakageRecord("r", 1, 2, -1, "labels", "expected_right", 0.8)
    index = Index([*graded(11.0), labels, spared(1, 2, 40, "too many"), spared(1, 3, 40, "x")])
    found = heat_map(index, attempts(index), fates(index), rounds_done=1)
    assert '<path class="g-labels" d="M0.3 1.3h.4v.4h-.4z"/>' in found.svg
    assert found.legend[1:] == (
        ("labels", "bar inside: labels alone inferred in this round, better than guessed"),
        ("untried", "images not attacked"),
    )


@pytest.mark.parametrize(("rank", "mark"), [(1.0, ["identified"]), (5.0, [])])
def test_the_map_marks_updates_whose_originals_are_identified_beyond_chance(rank, mark):
    found = heat(Index([each for sample in range(3) for each in ranked(rank, sample)]))
    assert [name for name, _ in found.legend if name == "identified"] == mark
    assert ('class="g-identified" d="M0.5 0.2l.3 .3-.3 .3-.3-.3z"' in found.svg) == bool(mark)
    seen = Index([*KINDS["identified"], *graded(60.0)])  # the worst image is exact: no diamond
    assert "g-identified" not in heat(seen).svg


def heat(index):
    return heat_map(index, attempts(index), fates(index), rounds_done=1)


@pytest.mark.parametrize("kind", ["cut off", "refused", "without truth", "not attacked", "nothing"])
def test_a_page_that_cannot_say_tells_when_training_may_go_on_and_what_protects(kind):
    advice = advise(Index(KINDS[kind]), {"defense": "gaussian"}, [])
    ways = advice.lines[-1]
    assert ways.text == "Go on in one of these ways only:"
    assert ways.items[0].startswith("A new run meets the list in The answer at length: nothing")
    assert "Differential privacy" in ways.items[1]
    assert "Secure aggregation" in ways.items[2] and ways.items[2].endswith("meets the list.")
    [listed] = [step for step in advice.steps if step.term == "Go on only if"]
    assert "or in one of the other ways under What to do" in listed.text
    identified = advise(Index(KINDS["identified"]), {}, []).lines[-1]
    assert identified.text.startswith("If it may not, go on only with")
    [step] = [step for step in advice.steps if step.term == "Go on only if"]
    assert "changes above" not in step.text and "ends an attack" in step.items[1]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("rank", [5.0, 1.0])
def test_labels_beyond_chance_ask_for_a_decision_whatever_the_images_show(is_cut, rank):
    def records(right):
        return [
            *(each for sample in range(8) for each in ranked(rank, sample)),
            *([CUT] if is_cut else []),
            *(metric(1, 0, i, right, "label_accuracy") for i in range(8)),
            *(
                LeakageRecord("r", 1, 0, i, "client", "class", 0.0, "", "", str(i % 4))
                for i in range(8)
            ),
        ]

    def asked(right, threat):
        lines = advise(Index(records(right)), {"threat": threat}, []).lines
        assert len(lines) <= 5
        return [line.text for line in lines if line.text.startswith("Decide whether labels")]

    assert asked(1.0, "labels inferred") == [
        "Decide whether labels may be known: 8 of 8 were inferred, and a guess has 2. If not, test "
        "a defense that hides them."
    ]
    assert asked(1.0, "labels known") == asked(0.0, "labels inferred") == []


def test_clients_whose_labels_came_out_better_than_a_guess_are_at_risk():
    counts = {2: ((30.0, 10.0), (30.0, 10.0)), 3: ((10.0, 30.0), (30.0, 10.0))}
    records = [
        LeakageRecord("r", 1, client, label, "labels", name, both[i][label])
        for client, both in counts.items()
        for i, name in enumerate(("inferred", "true"))
        for label in (0, 1)
    ]
    records += [
        LeakageRecord("r", 1, client, -1, "labels", name, 0.8)
        for client in counts
        for name in ("expected_right", "least_right", "uniform_right")
    ]
    for more in ([], graded(60.0)):
        lines = advise(Index([*records, *more]), {}, []).lines
        assert any("of client 2 more than a guess has" in line.text for line in lines)
    head = large_clients_section(Index(records), {}).head
    assert "some clients have: client 2 (100 % of the labels right, a blind guess 75 %)." in head


def test_the_map_of_many_clients_has_few_labels():
    records = [spared(r, client, 9, "x") for r in (1, 50) for client in range(100)]
    found = heat_map(Index(records), [], fates(Index(records)), 50)
    assert len(found.rows) <= MAX_LABELS and len(found.columns) <= MAX_LABELS
    assert sum(span for _, span in found.rows) == 100
    assert sum(span for _, span in found.columns) == 50
    assert [name for name, _ in found.legend] == ["untried"]


def shown(records, **metadata):
    index = Index(records)
    found, members = attempts(index), membership_section(index)
    made = tiles(index, metadata, found, members, large_clients_section(index, metadata))
    return [(tile.value, tile.guess) for tile in made]


def test_each_number_has_its_blind_guess_or_was_not_tested():
    assert [value for value, _ in shown([])] == ["not tested"] * 4
    records = [*graded(60.0), *graded(14.0, sample=1), *graded(11.0, sample=2)]
    records += [metric(1, 0, i, float(i > 0), "label_accuracy") for i in range(3)]
    records += [
        LeakageRecord("r", 1, 0, i, "client", "class", 0.0, "", "", name)
        for i, name in enumerate(("cat", "dog", "cat"))
    ]
    records += [
        LeakageRecord("r", r, -1, -1, "utility", "test_accuracy", value)
        for r, value in ((0, 0.1), (4, 0.5))
    ]
    for name, value in (("evidence", 1.0), ("corrected", 1e-4), ("p_value", 1e-4)):
        sample = -1 if name == "evidence" else 0
        records.append(LeakageRecord("r", 1, 0, sample, "membership", f"membership_{name}", value))
    assert shown(records, threat="labels inferred, single view") == [
        ("1 of 3 seen, 1 in part", "blind guess: 0"),
        ("2 of 3", "in all attempts; naming always one class has 2, up to 3 by chance"),
        (
            "1 of 1 found",
            "or near copies; by chance in at most 1 of 100 runs, if what it assumes holds",
        ),
        ("50.0 %", "before training: 10.0 %"),
    ]
    assert shown(records, threat="labels known")[1] == ("not tested", "the attacker was given them")
