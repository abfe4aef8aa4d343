"""The report tells whether what was attacked is what the clients trained."""

from dataclasses import replace

from flwr_leakage.records import LeakageRecord, RunEvent
from flwr_leakage.report.attempts import fates
from flwr_leakage.report.index import Index
from flwr_leakage.report.replays import replay_of_client, replay_told, replays
from flwr_leakage.report.tables import clients_table, unattacked_table
from flwr_leakage.report.verdict import judge


def replay(client, value, note="", server_round=1):
    return LeakageRecord(
        "run", server_round, client, -1, "check", "replay_residual", value, note=note
    )


def attacked(client, server_round=1):
    return LeakageRecord("run", server_round, client, -1, "attack", "objective", 0.5)


def told(*records):
    index = Index(records)
    fate = fates(index)
    sentences = replay_told(replays(index), {*fate.answered, *fate.unanswered})
    assert set(sentences) <= set(judge(index, []).details)
    return sentences


def test_a_client_is_told_by_rounds():
    refuted = "the captured training does not explain the update (0.44): the head; results are no"
    index = Index([
        replay(0, 0.0), replay(0, 4e-7, server_round=2), replay(1, 0.0),
        replay(2, 0.44, f"{refuted} evidence of safety"), replay(2, 0.0, server_round=2),
        replay(3, None, "the training was not replayed: no optimizer"),
        replay(5, None, f"not replayed since round 1, where {refuted}"),
    ])  # fmt: skip
    found = replays(index)
    assert [replay_of_client(found, client) for client in range(5)] == [
        "yes, rounds 1 and 2 (off by 4\u00a0×\u00a010⁻⁷)",
        "yes, round 1 (equal)",
        "no, round 1: the captured training does not explain the update (0.44): the head; yes, "
        "round 2 (equal)",
        "not checked, round 1: no optimizer",
        "not checked",
    ]
    assert replay_of_client(found, 5).startswith("no, round 1: not replayed since round 1")
    table = unattacked_table(index, [], [], 10)
    assert "a replay gives the update (before a defense)" in table.columns
    assert len(table.rows) == 5


def test_the_head_says_it_of_the_attacked_updates_only():
    (passed,) = told(attacked(0), attacked(0, 2), replay(0, 0.0), replay(0, 2e-7, server_round=2),
                     replay(1, 0.5, "does not explain"))  # fmt: skip
    assert passed.startswith("Replay check passed: each of the 2 attacked updates, as it was")
    assert "at most 2 × 10⁻⁷ of the update’s size" in passed
    failed, passed, undone = told(
        attacked(0), attacked(1), attacked(1, 2), attacked(2), replay(0, 0.0),
        replay(1, 0.4, "does not explain"), replay(1, 0.4, "does not explain", 2),
    )  # fmt: skip
    assert failed.startswith("Replay check failed for client 1 in rounds 1 and 2: ")
    assert "no evidence of safety" in failed
    assert "1 of 4 attacked updates, as it was sent, is what its client’s training" in passed
    assert undone.startswith("Replay check not done for client 2 in round 1: ")
    (undone,) = told(attacked(0))
    assert undone.startswith("Replay check not done: ")
    skipped = replace(replay(0, None, server_round=2), name="not_replayed")
    _, between = told(attacked(0), attacked(0, 2), replay(0, 0.0), skipped)
    assert between.startswith("Replay check not repeated for client 0 in round 2: the client")


def test_an_aggregate_is_as_sure_as_the_updates_in_it():
    (passed,) = told(attacked(-1), replay(0, 0.0), replay(1, 0.0), replay(1, 0.5, "x", 2))
    assert "each of the 2 attacked updates" in passed


def test_nothing_is_said_where_nothing_was_attacked():
    assert told(replay(0, 1e-6)) == ()
    assert (
        "a replay gives the update (before a defense)"
        not in clients_table(Index([]), [], [], 10).columns
    )


def test_rounds_between_replays_are_told_as_not_checked():
    skipped = LeakageRecord("run", 2, 0, -1, "check", "not_replayed", None, note="as in round 1")
    exact = LeakageRecord("run", 1, 0, -1, "check", "replay_residual", 0.0)
    found = replays(Index([exact, skipped]))
    assert replay_of_client(found, 0) == "not checked, round 2: as in round 1; yes, round 1 (equal)"


def test_a_client_that_could_not_check_says_why():
    why = "client 6 says: in round 1, whether the scored model explains the update was not checked"
    events = [RunEvent("run", 1, 6, "info", f"{why}: of its 9 samples 5 were kept.")]
    index = Index([attacked(0), attacked(1), replay(0, 9e-7), replay(1, 0.0), replay(3, 0.0)])
    found = replays(index, events)
    assert replay_of_client(found, 6) == "not checked, round 1: of its 9 samples 5 were kept"
    # A defense changes what was trained before it is sent: that is not what a replay gives.
    told, *_ = replay_told(found, {(1, 0), (1, 1)}, defended=True)
    assert "each of the 2 attacked updates, before its defense, is" in told
