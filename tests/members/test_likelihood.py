import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage import Batch, GradientMap, InputSpec, LocalSchedule, ParameterChange, membership
from flwr_leakage.members.likelihood import RIDGES, Reference
from flwr_leakage.members.statistics import WIDTH, Sketch
from flwr_leakage.params import ravel

SPEC = InputSpec((1, 4, 4), 3)


def data(seed, count):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, 1, 4, 4, generator=generator).double()
    return Batch(inputs, torch.randint(3, (count,), generator=generator))


def gradients(model, batch):
    gradient_map = GradientMap(model)
    return torch.stack(
        [ravel(gradient_map(gradient_map.params, batch[i : i + 1])) for i in range(len(batch))]
    ).detach()


def reference_of(model, records):
    rows = gradients(model, records)
    names = tuple(name for name, _ in model.named_parameters())
    return Reference(names, rows, rows @ rows.T), rows


def by_density(row, update, others, ridge, count):
    """The log ratio of two Gaussian densities of the update, from the covariance itself."""
    scale = ridge * others.square().sum(1).mean()
    covariance = others.T @ others + scale * torch.eye(others.shape[1]).double()
    whitened = scale * torch.linalg.solve(covariance, row)
    return float(whitened @ row / (2 * count) - whitened @ update)


def test_ratios_are_those_of_gaussian_densities_with_and_without_a_record():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    reference, rows = reference_of(model, data(1, 30))
    inside = torch.tensor([4, 7, 11])
    update = GradientMap(model)(dict(model.named_parameters()), data(3, 4))
    vector = ravel(update).detach()
    update = {k: v.detach() for k, v in update.items()}
    own = gradients(model, data(2, 5))
    found = reference.compare([update, update], [None, inside], 4, own)
    rest = torch.tensor([i for i in range(30) if i not in inside.tolist()])
    for record in range(5):
        for at, ridge in enumerate(RIDGES):
            for view, known in ((0, torch.arange(30)), (1, rest)):
                expected = by_density(own[record], vector, rows[known], ridge, 4)
                assert float(found[view, record, at]) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    left_out = reference.compare([update], [inside], 4, None)
    for record in (4, 0, 29):
        known = torch.tensor([i for i in rest.tolist() if i != record])
        mean = rows[rest].square().sum(1).mean() / rows[known].square().sum(1).mean()
        expected = by_density(rows[record], vector, rows[known], RIDGES[1] * float(mean), 4)
        assert float(left_out[0, record, 1]) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_sketches_keep_inner_products_and_add_up():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 5 * WIDTH, generator=generator)
    short = Sketch(rows.shape[1])
    found = short(rows)
    error = (found @ found.T - (rows @ rows.T).double()).abs() / (5 * WIDTH)
    assert found.shape == (4, WIDTH) and float(error.max()) < 5 / WIDTH**0.5
    torch.testing.assert_close(
        short(rows.sum(0, keepdim=True))[0], found.sum(0), rtol=1e-4, atol=1e-3
    )


def test_a_convolution_whose_patches_fill_its_rows_shows_its_samples_by_the_likelihood():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(6, 3)
    )
    draw = lambda seed, count: Batch(data(seed, count).inputs.float(), data(seed, count).targets)  # noqa: E731
    members, strangers, null = draw(0, 12), draw(5, 200), draw(1, 900)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    F.cross_entropy(model(members.inputs), members.targets).backward()
    after = {k: v.detach() - 0.1 * v.grad for k, v in model.named_parameters()}
    records = Batch(
        torch.cat([members.inputs, strangers.inputs]),
        torch.cat([members.targets, strangers.targets]),
    )
    told = {"spec": SPEC, "null": null, "num_examples": 12, "schedule": LocalSchedule(0.1, 1, 12)}
    names = ["gradient_likelihood", "gradient_cosine", "gradient_difference", "loss"]
    change = ParameterChange(before, after)
    auc = {}
    for statistics in (names, names[1:]):
        p = membership(model, change, records, **told, statistics=statistics).p_values
        auc[len(statistics)] = float((p[:12, None] < p[None, 12:]).double().mean())
    assert auc[4] > auc[3] + 0.05


def test_null_records_beyond_the_reference_rank_as_those_in_it(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3))
    members, null = data(0, 12), data(1, 400)
    members = Batch(members.inputs.float(), members.targets)
    null = Batch(null.inputs.float(), null.targets)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    F.cross_entropy(model(members.inputs), members.targets).backward()
    after = {k: v.detach() - 0.1 * v.grad for k, v in model.named_parameters()}
    told = {"spec": SPEC, "null": null, "num_examples": 12, "optimizer": "Adam"}
    told |= {"schedule": LocalSchedule(0.1, 1, 12)}
    found = []
    for size, together in ((600, 512), (300, 5)):
        monkeypatch.setattr("flwr_leakage.members.verdict.LARGEST_REFERENCE", size)
        monkeypatch.setattr("flwr_leakage.members.rehearsal.TOGETHER", together)
        found.append(membership(model, ParameterChange(before, after), members, **told))
    assert found[0].null_size == found[1].null_size == 200
    # Either reference leads to much the same ranks.
    assert float((found[0].rank_p_values - found[1].rank_p_values).abs().mean()) < 0.1
