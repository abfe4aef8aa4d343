import pytest
import torch

from flwr_leakage.defenses import protection_report


def test_worst_sample_class_and_decile() -> None:
    values = [0.5, 0.1, None, 0.9, 0.3] + [1.0] * 16
    targets = torch.tensor([0, 1, 1, 0, 2] + [3] * 16)
    report = protection_report(values, targets)
    assert (report.worst_sample, report.worst) == (1, 0.1)
    assert report.worst_decile == pytest.approx(0.2)
    assert report.mean == pytest.approx(17.8 / 20)
    assert report.evenness == pytest.approx(0.1 / (17.8 / 20))
    assert [(g.label, g.count) for g in report.by_class] == [(1, 1), (2, 1), (0, 2), (3, 16)]
    assert report.by_class[2].mean == pytest.approx(0.7)


def test_soft_labels_count_for_their_likeliest_class() -> None:
    report = protection_report([0.2, 0.4], torch.tensor([[0.3, 0.7], [0.6, 0.4]]))
    assert [group.label for group in report.by_class] == [1, 0]


@pytest.mark.parametrize(
    ("values", "message"), [([0.1], "equal lengths"), ([None, None], "at least one sample")]
)
def test_nothing_to_report(values: list[float | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        protection_report(values, torch.tensor([0, 1]))
