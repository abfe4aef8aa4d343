"""An observed run writes to Flower's log, and records the accuracy of the app's own evaluation."""

import logging

import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from one_line import audited, client_app, run
from trained import network

from flwr_leakage.flower import observe, run_inline
from flwr_leakage.flower.log_lines import round_told
from flwr_leakage.records import InputSpec, LeakageRecord
from flwr_leakage.tracking import read_run

SPEC = InputSpec((1, 6, 6), 3, (0.5,), (0.5,))


@pytest.fixture
def lines(caplog):
    """The lines of this package in Flower's log, but for how far an attack is."""
    caplog.set_level(logging.INFO, "flwr")
    return lambda: [t for t in caplog.messages if t.startswith("flwr-leakage") and "·" not in t]


def test_each_round_has_a_line_and_the_end_says_where_the_report_lies(tmp_path, lines):
    app = audited(client_app(), truth=tmp_path / "truth")
    given = {"truth": tmp_path / "truth", "attack": "analytic", "spec": SPEC}
    run(tmp_path / "run", app, num_rounds=2, **given)
    first, second, headline, *more, report, opened = lines()
    assert first.startswith("flwr-leakage, round 1: attacked 2 of 2 clients in 0 s, ")
    assert second.startswith("flwr-leakage, round 2: attacked 2 of 2 clients in 0 s, ")
    assert headline.startswith("flwr-leakage: May training go on? ")
    page = tmp_path / "run" / "report.html"
    assert more and not any("truth=" in line for line in more)  # it was given
    assert report == f"flwr-leakage: Report: {page}"
    assert opened == f"flwr-leakage: Open it by: python -m webbrowser {page.as_uri()}"


def test_a_client_that_is_not_attacked_has_a_reason_in_the_line(tmp_path, lines):
    run(tmp_path / "run", client_app(), attack="analytic")
    assert lines()[0] == (
        "flwr-leakage, round 1: attacked none of 2 clients (a reason: it told nothing of its "
        "training; give observe a spec and a schedule)."
    )


def test_without_an_attack_only_the_end_is_told(tmp_path, lines):
    run(tmp_path / "run", audited(client_app()))
    assert [line.partition(":")[0] for line in lines()] == ["flwr-leakage"] * 4
    assert lines()[1].startswith("flwr-leakage: For clients 0 and 1: set attack=strongest")


def test_the_end_names_truth_where_only_the_originals_are_missing(tmp_path, lines):
    run(tmp_path / "run", audited(client_app()), attack="idlg", max_seconds=1, spec=SPEC)
    assert any("observe(…, truth=FOLDER)" in line for line in lines())


def record(kind, name, value, client=0, sample=-1, note=""):
    return LeakageRecord("run", 1, client, sample, kind, name, value, note=note)


def test_the_line_tells_the_worst_grade_whom_time_cut_off_and_who_was_left_out():
    records = [
        *(record("client", "images", 1.0, client) for client in range(3)),
        record("client", "not_attacked", 1.0, 2, note="more than 64"),
        record("cost", "attack_wall_seconds", 8.4, -1),
        *(record("attack", "objective", 0.5, client) for client in (0, 1)),
        record("attack", "stopped_by_budget", 1.0, 1),
        record("metric", "psnr", 60.0, 0, 0),
        record("metric", "psnr", 10.0, 1, 0),
        *(record("metric", "blind_psnr", 12.0, client, 0) for client in (0, 1)),
    ]
    assert round_told(records) == (
        "attacked 2 of 3 clients in 8 s, worst grade exact; time cut off 1 of 2 attacks; 1 not "
        "attacked (a reason: more than 64)."
    )
    unmeasured = [each for each in records if each.kind not in ("metric", "attack")]
    assert round_told([*unmeasured, record("attack", "objective", 0.5)]) == (
        "attacked 1 of 3 clients in 8 s, no grade, as the originals are not known here; 2 not "
        "attacked (a reason: more than 64)."
    )
    assert round_told(records[:3], is_kept=True) == "kept the updates of 3 clients."
    assert round_told([]) == "no update was observed (see Events in the report)."


def accuracies(data):
    return {r.server_round: (r.value, r.note) for r in data.records if r.name == "test_accuracy"}


def test_the_accuracy_of_the_clients_evaluation_is_recorded(tmp_path):
    _, data, _ = run(tmp_path / "run", audited(client_app()), num_rounds=2)
    told = 0.5, "told by the clients’ evaluation as “accuracy”"
    assert accuracies(data) == {1: told, 2: told}
    assert "50.0 %" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"acc": 0.25}, (0.25, "told by the server’s evaluation as “acc”")),
        (
            {"loss": 0.7, "acc": 25.0},
            (None, "the server’s evaluation told loss, acc: no share of 1 among them is named an "
             "accuracy"),
        ),
    ],
)  # fmt: skip
def test_the_servers_evaluation_takes_the_place_of_the_clients(tmp_path, metrics, expected):
    server = ServerApp()

    @server.main()
    def main(grid, context):
        strategy = observe(FedAvg(fraction_evaluate=1.0), network(), tmp_path / "run", attack=None)
        arrays = ArrayRecord(network().state_dict())
        evaluate = lambda server_round, arrays: MetricRecord(metrics)  # noqa: E731
        strategy.start(grid, arrays, num_rounds=1, evaluate_fn=evaluate)

    run_inline(server, audited(client_app()), 2)
    assert accuracies(read_run(tmp_path / "run")) == {0: expected, 1: expected}
