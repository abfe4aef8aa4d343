from dataclasses import replace

import pytest
import torch
from attacked import observe
from torch import nn

from flwr_leakage.attacks import AttackJob, GaussNewton
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.network.blur import blurred_relu
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel, Update
from flwr_leakage.spectral.image_prior import ImagePrior

SPEC = InputSpec((1, 8, 8), 4, (0.4,), (0.3,))
RUNS = (Annealing(factor=0.4),)
END = Settling(steps=6, products=500)
NONE = Settling(steps=0)


def images(count=1, seed=0):
    prior = ImagePrior.of(SPEC).single()
    draws = torch.randn(count, *SPEC.shape, generator=torch.Generator().manual_seed(seed))
    return Batch(SPEC.clamp(prior.inputs(draws)), torch.arange(count) % 4)


def network(pooled=False):
    torch.manual_seed(0)
    second = nn.Conv2d(6, 12, 3, padding=1)
    second.bias.data -= 0.25
    pool = nn.MaxPool2d(2) if pooled else nn.Identity()
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), pool, second, nn.ReLU(), nn.Flatten()),
        nn.Linear(12 * (16 if pooled else 64), 4),
    )


def attacked(attack, model, batch, schedule=None, share=1e-3, max_seconds=None):
    gradient_map = GradientMap(model)
    schedule = schedule or LocalSchedule(1.0, batch_size=len(batch))
    seen = observe(gradient_map, batch, schedule)
    size = share * ravel(seen.update.delta).square().mean().sqrt()
    generator = torch.Generator().manual_seed(1)
    delta = {
        k: v + size * torch.randn(v.shape, generator=generator)
        for k, v in seen.update.delta.items()
    }
    seen = Observation(1, 0, seen.params, seen.buffers, Update(delta, {}, schedule, len(batch)))
    job = AttackJob(gradient_map, SPEC, [seen], ThreatModel(), max_seconds=max_seconds)
    (result,) = attack(job)
    assert result.error == ""
    return result


def errors(attack, **settings):
    found = []
    for seed in range(2):
        batch = images(seed=seed)
        result = attacked(attack, batch=batch, **settings)
        found.append(float((result.batch.inputs - batch.inputs).norm()))
    return found


def test_the_end_brings_images_nearer():
    def attack(end):
        return GaussNewton(RUNS, products=200, rewriting=OneSample(RUNS, 200, end))

    without, settled = errors(attack(NONE), model=network()), errors(attack(END), model=network())
    assert sum(settled) < 0.8 * sum(without)


def test_the_prior_of_patches_brings_an_image_with_an_edge_nearer():
    pixels = torch.full((1, 1, 8, 8), 0.25)
    pixels[..., 4:, :] = 0.75
    batch = Batch(SPEC.normalize(pixels), torch.tensor([1]))

    def error(patches_from):
        end = replace(END, patches_from=patches_from)
        attack = GaussNewton(RUNS, products=200, rewriting=OneSample(RUNS, 200, end))
        results = [attacked(attack, network(), batch, share=share) for share in (3e-3, 1e-2, 3e-2)]
        return sum(float((result.batch.inputs - batch.inputs).norm()) for result in results)

    assert error(0.3) < 0.9 * error(2.0)


def test_an_end_that_is_less_likely_is_not_kept():
    def attack(end):
        return GaussNewton(RUNS, products=200, rewriting=OneSample(RUNS, 200, end))

    blind = replace(END, steps=1, least=100.0, most=100.0, last=100.0)
    model = network(pooled=True)
    assert errors(attack(blind), model=model) == errors(attack(NONE), model=model)


def test_the_end_fits_several_local_steps_too():
    steps = LocalSchedule(0.1, 3, 1)
    without = errors(GaussNewton(RUNS, products=300), model=network(), schedule=steps)
    end = Settling(steps=5, products=900)
    settled = errors(GaussNewton(RUNS, products=300, settling=end), model=network(), schedule=steps)
    assert settled[0] < 0.8 * without[0]


def test_products_of_several_local_steps_count_as_many_times():
    def products(steps):
        attack = GaussNewton(RUNS, products=60, settling=Settling(steps=2, products=240))
        schedule = LocalSchedule(0.1, steps, 1)
        return attacked(attack, network(), images(), schedule).stats["products"]

    assert products(3) < 0.6 * products(1)


def test_it_is_of_one_image_and_not_where_noise_explains_what_is_left():
    attack = GaussNewton(RUNS, products=60, settling=END)
    assert "settled" in attacked(attack, network(), images()).stats["stage"]
    assert "settled" not in attacked(attack, network(), images(2)).stats["stage"]
    assert "settled" not in attacked(attack, network(), images(), share=10.0).stats["stage"]


def test_the_run_before_takes_its_share_of_products():
    def products(before):
        end = Settling(steps=1, products=8, before=before)
        return attacked(GaussNewton(RUNS, products=400, settling=end), network(), images())

    assert products(0.25).stats["products"] < 0.6 * products(1.0).stats["products"]


def test_nothing_is_blurred_far_from_the_kink():
    z = torch.tensor([-8.0, 8.0], requires_grad=True)
    value = blurred_relu(z, torch.tensor(1.0))
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), z)
    assert value.tolist() == [0.0, 8.0]
    assert slope.tolist() == [0.0, 1.0]
    assert curvature.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"steps": -1}, "steps"), ({"products": 0}, "products"), ({"before": 0.0}, "before"),
     ({"last": 0.0}, "last"), ({"least": 3.0}, "ascend"), ({"patches_from": -0.1}, "from")],
)  # fmt: skip
def test_settings_out_of_range_are_named(settings, word):
    with pytest.raises(ValueError, match=word):
        Settling(**settings)


@pytest.mark.parametrize("candidates", [1, 2, 3])
def test_so_many_runs_are_gone_on_from(candidates, monkeypatch):
    begun = []

    def counted(self, model, likelihood, start, budget):
        begun.append(start.stage.partition(",")[0])
        return start

    monkeypatch.setattr(Settling, "__call__", counted)
    runs = tuple(Annealing(blur=blur, factor=0.4) for blur in (0.5, 1.0, 2.0))
    end = replace(END, candidates=candidates)
    attack = GaussNewton(runs, products=100, rewriting=OneSample(runs, 100, end))
    attacked(attack, network(), images())
    assert len(set(begun)) == len(begun) == candidates


def test_a_budget_is_shared_by_the_run_and_its_end():
    """Each step takes fewer products then, and both come to their end."""
    end = Settling(steps=6, products=100_000)
    run = (Annealing(factor=0.4),)
    attack = GaussNewton(run, products=100_000, rewriting=OneSample(run, 100_000, end))
    result = attacked(attack, network(), images(), max_seconds=2.0)
    assert result.stats["stopped"] == "budget"
    assert "settled in 7 steps" in result.stats["stage"]
