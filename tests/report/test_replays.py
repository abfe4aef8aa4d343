"""The report tells whether the audit explains what the clients sent."""

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.index import Index
from flwr_leakage.report.replays import replay_of_client, replay_warning
from flwr_leakage.report.tables import clients_table
from flwr_leakage.report.verdict import judge


def replay(client, value, note="", server_round=1):
    return LeakageRecord(
        "run", server_round, client, -1, "check", "replay_residual", value, note=note
    )


def test_a_client_is_told_by_its_last_failure_or_its_largest_residual():
    index = Index([
        replay(0, 0.0), replay(0, 4e-7, server_round=2), replay(1, 0.0),
        replay(2, 0.44, "does not explain: the head"), replay(2, 0.0, server_round=2),
        replay(3, None, "was not replayed"),
    ])  # fmt: skip
    told = [replay_of_client(index, client) for client in range(5)]
    assert told[0].startswith("explained to 4")
    assert told[1:] == [
        "explained exactly", "does not explain: the head", "was not replayed", "not captured",
    ]  # fmt: skip
    (warning,) = replay_warning(index)
    assert warning.startswith("What 2 of 4 clients trained does not explain")
    assert warning in judge(index, []).details
    table = clients_table(index, [], [], 10)
    assert "replay of its training" in table.columns
    assert len(table.rows) == 4


def test_rounds_without_a_replay_are_told():
    def skipped(client, server_round):
        return LeakageRecord("run", server_round, client, -1, "check", "not_replayed", None)

    index = Index([
        *(replay(0, 0.0, server_round=r) for r in (1, 11, 21, 31)),
        *(skipped(0, r) for r in range(32, 41)), replay(1, 2e-7), skipped(1, 2), skipped(2, 1),
    ])  # fmt: skip
    assert [replay_of_client(index, client) for client in range(3)] == [
        "explained exactly in rounds 1, 11, …, 31; not replayed in 9 others",
        "explained to 2.00 × 10⁻⁷ in round 1; not replayed in 1 other",
        "not replayed in its training",
    ]
    assert replay_warning(index) == ()
    assert len(clients_table(index, [], [], 10).rows) == 3


def test_nothing_is_said_where_all_is_explained_or_nothing_was_captured():
    assert replay_warning(Index([replay(0, 1e-6)])) == ()
    assert replay_warning(Index([])) == ()
    assert "replay of its training" not in clients_table(Index([]), [], [], 10).columns
