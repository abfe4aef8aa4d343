"""Candidates given to ``observe``, around an app that knows nothing of it."""

import pytest
import torch
from one_line import audited, client_app, run
from torch.nn import functional as F

from flwr_leakage.audit import Candidates
from flwr_leakage.records import Batch


def records(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 1, 6, 6, generator=generator)
    return Batch(inputs, torch.arange(count) % 3)


@pytest.mark.parametrize("most", [64, 1])
def test_candidates_are_tested_whether_or_not_a_client_is_attacked(tmp_path, most):
    candidates = Candidates(records(0, 4), records(1, 300), "draws of a test")
    _, data, _ = run(
        tmp_path / "run", audited(client_app()), candidates=candidates, max_samples=most
    )
    rows = {(r.client_id, r.sample) for r in data.records if r.name == "membership_p_value"}
    assert rows == {(client, sample) for client in (0, 1) for sample in range(4)}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Was this record used?" in page and "The server tested 4 records in 2 updates" in page
    assert "the server was given none to look for" not in page


def test_clients_that_tell_of_adam_are_tested_though_no_attack_takes_their_updates(tmp_path):
    candidates = Candidates(records(0, 4), records(1, 300))
    app = audited(client_app(optimizer=lambda p: torch.optim.Adam(p, 0.01)))
    _, data, _ = run(tmp_path / "run", app, candidates=candidates)
    rows = {(r.client_id, r.sample) for r in data.records if r.name == "membership_p_value"}
    assert rows == {(client, sample) for client in (0, 1) for sample in range(4)}
    evidence = [r for r in data.records if r.name == "membership_evidence"]
    assert len(evidence) == 2 and all(r.value < 2 for r in evidence)


def test_candidates_of_another_shape_are_told_and_nothing_ends(tmp_path):
    wrong = torch.zeros(30, 1, 5, 5)
    candidates = Candidates(wrong[:2], wrong)
    _, data, _ = run(tmp_path / "run", audited(client_app()), candidates=candidates)
    said = [event.message for event in data.events]
    assert any("the candidates have shape (1, 5, 5), and its inputs (1, 6, 6)" in m for m in said)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the server was given records, and could not test them for client 0" in page


def test_a_loss_of_several_labels_ends_the_exactness(tmp_path):
    def mixed(model, logits, labels):
        return 0.7 * F.cross_entropy(logits, labels) + 0.3 * F.cross_entropy(logits, labels.flip(0))

    candidates = Candidates(records(0, 4), records(1, 300))
    app = audited(client_app(loss=mixed))
    _, data, _ = run(tmp_path / "run", app, candidates=candidates)
    found = [r for r in data.records if r.name == "membership_evidence"]
    assert len(found) == 2 and all(r.value == 1 for r in found)
    assert all("trained on mixtures of its records" in r.note for r in found)


def test_candidates_as_raw_pixels_are_told_where_the_app_normalises(tmp_path):
    def pixels(seed, count):
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(count, 1, 6, 6, generator=generator)

    def warned(folder, change):
        candidates = Candidates(change(pixels(0, 4)), change(pixels(1, 30)))
        _, data, _ = run(folder, audited(client_app()), candidates=candidates)
        return [e for e in data.events if "all candidates lie in [0, 1], as pixels do" in e.message]

    (first, second) = warned(tmp_path / "raw", lambda x: x)
    assert {first.client_id, second.client_id} == {0, 1} and "mean (0.5,)" in first.message
    assert not warned(tmp_path / "normalised", lambda x: (x - 0.5) / 0.5)
