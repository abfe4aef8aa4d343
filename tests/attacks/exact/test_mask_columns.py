import torch

from flwr_leakage.attacks.exact.batch_masks import settle_masks

UNITS, SAMPLES, DIRECTIONS = 200, 12, 4


def layer():
    """Errors of samples that a ReLU masks, an orthonormal basis of their span, and W₂ᵀ V₂."""
    generator = torch.Generator().manual_seed(0)
    behind = torch.randn(UNITS, DIRECTIONS, generator=generator, dtype=torch.float64)
    behind = behind * torch.tensor([1.0, 0.5, 0.1, 0.02])  # far from orthonormal
    masks = torch.rand(UNITS, SAMPLES, generator=generator) < 0.5
    mixtures = torch.randn(DIRECTIONS, SAMPLES, generator=generator, dtype=torch.float64)
    errors = masks * (behind @ mixtures)
    return errors, masks, behind, torch.linalg.qr(errors).Q


def test_masks_that_are_partly_wrong_lead_to_the_samples_errors():
    errors, masks, behind, left = layer()
    flips = torch.rand(masks.shape, generator=torch.Generator().manual_seed(1)) < 0.15
    found = settle_masks(left, behind, (masks ^ flips).T)
    starts, columns, misfits = zip(*found, strict=True)
    assert len(starts) == SAMPLES
    assert max(misfits) < 1e-12
    angles = (torch.stack(columns) @ (errors / errors.norm(dim=0))).abs()
    assert angles.argmax(1).tolist() == list(starts)
    torch.testing.assert_close(angles.amax(1), torch.ones(SAMPLES).double())


def test_masks_of_nothing_are_left_out():
    _, masks, behind, left = layer()
    few = torch.zeros(2, UNITS, dtype=torch.bool)
    few[1, : DIRECTIONS + 2] = True  # four numbers fit any six units
    found = settle_masks(left, behind, torch.cat([few, masks.T[:1]]))
    assert [start for start, *_ in found] == [2]
    assert settle_masks(left, behind, few) == []
