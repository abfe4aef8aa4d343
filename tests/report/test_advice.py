"""What to do now: words for every situation, and none that promises safety."""

from dataclasses import replace
from pathlib import Path

import pytest

from flwr_leakage.defenses import GradientPruning
from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import attempts, tally
from flwr_leakage.report.grades import CALIBRATION, SURENESS, TOTAL, grades_table
from flwr_leakage.report.index import Index
from flwr_leakage.report.remedies import remedies
from flwr_leakage.report.story import blind_guess
from flwr_leakage.report.verdict import judge


def record(kind, name, value, where=(1, 0, 0), note=""):
    return LeakageRecord("r", *where, kind, name, value, "dB", "", note)


def image(psnr, where=(1, 0, 0), rank=None):
    """An attacked image, with a blind guess of 12 dB."""
    made = [
        record("metric", "psnr", psnr, where),
        record("metric", "blind_psnr", 12.0, where),
        record("attack", "objective", 0.5, (*where[:2], -1)),
    ]
    if rank is not None:
        made.append(record("metric", "identification_rank", rank, where, "of 101 images"))
    return made


def under(name, psnr, where=(1, 0, 0), rank=None):
    made = [
        record("what_if", f"{name}/psnr", psnr, where),
        record("what_if", f"{name}/blind_psnr", 12.0, where),
    ]
    if rank is not None:
        note = "of 101 images"
        made.append(record("what_if", f"{name}/identification_rank", rank, where, note))
    return made


def said(step):
    """All that a step says: text, list, small print."""
    return " ".join([step.text, *step.items, step.note]).strip()


def advice(*records, defense="none", **metadata):
    index, metadata = Index(records), {"defense": defense, **metadata}
    found = advise(index, metadata, remedies(index, metadata))
    short = " ".join(text for line in found.lines for text in (line.text, *line.items))
    everything = " ".join([found.headline, short, *map(said, found.steps)])
    for promise in ("is safe", "are safe", "no risk", "may go on.", "guarantee"):
        assert promise not in everything.lower()
    lines = {"In short": short}
    return found.headline, {step.term: said(step) for step in found.steps} | lines


def test_a_leak_names_who_what_helps_and_its_price():
    accuracy = record("utility", "test_accuracy", 0.93, (2, -1, -1))
    spared = record("client", "not_attacked", 30.0, (1, 4, -1), "30 images, more than allowed")
    resting = record("client", "not_attacked", 30.0, (3, 0, -1), "every 2 rounds")
    headline, steps = advice(
        *image(60.0), *image(9.0, (2, 0, 0)), *image(14.0, (1, 1, 0)), accuracy, spared,
        resting, *under("pruning", 9.0, rank=1.0), *under("noise", 20.0), *under("clip", 14.0),
    )  # fmt: skip
    assert headline == "Not as it is: the server can see private images, from client 0."
    helps = steps["Defenses tried"]
    assert helps.startswith(
        "Pruning hid them from this attack. Noise left leaks. Clip let parts show. Under pruning: "
        "attempts that show an image: 0 of 1 (without it 1), 0 in part; the change of an update "
        "was not recorded."
    )
    assert "an image: 0 of 1 (without it 1), 1 in part" in helps  # under clip
    assert "one made for it may reach more" in helps
    price = steps["At what price"]
    assert "Test accuracy was 93.0 % after round 2. What" in price
    assert "What it reaches under pruning and noise and clip is not known" in price
    assert "flwr-leakage compare RUN RUN sets their accuracy and leakage" in price


def test_a_leak_that_was_seen_under_wrong_assumptions_asks_to_mend_them():
    other = record("check", "trained_otherwise", 1.0, (1, 0, -1), "learning rate 0.1, assumed 1")
    late = record("attack", "stopped_by_budget", 1.0, (1, 0, -1))
    lines = advise(Index([*image(30.0), other, late]), {}, []).lines
    assert any(line.text.startswith("In that run, set schedule= of observe(…)") for line in lines)
    assert not any("more time" in line.text for line in lines)
    (head,) = judge(Index([*image(30.0), other, late]), [], {}).head
    assert head == (
        "Wrong assumption, as client 0 trained with learning rate 0.1, and the attack assumed 1. "
        "Under the right one more may show, also of updates that show nothing here."
    )
    defended = advise(Index([*image(30.0), other]), {"defense": "gaussian"}, []).lines
    for told, leave in ((lines, True), (defended, False)):
        assert ("or leave it out" in " ".join(line.text for line in told)) is leave


