import pytest
import torch

from flwr_leakage.attacks.exact.known import Known, Mask, outer_product


def test_units_are_gated_by_their_states():
    mask = Mask(torch.tensor([True, False, False]), torch.tensor([False, True, False]))
    values, own = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    assert mask.gate(values, own).tolist() == [1.0, 0.0, 6.0]
    assert mask.open.tolist() == [False, False, True]
    assert not bool(Mask.of(mask.on).open.any())


def test_parts_and_shapes_of_what_is_known_keep_its_states():
    on = torch.tensor([[True, False], [True, True]])
    known = Known(torch.rand(2, 2), torch.tensor([[0.0, 0.0], [torch.inf, 0.0]]), Mask.of(on))
    assert known.valued.tolist() == [[True, False], [False, True]]
    assert known.map(lambda each: each[1]).valued.tolist() == [False, True]
    assert known.map(lambda each: each.reshape(1, 4)).mask.on.tolist() == [on.flatten().tolist()]
    nothing = Known.nothing(known.values)
    assert bool(nothing.mask.open.all())
    assert not bool(nothing.told.any())


def test_the_outer_product_is_that_of_least_squares():
    generator = torch.Generator().manual_seed(0)
    row = torch.cat([torch.rand(1, 9, generator=generator), torch.ones(1, 1)], 1)
    truth = (torch.randn(4, 1, generator=generator) @ row).double()
    observed = truth + 0.05 * torch.randn(truth.shape, generator=generator)
    error, features, deviations = outer_product(observed, torch.full_like(observed, 400.0))
    u, s, v = torch.linalg.svd(observed)
    best = s[0] * u[:, :1] @ v[:1]
    found = error[:, None] * torch.cat([features, features.new_ones(1)])
    torch.testing.assert_close(found, best, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(deviations, (0.05 / error.norm()).expand(9))
    weights = torch.ones_like(truth)
    weights[0, 0], observed = 1e-12, truth.clone()
    observed[0, 0] += 10
    _, features, _ = outer_product(observed, weights)
    torch.testing.assert_close(features, truth[1, :-1] / truth[1, -1])


def test_entries_without_weight_are_told_by_the_others():
    error, row = (
        torch.tensor([2.0, -1.0, 0.5]).double(),
        torch.tensor([3.0, 5.0, 7.0, 1.0]).double(),
    )
    kept = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]).double()
    found = outer_product(kept * torch.outer(error, row), kept)
    assert found[0].tolist() == pytest.approx([2.0, -1.0, 0.0])
    assert found[1].tolist() == pytest.approx([3.0, 5.0, 0.0])
    assert found[2].isfinite().tolist() == [True, True, False]


def test_a_product_without_a_scale_is_refused():
    observed = torch.ones(2, 3)
    observed[:, -1] = 0
    with pytest.raises(ValueError, match="does not tell the scale"):
        outer_product(observed, torch.ones(2, 3))
