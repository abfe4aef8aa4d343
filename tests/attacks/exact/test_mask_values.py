import pytest
import torch

from flwr_leakage.attacks.exact.mask_values import Masks, MaskValues
from flwr_leakage.attacks.exact.weight_equations import Whitened


def generator():
    return torch.Generator().manual_seed(0)


def masks_of(active):
    nowhere = torch.zeros_like(active)
    return Masks(torch.zeros(active.shape).double(), active, ~nowhere[:, 0], nowhere)


def equations_of(truth, rows=6):
    rows = torch.linalg.qr(torch.randn(truth.shape[1], rows, generator=generator()).double())[0].T
    return Whitened(rows, rows @ truth.T, torch.linspace(1, 0.1, len(rows), dtype=torch.float64))


def test_supports_beyond_the_equations_rank_are_not_determined():
    rows = torch.linalg.qr(torch.randn(20, 6, generator=generator(), dtype=torch.float64))[0].T
    rows[:, 3] = 0  # no equation sees this position
    truth = torch.rand(2, 20, generator=generator(), dtype=torch.float64) + 0.1
    truth[1, 4:] = 0
    truth[1, 3] = 0
    whitened = Whitened(rows, rows @ truth.T, torch.linspace(1, 0.1, 6, dtype=torch.float64))
    masks = masks_of(truth > 0)
    found = MaskValues().settle(whitened, masks, masks.certain)
    settled, determined = found.features, found.determined
    assert not bool(determined[0].any())
    assert bool(determined[1, :3].all())
    torch.testing.assert_close(settled[1, :3], truth[1, :3])
    assert not bool(determined[:, 3].any())
    assert bool(determined[1, 4:].all())


def test_values_are_those_of_the_mask_that_is_given_whatever_was_settled_before():
    truth = torch.zeros(1, 20, dtype=torch.float64)
    truth[0, 2:6] = torch.tensor([0.7, 1.3, 0.4, 0.9])
    equations, values = equations_of(truth), MaskValues()
    wrong = torch.zeros_like(truth, dtype=torch.bool)
    wrong[0, 3:5] = True
    one = torch.tensor([True])
    first = values.settle(equations, masks_of(wrong), one)
    again = values.settle(equations, masks_of(truth > 0), one)
    torch.testing.assert_close(again.features, truth)
    assert bool(again.determined.all())
    resettled = values.settle(
        equations, Masks(first.features, truth > 0, one, first.determined), one
    )
    torch.testing.assert_close(resettled.features, truth)
    assert torch.equal(resettled.determined, again.determined)


def test_settling_leaves_the_masks_and_other_channels_as_they_are():
    truth = torch.rand(2, 20, generator=generator(), dtype=torch.float64) + 0.1
    truth[:, 4:] = 0
    before = masks_of(truth > 0)
    found = MaskValues().settle(equations_of(truth), before, torch.tensor([False, True]))
    assert not bool(before.features.any())
    assert not bool(found.features[0].any())
    torch.testing.assert_close(found.features[1], truth[1])


@pytest.mark.parametrize(("name", "value"), [("noise", 0.0), ("precision", -1.0)])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be above 0, got {value}"):
        MaskValues(**{name: value})