def test_engineers_are_told_what_was_measured_and_when_to_go_on():
    def images(client, count):
        return record("client", "images", count, (1, client, -1))

    ended = [
        record("what_if", "pruning/stopped_by_budget", value, (server_round, 0, -1))
        for server_round, value in ((1, 1.0), (3, 0.0))
    ]
    leaks = [*image(60.0), *under("pruning", 14.0), *ended, images(0, 1), images(4, 30)]
    _, steps = advice(*leaks, config={"what_if": {"pruning": {"_target_": "P", "ratio": 0.99}}})
    helps = steps["Defenses tried"]
    assert helps.startswith("Pruning (ratio 0.99) let parts show.")
    assert "The time limit ended the attack on 1 of 2 defended updates: with more" in helps
    asked = steps["In short"]
    told = (
        "A defense on each update, such as noise: audit(app, defense=GaussianNoise(…)); here "
        "pruning let parts show."
    )
    assert told in asked
    assert (
        "(those seen had 1 image): how many are enough was not measured here, as client 4, with "
        "more, was not attacked." in asked
    )
    assert "by which the server sees sums only: not measured here." in asked
    assert (
        "No time limit ends an attack: neither the run's nor the attack's own."
        in steps["Go on only if"]
    )
    limited = {"server": {"attack_max_seconds": 4.0}}
    _, steps = advice(*leaks, config=limited)
    assert "neither the run's (here 4 CPU seconds for an update) nor" in steps["Go on only if"]
    _, steps = advice(*leaks, *image(11.0, (1, 4, 0)))
    assert "of clients with 30 images nothing was seen here." in steps["In short"]
    stopped = record("attack", "stopped_by_budget", 1.0, (1, 4, -1))
    _, steps = advice(*leaks, *image(11.0, (1, 4, 0)), stopped)
    assert "nothing was seen here, but time cut the attack off." in steps["In short"]


def test_a_defense_without_results_counts_none_that_is_seen_or_not():
    none = record("what_if", "pruning/label_accuracy", 1.0)
    _, steps = advice(*image(60.0), none)
    assert steps["Defenses tried"].startswith("Pruning gave no result.")


def test_the_headline_counts_images_and_names_everybody_who_leaks():
    numbers = [record("client", "image", 1.0, where) for where in ((1, 0, 0), (2, 0, 0), (1, 1, 0))]
    headline, steps = advice(
        *image(60.0), *image(20.0, (2, 0, 0)), *image(14.0, (1, 1, 0)), *numbers,
        *under("noise", 20.0), *under("noise", 14.0, (1, 1, 0)),
    )  # fmt: skip
    assert headline == (
        "Not as it is: the server can see 1 of the 2 attacked images, from client 0."
    )
    assert steps["Defenses tried"].startswith("Noise left leaks.")
    told = "No more attempts identify their original than by chance; chance alone gives more in"
    assert told in steps["Go on only if"]


def test_the_conditions_to_go_on_are_a_short_list_with_the_statistics_in_small_print():
    ranked = [*image(20.0, rank=1.0), *image(11.0, (1, 0, 1), rank=5.0)]
    index = Index(ranked)
    [step] = [s for s in advise(index, {}, []).steps if s.term == "Go on only if"]
    assert len(step.items) == 5 and all(len(item.split()) < 36 for item in step.items)
    assert len(step.text.split()) < 35
    assert step.items[3] == (
        "With 2 attempts, as here, at most 0 may identify the original (of 100 at most 3, of 1,000 "
        "at most 15); chance alone gives more in 5 % of runs or fewer."
    )
    assert step.items[4].startswith("The attack's answer explains each update.")
    assert step.text.startswith("a new run with one of the changes above meets all of these.")
    assert step.items[0].startswith("The new run attacks")


def test_what_helps_says_what_a_defense_does_and_how_much_it_changes_an_update():
    node = {"_target_": "flwr_leakage.defenses.GradientPruning", "prune_ratio": 0.99}
    change = record("what_if", "pruning/relative_change", 0.86, (1, 0, -1))
    leak = [*image(60.0), *under("pruning", 9.0), change]
    told = {"pruning": GradientPruning(0.99).in_words()}
    _, steps = advice(*leak, config={"what_if": {"pruning": node}}, defenses_in_words=told)
    assert steps["Defenses tried"].startswith(
        "Pruning (prune ratio 0.99), by which only the largest 1 % of the update’s numbers are "
        "sent, hid them from this attack. Under pruning: attempts that show an image: 0 of 1 "
        "(without it 1), 0 in part; an update changes by 86 % of its size (Euclidean norm, "
        "median), which says "
    )


