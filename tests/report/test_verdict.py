"""What a run showed, in words that cannot mislead."""

import pytest
from told import blind, column, metric, objective, score, spared, with_blind

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report.advice import advise
from flwr_leakage.report.attempts import (
    attempts,
    beyond_chance,
    by_chance,
    condition_told,
    ended_by_time,
    fates,
    left_out,
    unexplained_told,
)
from flwr_leakage.report.index import Index
from flwr_leakage.report.samples import IMAGE
from flwr_leakage.report.tables import clients_table
from flwr_leakage.report.verdict import judge, not_covered


def test_verdict_counts_grades_and_names_who_is_most_at_risk():
    records = [metric(1, 0, 0, 20.0), metric(1, 0, 1, 11.0), metric(1, 1, 0, 60.0)]
    records += [metric(2, 1, 0, 61.0), metric(1, 2, 0, None), objective(1, 2, None, "it diverged.")]
    verdict = judge(with_blind(*records, objective(1, 1, 0.1)), [])
    assert verdict.sentence == (
        "Private images leak. 5 attempts (an image in a round) in 2 rounds, on 3 clients: "
        "2 exact, 1 recognisable, 1 nothing, 1 without result."
    )
    assert verdict.level == "leak"
    assert verdict.details[0].startswith(
        "Most at risk: client 1: 2 attempts, 2 exact; its worst case was an exact copy (on average "
        "off by less than one of 255 grey levels) in round 2."
    )
    assert verdict.details[1].startswith("Replay check not done: ")
    assert verdict.details[2] == (
        "Attack could not be applied, or gave no result, on 1 of 2 attacked updates (client 2): "
        "it diverged."
    )


def test_verdict_tells_a_failed_search_from_missing_information():
    def details(*unseen):
        scores = [score(1, 0, i, value, name="unseen_directions") for i, value in enumerate(unseen)]
        metrics = [metric(1, 0, i, value) for i, value in enumerate((11.0, 11.0, 11.0, 60.0))]
        told = judge(with_blind(*metrics, *scores), []).details
        return [text for text in told if text.startswith("Information or search: ")]

    assert details() == details(None, None, None) == []
    assert details(None, None, None, 0.0) == []  # that image came out
    assert details(None, None, None, None, 0.0) == []  # and this one was not attacked
    (told,) = details(0.0, 0.0, 0.0, 0.0)
    assert told.startswith("Information or search: of 3 images that did not come out, the update")
    assert "determines 3 completely" in told
    assert "the search failed there" in told
    assert "open" not in told
    (told,) = details(0.0, 100.0, 300.0, 0.0)
    assert "determines 1 completely" in told
    assert told.endswith(
        "of 2 it leaves a median of 200 directions open, in which no attack on the update alone "
        "can tell images apart."
    )
    (told,) = details(100.0)
    assert "search failed" not in told


def test_verdict_says_where_labels_were_wrong():
    def details(*right, threat="", classes=()):
        records = [metric(1, 0, i, value, "label_accuracy") for i, value in enumerate(right)]
        records += [
            LeakageRecord("r", 1, 0, i, "client", "class", 0.0, "", "", name)
            for i, name in enumerate(classes)
        ]
        index = with_blind(metric(1, 0, 0, 11.0), *records)
        return judge(index, [], {"threat": threat}).details

    told = "Labels: the attack got the label right in 1 of 2 attempts. With a wrong label"
    assert any(text.startswith(told) for text in details(1.0, 0.0))
    assert not any("Labels" in text for text in details(1.0, 1.0, threat="labels known"))
    told = "Labels leak: the attack got the label right in 5 of 5 attempts, from the update"
    five = ("cat", "dog", "cow", "hen", "pig")
    better = details(*[1.0] * 5, threat="labels inferred", classes=five)
    assert any(text.startswith(told) for text in better)
    alike = details(1.0, 0.0, threat="labels inferred", classes=("cat", "dog"))
    told = (
        "Labels: the attack got the label right in 1 of 2 attempts, from the update alone; a "
        "guess that is right as often as the commonest class (1 of 2) has up to 2 by chance."
    )
    assert any(text.startswith(told) for text in alike)


def image(server_round, client_id, sample, number):
    return LeakageRecord("r", server_round, client_id, sample, "client", "image", number)


