import math

import pytest
import torch

from flwr_leakage.attacks.inversion.likelihood import BORROWED, Groups, Likelihood


def kernels(count=4):
    """A likelihood of one convolution's weight of ``count`` kernels and a bias, without noise."""
    generator = torch.Generator().manual_seed(0)
    gradient = {
        "weight": torch.randn(count, 1, 3, 3, generator=generator, dtype=torch.float64),
        "bias": torch.randn(count, generator=generator, dtype=torch.float64),
    }
    return Likelihood.of([gradient], None), Groups([v.shape for v in gradient.values()])


def test_a_spoilt_kernel_leaves_the_others_sure():
    likelihood, groups = kernels()
    residual = torch.zeros(40, dtype=torch.float64)
    residual[:9] = 1.0
    together = likelihood.variances(residual, 1.0)
    apart = likelihood.variances(residual, 1.0, groups)
    assert torch.allclose(together[:36], torch.full((36,), 0.25, dtype=torch.float64))
    expected = torch.tensor([9 + BORROWED / 4, BORROWED / 4], dtype=torch.float64) / (9 + BORROWED)
    assert torch.allclose(apart[:36], expected[[0, 1, 1, 1]].repeat_interleave(9))


def test_groups_are_kernels_inputs_of_matrices_and_single_entries():
    shapes = [(2, 1, 3, 3), (2,), (3, 2)]
    groups = Groups([torch.Size(shape) for shape in shapes])
    numbers = groups.spread(torch.arange(6))
    assert numbers[:18].tolist() == [0] * 9 + [1] * 9
    assert numbers[18:].tolist() == [2, 3, 4, 5, 4, 5, 4, 5]
    assert groups.counts.tolist() == numbers.bincount().tolist()
    assert groups.tensors.tolist() == [0, 0, 1, 1, 2, 2]
    values = torch.randn(26, generator=torch.Generator().manual_seed(0))
    apart = torch.stack([values[numbers == group].sum() for group in range(6)])
    assert torch.allclose(groups.sums(values), apart)


def test_noise_is_the_least_variance_of_a_group():
    likelihood, groups = kernels()
    nothing = torch.zeros(40, dtype=torch.float64)
    assert torch.equal(
        likelihood.variances(nothing, 1.0, groups), likelihood.noise.square()[likelihood.tensors]
    )


def test_energies_count_no_more_equations_than_unknowns():
    likelihood, _ = kernels()
    entries, rounding = likelihood.counts, likelihood.noise
    far = 1e3 * rounding[likelihood.tensors]

    def gain(tensor, unknowns):
        better = torch.where(likelihood.tensors == tensor, far / 10, far)
        return likelihood.energy(far, unknowns) - likelihood.energy(better, unknowns)

    hundred = math.log(100)
    for tensor in (0, 1):
        assert gain(tensor, 10**6) == pytest.approx(float(entries[tensor]) * hundred, rel=1e-3)
        assert gain(tensor, 4) == pytest.approx(4 * hundred, rel=1e-3)


def test_within_the_noise_every_entry_counts():
    likelihood, _ = kernels()
    inside = 0.5 * likelihood.noise[likelihood.tensors]
    costs = [likelihood.energy(inside, n) - likelihood.energy(0 * inside, n) for n in (1, 10**6)]
    assert costs == pytest.approx([40 / 4, 40 / 4])
