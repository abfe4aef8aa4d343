"""Which windows of a stem's max pooling share their maximum."""

import torch
from torch.nn import functional as F

from flwr_leakage.attacks.exact.pooled_stem import Groups


def grouped(entries, errors):
    """The groups of 3×3 windows of stride 2 over entries (C, H, W), and their true maxima."""
    values = F.max_pool2d(entries[None].clamp_min(0), 3, 2, 1)[0].flatten(1)
    height, width = entries.shape[1:]
    numbers = torch.arange(height * width, dtype=entries.dtype).reshape(1, 1, height, width)
    table = F.unfold(F.pad(numbers, (1, 1, 1, 1), value=-1), 3, stride=2)[0].long()
    groups = Groups.of(table, values, errors.flatten(1), height * width, 1e-9)
    is_maximum = (entries.flatten()[groups.entries] - groups.values).abs() <= 1e-9
    return groups, values, is_maximum & groups.allowed


def test_windows_that_share_a_maximum_are_one_group():
    generator = torch.Generator().manual_seed(0)
    entries = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    errors = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    groups, values, is_maximum = grouped(entries, errors)
    assert len(groups.values) == len(values[values > 0].unique()) < int((values > 0).sum())
    assert torch.equal(is_maximum.sum(1), torch.ones_like(groups.channels))
    positive = errors.flatten()[values.flatten() > 0]
    torch.testing.assert_close(groups.errors.sum(), positive.sum())


def test_no_window_is_lost_where_a_flat_area_repeats_a_value():
    entries = torch.full((1, 8, 8), -1.0, dtype=torch.float64)
    entries[0, 1, 1] = entries[0, 1, 3] = entries[0, 1, 5] = 2.0  # the windows overlap in a chain
    entries[0, 7, 7] = 3.0
    errors = torch.arange(1.0, 17.0, dtype=torch.float64).reshape(1, 4, 4)
    groups, values, is_maximum = grouped(entries, errors)
    assert is_maximum.any(1).all()
    torch.testing.assert_close(groups.errors.sum(), errors.flatten()[values[0] > 0].sum())
