"""Records of a run, made by hand, for what a report tells of them."""

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.index import Index


def metric(server_round, client_id, sample, value, name="psnr", note=""):
    return LeakageRecord(
        "r", server_round, client_id, sample, "metric", name, value, "dB", "", note
    )


def score(server_round, client_id, sample, value, direction="larger leaks more", name="s"):
    return LeakageRecord("r", server_round, client_id, sample, "score", name, value, "1", direction)


def objective(server_round, client_id, value, note=""):
    return LeakageRecord(
        "r", server_round, client_id, -1, "attack", "objective", value, "1", "", note
    )


def column(table, name):
    return [row[table.columns.index(name)] for row in table.rows]


def blind(server_round, client_id, sample, value=12.0):
    return metric(server_round, client_id, sample, value, "blind_psnr")


def with_blind(*records):
    """The records, with a blind guess of 12 dB for every sample."""
    keys = {(r.server_round, r.client_id, r.sample) for r in records}
    return Index([*records, *(blind(*key) for key in keys)])


def spared(server_round, client_id, images, reason):
    return LeakageRecord(
        "r", server_round, client_id, -1, "client", "not_attacked", images, "image", "", reason
    )