def test_verdict_counts_images_where_the_truth_tells_them_apart():
    # Client 0 has one image, at another place in round 2; client 1 has another one.
    records = [metric(1, 0, 0, 60.0), metric(2, 0, 3, 20.0), metric(1, 1, 0, 11.0)]
    numbers = [image(1, 0, 0, 1.0), image(2, 0, 3, 1.0), image(1, 1, 0, 1.0)]
    verdict = judge(with_blind(*records, *numbers), [])
    assert verdict.sentence == (
        "Private images leak. 1 of the 2 attacked images can be seen (exact or recognisable). "
        "2 images of 2 clients, each by its worst round: 1 exact, 1 nothing."
    )
    assert verdict.details[0] == (
        "Over all 3 attempts (an image in a round) in 2 rounds: 1 exact, 1 recognisable, 1 nothing."
    )
    assert verdict.details[1] == (
        "Most at risk: client 0: 1 image, 1 exact; its worst case was an exact copy (on average "
        "off by less than one of 255 grey levels) in round 1, image 1. It leaks in rounds 1 and 2."
    )


def test_verdict_and_tables_name_the_same_client_first():
    # The worst grades are equal: client 1 leaks more often, client 0 has more decibels once.
    records = [metric(1, 0, 0, 90.0), metric(1, 0, 1, 8.0), metric(1, 1, 0, 60.0)]
    index = with_blind(*records)
    assert any("Most at risk: client 1:" in text for text in judge(index, []).details)
    assert column(clients_table(index, [], attempts(index), 10), "client") == ["1", "0"]


def test_verdict_below_the_blind_guess_is_nothing_and_says_that_other_attacks_may_do_better():
    verdict = judge(with_blind(metric(1, 0, 0, 9.0), metric(1, 0, 1, 8.0)), [])
    assert verdict.sentence.startswith("This run found no reason to stop, and gives no clearance")
    assert "Others may. 2 attempts" in verdict.sentence and verdict.level == "quiet"


def test_verdict_of_recognisable_images_at_20_db_is_a_leak():
    verdict = judge(with_blind(*(metric(1, 0, sample, 20.0) for sample in range(4))), [])
    assert "4 recognisable" in verdict.sentence and verdict.level == "leak"


def test_identification_is_compared_with_chance():
    ranks = [metric(1, 0, i, 1.0, "identification_rank", "of 101 images") for i in range(4)]
    verdict = judge(with_blind(*(metric(1, 0, i, 11.0) for i in range(4)), *ranks), [])
    assert any(
        "4 of 4 attempts point to the original among it and 100 others" in text
        and "something leaks that no grade shows" in text
        for text in verdict.details
    )


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([], "no update was attacked. No attack was run, or none has ended yet."),
        (
            [score(1, 0, 0, 1.0)],
            "no update was attacked. No attack was run, or none has ended yet.",
        ),
        ([objective(1, 0, 0.5)], "nothing tells how near the reconstructions of the attacked"),
        ([metric(1, 0, 0, 0.5, "ssim")], "nothing tells how near"),
        ([metric(1, 0, 0, 20.0)], "no blind guess to compare with was recorded"),
        ([objective(1, 0, None, "no")], "the attack could not be applied to the attacked update"),
        ([spared(1, 0, 9, "no attack is configured")], "Client 0 was not attacked: no attack is"),
    ],
)
def test_verdict_without_outcome_says_what_is_missing(records, words):
    verdict = judge(Index(records), [])
    assert words in verdict.sentence
    assert verdict.level == "unknown"


def test_what_was_not_attacked_is_told_with_its_reason():
    many = "images, more than the 8 that are attacked at most"
    rests = "attacks run every 2 rounds from round 1 on"
    records = [metric(1, 0, 0, 20.0), objective(1, 0, 0.1)]
    records += [spared(1, 3, 30, f"30 {many}"), spared(1, 4, 1200, f"1,200 {many}")]
    records += [spared(2, client, 30, rests) for client in (0, 3, 4)]
    details = judge(with_blind(*records), []).details
    expected = "Not attacked: clients 3 and 4 (30 to 1,200 images, more than the 8 that are"
    assert any(text.startswith(expected) for text in details)
    assert f"Not attacked: round 2 ({rests})." in details