@pytest.mark.parametrize("told", [None, {}, "x", {"pruning": 3}, {"pruning": ""}])
def test_what_helps_does_without_the_words_of_a_defense(told):
    _, steps = advice(*image(60.0), *under("pruning", 9.0), defenses_in_words=told)
    assert steps["Defenses tried"].startswith("Pruning hid them from this attack.")


def test_a_defense_that_was_not_tried_on_those_at_risk_has_no_numbers():
    _, steps = advice(*image(60.0), *image(9.0, (1, 1, 0)), *under("noise", 9.0, (1, 1, 0)))
    assert steps["Defenses tried"] == (
        "Noise was not measured on them. The attack was the same as without the defense; one made "
        "for it may reach more."
    )


def test_a_leak_under_a_defense_and_without_another_one():
    _, steps = advice(*image(20.0), defense="gaussian")
    assert steps["Defenses tried"].startswith("It leaks although the run trained under gaussian.")
    assert "this run names none" in steps["Defenses tried"]


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (image(14.0), "Parts of private images leak. 1 attempt"),
        (image(11.0), "This run found no reason to stop, and gives no clearance"),
        (
            [r for i in range(3) for r in image(11.0, (1, 0, i), rank=1.0)],
            "Not without a decision. No image shows. Yet",
        ),
        ([record("client", "not_attacked", 3.0, (1, 0, -1), "no attack is configured")],
         "This run cannot say: no update was attacked. Client 0 was not attacked: no attack is"),
        ([], "This run cannot say: no update was attacked."),
        ([record("attack", "objective", None, (1, 0, -1), "no layer.")],
         "the attack could not be applied to the attacked update (the reason: no layer). That is"),
        ([record("attack", "objective", 0.5, (1, 0, -1))],
         "This run cannot say: nothing tells how near the reconstructions of the attacked update"),
        (
            [*image(11.0), record("check", "replay_residual", 0.5, (1, 0, -1), "not explain")],
            "This run cannot say: no image was recovered, but what was attacked is not what",
        ),
    ],
)  # fmt: skip
def test_every_other_situation_has_its_words(records, words):
    _, steps = advice(*records)
    assert words in judge(Index(records), [], {"defense": "none"}).sentence
    assert steps


def test_what_was_found_stands_though_the_replay_failed():
    failed = record("check", "replay_residual", 0.5, (1, 0, -1), "does not explain")
    headline, _ = advice(*image(60.0), failed)
    assert headline.startswith("Not as it is")
    assert judge(Index([*image(60.0), failed]), []).head[0].startswith("Replay check failed")


def test_the_grades_stand_beside_the_error_rates_of_the_docs():
    table = grades_table(tally(attempts(Index([*image(60.0), *image(11.0, (1, 0, 1))]))))
    assert [row[:2] for row in table.rows] == [
        ("exact", "1"), ("recognisable", "0"), ("partly", "0"), ("nothing", "1"),
    ]  # fmt: skip
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    for each in CALIBRATION:
        shares = (each.by_error, each.by_structure, each.by_eye, each.by_all, each.by_none)
        told = " | ".join(f"{100 * share:.0f} %" for share in shares)
        assert f"| {each.grade} | {each.count} | {told} |" in text
    assert f"({TOTAL} results" in text
    told = "98 % of the results graded “recognisable” or better, 86 % of “partly” and still"
    assert told in SURENESS and "In a test apart from this run" in SURENESS
    shares = [each.most for each in CALIBRATION]
    assert shares == sorted(shares, reverse=True)  # a lower grade never seems to leak more


def test_the_blind_guess_is_called_what_it_is():
    psnr, blind, attack = image(11.0)
    meant = replace(blind, note="a flat grey")
    assert "without any update: here a flat grey. It reaches 12.0 dB" in blind_guess(Index([meant]))
    assert "here" not in blind_guess(Index([psnr, blind, attack]))
    assert blind_guess(Index([psnr])) == ""


def test_a_leaking_run_has_the_command_of_a_run_that_meets_the_conditions():
    other = record(
        "client", "not_attacked", 40.0, (1, 5, -1), note="more than the 8 attacked at most"
    )
    config = {"choices": {"attack": "strongest"}, "selection": {"max_examples": 8}}
    index = Index([*image(60.0), other])
    metadata = {"config": config, "command": "x run seed=3", "attack": "strongest"}
    [step] = [step for step in advise(index, metadata, []).steps if step.term == "Test"]
    (command,) = step.commands
    assert command == (
        "flwr-leakage run seed=3 selection.max_examples=null defense=gaussian what_if=null"
    )
    assert "For client 5: set selection.max_examples=null" in step.text
    own = [step.term for step in advise(index, {}, []).steps]
    assert "Test" not in own  # an app of one's own has no command to repeat
