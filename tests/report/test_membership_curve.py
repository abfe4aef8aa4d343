"""The curve of members found: read off by rank, and drawn where enough tests are known."""

import torch

from flwr_leakage.records import LeakageRecord
from flwr_leakage.report.index import Index
from flwr_leakage.report.membership import members_found
from flwr_leakage.report.membership_curve import found_by_rate, membership_curve


def index_of(members, others):
    records = []
    for sample, (p, used) in enumerate([(p, 1.0) for p in members] + [(p, 0.0) for p in others]):
        for name, value in (("p_value", p), ("truth", used)):
            records.append(
                LeakageRecord("r", 1, 0, sample, "membership", f"membership_{name}", value)
            )
    return Index(records)


def test_the_curve_passes_through_the_shares_that_the_report_tells():
    draws = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    members, others = (draws[:100] ** 3).tolist(), draws[100:].tolist()
    points = dict(found_by_rate(members, others))
    for rate in (0.01, 0.1):
        told = members_found(index_of(members, others), rate)
        assert points[rate] == told.found / told.total
    shares = list(points.values())
    assert shares == sorted(shares)


def test_a_run_without_strangers_has_no_curve():
    assert membership_curve(index_of([0.01], [0.5] * 19)) is None
    chart = membership_curve(index_of([0.01], [0.5] * 20))
    assert "1 test of a record" in chart.caption and "20 tests of one" in chart.caption
    assert "var(--accent)" in chart.svg