def test_a_client_left_out_in_all_rounds_is_no_reason_why_the_last_round_was_not_attacked():
    why = "its 4 steps of 32 samples use 128, more than max_samples=64"
    records = [metric(1, 0, 0, 20.0), objective(1, 0, 0.1), spared(1, 3, 128, why)]
    records.append(spared(2, 3, 128, why))
    details = judge(with_blind(*records), []).details
    assert [text for text in details if text.startswith("Not attacked")] == [
        f"Not attacked: client 3 ({why}). That is no sign of safety."
    ]


def test_a_failed_attack_is_not_counted_as_a_second_trouble():
    events = [
        RunEvent("r", 1, 2, "warning", "not recovered"),
        RunEvent("r", 1, 3, "error", "no reply"),
        RunEvent("r", 1, 3, "error", "again"),
        RunEvent("r", 1, 5, "info", "hello"),
        RunEvent("r", 1, -1, "warning", "server"),
    ]
    details = judge(Index([objective(1, 2, None)]), events).details
    assert "on 1 of 1 attacked update (client 2)" in details[1]
    assert details[2].startswith("In 1 case ") and len(details) == 3


def test_warnings_before_the_rounds_stand_by_the_verdict():
    events = [RunEvent("r", 0, -1, "warning", "read this"), RunEvent("r", 0, -1, "info", "hello")]
    assert judge(with_blind(metric(1, 0, 0, 30.0)), events).details[-1] == "read this"


def test_the_head_has_a_failed_replay_check_and_what_the_numbers_do_not_say():
    refuted = LeakageRecord("r", 1, 0, -1, "check", "replay_residual", 0.5, note="does not explain")
    records = [metric(1, 0, 0, 30.0), objective(1, 0, 0.1)]
    caveat = RunEvent("r", 0, -1, "warning", "read this")
    verdict = judge(with_blind(*records, refuted), [caveat])
    failed, last = verdict.head
    assert failed.startswith("Replay check failed") and last == "read this"
    assert set(verdict.head) <= set(verdict.details)
    assert judge(with_blind(*records), []).head == ()
    assert judge(Index([objective(1, 0, 0.1)]), [caveat]).head == ("read this",)


def test_of_several_records_of_one_number_the_last_counts():
    index = Index([metric(1, 0, 0, 10.0), metric(1, 0, 0, 30.0), blind(1, 0, 0)])
    assert "1 recognisable" in judge(index, []).sentence


def test_the_verdict_names_the_time_budget_and_whom_it_stopped():
    def stopped(server_round, client):
        where = ("r", server_round, client, -1)
        return LeakageRecord(*where, "attack", "stopped_by_budget", 1.0)

    hit = [(1, 1), (3, 1), (5, 1), (2, 0), (2, 2), *((r, r) for r in (3, 4, 6))]
    records = [record for each in hit for record in (stopped(*each), objective(*each, 0.1))]
    metadata = {"config": {"server": {"attack_max_seconds": 4.0}}}
    assert judge(Index(records), [], metadata).details[1:] == (
        "The time limit of 4 CPU seconds ended the attack on 8 of 8 updates (clients 0 and 2 in "
        "round 2; client 1 in rounds 1, 3 and 5; client 3 in round 3; 2 further clients): more "
        "time may find more, and what was found there depends on the speed of the machine. "
        "That less is found in later rounds is no sign of safety where the limit ended the attack.",
    )
    assert judge(Index(records), []).details[1].startswith("The time limit ended the attack on 8")


def test_more_time_cannot_find_more_than_an_exact_or_solved_update():
    stopped = LeakageRecord("r", 1, 0, -1, "attack", "stopped_by_budget", 1.0)
    other = LeakageRecord("r", 1, 1, -1, "attack", "stopped_by_budget", 1.0)

    def told(*records):
        index = with_blind(*records, metric(1, 0, 0, 60.0), metric(1, 1, 0, 11.0))
        return ended_by_time(index, fates(index), attempts(index), None)

    assert told(stopped) == ()
    (found,) = told(stopped, other, objective(1, 0, 0.1), objective(1, 1, 0.1))
    assert "on 1 of 2 updates (client 1 in round 1): more time may find more" in found
    note = (
        "labels known; a + finish chosen: a stopped 0.2 (x); a + finish {} 0.1 in 0.5 s; b refused"
    )
    assert told(other, objective(1, 1, 0.1, note.format("solved"))) == ()
    assert told(other, objective(1, 1, 0.1, note.format("stopped")))


