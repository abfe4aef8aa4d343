import pytest
import torch

from flwr_leakage.members.participation import attribute, participation_contrasts
from flwr_leakage.members.row_space import RowSpace


def test_contrasts_are_two_sample_statistics_of_unit_variance():
    generator = torch.Generator().manual_seed(0)
    logs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    took_part = torch.rand(6, 3, generator=generator) < 0.5
    took_part[0], took_part[1] = True, False
    found = participation_contrasts(logs, took_part)
    for record in range(5):
        for client in range(3):
            inside = took_part[:, client]
            means = logs[inside, record].mean() - logs[~inside, record].mean()
            variance = 1 / int(inside.sum()) + 1 / int((~inside).sum())
            torch.testing.assert_close(found[record, client], means / variance**0.5)


def test_the_client_is_named_from_simulated_sums():
    """Linear layer of 60 outputs, 10 clients × 3 records, sums of 5 clients with noise."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, strangers = normal(30, 100), normal(300, 100)
    owner = torch.arange(30) // 3
    rows, took_part = [], []
    for _ in range(20):
        chosen = torch.zeros(10, dtype=torch.bool)
        chosen[torch.randperm(10, generator=generator)[:5]] = True
        inside = chosen[owner]
        update = normal(60, int(inside.sum())) @ inputs[inside] + 0.5 * normal(60, 100)
        space = RowSpace.of(update, 0.5)
        energy = space.leftover(torch.cat([inputs, strangers]), torch.zeros(1))[:, 0]
        rows.append(0.5 * energy.log())
        took_part.append(chosen)
    logs, took_part = torch.stack(rows), torch.stack(took_part)
    found = attribute(logs[:, :30], logs[:, 30:], took_part)
    assert found.clients.tolist() == owner.tolist()
    assert float(found.p_values.max()) < 0.01
    assert float(found.margins.min()) > 1
    twins = torch.cat([took_part, took_part[:, :1]], 1)  # another client of the same rounds
    alike = attribute(logs[:, :30], logs[:, 30:], twins)
    assert float(alike.margins[:3].max()) < 1e-9 and float(alike.margins[3:].min()) > 1
    nobody = attribute(logs[:, 30:130], logs[:, 130:], took_part)
    assert 0.4 < float(nobody.p_values.mean()) < 0.6


def test_a_client_that_is_always_there_is_refused(unchecked):
    with pytest.raises(ValueError, match="client 0 must be in some rounds and missing from others"):
        participation_contrasts(torch.zeros(2, 1), torch.tensor([[True], [True]]))
    with pytest.raises(ValueError, match="of the same rounds, got 2 and 1"):
        participation_contrasts(torch.zeros(2, 1), torch.tensor([[True]]))
