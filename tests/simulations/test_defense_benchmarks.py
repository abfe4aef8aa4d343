"""The defense experiments keep their books right."""

import pytest
import torch

from flwr_leakage.attacks import LBFGS, Euclidean, GradientInversion
from flwr_leakage.attacks.inversion.objectives import Masked
from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import Chain, GradientPruning, InstaHide, MixUp, NoDefense
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.models import LeNet
from flwr_leakage.randomness import Reproducible
from simulations.benchmarks.defense_lab import train
from simulations.benchmarks.defense_table import Study, mixing_defense, mixing_matrix
from simulations.benchmarks.defense_times import ratios


def make_data(count: int) -> ImageDataset:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(256, (count, 1, 3, 3), generator=generator).float()
    images = torch.nn.functional.interpolate(coarse, size=(12, 12), mode="bilinear")
    labels = torch.arange(count) % 3
    return ImageDataset("blobs", images.byte(), labels, ("a", "b", "c"), (0.5,), (0.25,))


def make_map() -> GradientMap:
    torch.manual_seed(0)
    return GradientMap(LeNet((1, 12, 12), 3, num_convolutions=2, activation="tanh"))


@pytest.mark.parametrize(
    "defense", [MixUp(3), InstaHide(3), Chain([InstaHide(4), GradientPruning(0.9)])]
)
def test_the_mapping_given_to_the_attacker_is_the_clients(defense) -> None:
    private = make_data(8).batch(range(8))
    draws = Reproducible.from_seed(5, server_round=2, purpose="encode")
    encoded = defense.on_batch(private, 3, draws)
    weights = mixing_matrix(mixing_defense(defense), 8, 5, 2)
    expected = (weights @ private.inputs.flatten(1)).abs()
    torch.testing.assert_close(encoded.inputs.flatten(1).abs(), expected, rtol=1e-4, atol=1e-5)


def test_training_learns_and_repeats() -> None:
    data = make_data(48)
    runs = [
        train(
            make_map(),
            data,
            data,
            NoDefense(),
            rounds=60,
            clients=2,
            batch_size=8,
            learning_rate=0.3,
            seed=1,
            checkpoints=(0, 5, 60),
        )
        for _ in range(2)
    ]
    assert runs[0].accuracy > 0.5
    assert list(runs[0].checkpoints) == [0, 5, 60]
    assert runs[0].checkpoints[60] is runs[0].params
    assert all(torch.equal(runs[0].params[k], runs[1].params[k]) for k in runs[0].params)


@pytest.mark.parametrize("defense", [NoDefense(), MixUp(3)])
def test_undefended_and_mixed_images_are_recovered(defense) -> None:
    data = make_data(6)
    gradient_map = make_map()
    study = Study(gradient_map, data, Evaluator(), epochs=3, seed=0)
    attack = GradientInversion(
        objective=Masked(Euclidean()),
        optimizer=LBFGS(iterations=60),
        dtype="float64",
        batching="vmap",
    )
    cell = study.cell(defense, data.batch(range(6)), 1, attack)
    assert cell["psnr"]["mean"] > 20


def test_momentum_is_that_of_the_servers_optimizer() -> None:
    data, gradient_map = make_data(8), make_map()
    settings = {"clients": 1, "batch_size": 8, "learning_rate": 0.1, "seed": 1}
    first = train(gradient_map, data, None, NoDefense(), rounds=1, **settings).params
    second = train(gradient_map, data, None, NoDefense(), rounds=2, **settings).params
    pushed = train(gradient_map, data, None, NoDefense(), rounds=2, momentum=0.9, **settings).params
    for name, start in gradient_map.params.items():
        expected = second[name] + 0.9 * (first[name] - start)
        torch.testing.assert_close(pushed[name], expected)


def test_times_are_ratios_within_a_turn() -> None:
    machine_load = iter([9.0, 1.0, 2.0, 4.0])

    def blocks():
        load = 1.0

        def none() -> float:
            nonlocal load
            load = next(machine_load)
            return load

        return {"none": none, "slow": lambda: 1.5 * load}

    assert ratios(blocks(), 3) == {"none": (1.0, 1.0, 1.0), "slow": (1.5, 1.5, 1.5)}