@pytest.mark.parametrize(("first", "beyond"), [(0, False), (1, False), (2, True)])
def test_more_originals_than_chance_are_those_that_it_reaches_in_one_run_of_twenty(first, beyond):
    # Of 15 attempts among 101 a guess finds one or more with 14 %, two or more with 1 %.
    records = [metric(1, 0, i, 11.0) for i in range(15)]
    for i in range(15):
        rank, note = 1.0 if i < first else 7.0, "of 101 images"
        where = ("r", 1, 0, i, "metric", "identification_rank")
        records.append(LeakageRecord(*where, rank, note=note))
    found = attempts(with_blind(*records))
    assert by_chance(found) == 1 and beyond_chance(found) is beyond
    assert condition_told(found).startswith("With 15 attempts, as here, at most 1 may identify")
    told = " ".join(judge(with_blind(*records), []).details)
    assert "once in 101, so 0.15 times in 15." in told


@pytest.mark.parametrize(("values", "refused"), [([None, None], True), ([None, 0.1], False)])
def test_a_run_is_refused_where_no_attack_gave_a_result(values, refused):
    records = [objective(1, client, value, "no") for client, value in enumerate(values)]
    assert fates(Index(records)).is_refused is refused
    assert not fates(Index([spared(1, 0, 9, "too many")])).is_refused


def test_a_round_in_which_nobody_is_attacked_names_no_client():
    big = [
        spared(1, client, 30 + client, f"{30 + client} images, more than 8") for client in (2, 3)
    ]
    rest = [spared(2, client, 1, "attacks run every 2 rounds") for client in range(4)]
    index = Index([objective(1, 0, 0.1), objective(1, 1, 0.1), *big, *rest])
    assert left_out(fates(index), index.sample) == (
        ["clients 2 and 3 (32 to 33 images, more than 8)"],
        ["round 2 (attacks run every 2 rounds)"],
    )


def test_an_update_is_not_explained_where_nothing_is_seen_and_noise_may_be_why():
    note = "a chosen: it came nearest"
    index = with_blind(
        metric(1, 0, 0, 14.0), metric(1, 1, 0, 11.0), objective(1, 0, 0.9, note),
        objective(1, 1, 0.8, note),
    )  # fmt: skip
    found, same = attempts(index), {(1, 0), (1, 1)}
    [told] = unexplained_told(index, fates(index), found, same, False)
    assert told.startswith("On 1 of 2 attacked updates no image") and "up to 80.0 % of" in told
    assert "(client 1 in round 1)" in told and "noise" not in told
    [told] = unexplained_told(index, fates(index), found, same, True)
    assert "as by noise, may be why, or the attack did not come so far" in told


def test_membership_is_not_among_what_was_tested_unless_it_was():
    [told] = [each for each in not_covered(IMAGE) if each.startswith("Leakage other than")]
    assert told == "Leakage other than images and labels: properties of the data set."
    assert "labels and membership: " in " ".join(not_covered(IMAGE, with_members=True))


@pytest.mark.parametrize(("corrected", "found"), [((1e-5, 0.4), 1), ((0.2, 0.4), 0)])
def test_records_found_used_ask_for_a_decision_where_no_update_was_attacked(corrected, found):
    records = [
        LeakageRecord("r", 1, 0, sample, "membership", "membership_corrected", value)
        for sample, value in enumerate(corrected)
    ]
    evidence = LeakageRecord("r", 1, 0, -1, "membership", "membership_evidence", 1.0)
    index = Index([*records, evidence])
    verdict, advice = judge(index, []), advise(index, {}, [])
    if found:
        assert advice.headline == (
            "Not without a decision: 1 of 2 tested records, or near copies, found used; no update "
            "was attacked."
        )
        assert (
            verdict.level == "partly"
            and "1 of 2 tested records, or near copies, found used" in verdict.sentence
        )
        assert advice.lines[0].text == (
            "Decide whether the server may know what was found: 1 of 2 tested records, or near "
            "copies, found used."
        )
    else:
        assert "cannot say" in advice.headline and verdict.level == "unknown"
