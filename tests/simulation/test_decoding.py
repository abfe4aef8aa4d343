"""A server that knows the mixing decodes MixUp and InstaHide over rounds of the same samples."""

import pytest
from audits import run, tiny_config, values

from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError

MIXED = [
    "num_clients=1",
    "num_rounds=3",
    "client.num_examples=4",
    "client.batch_size=4",
    "client.same_samples=true",
    "threat.labels=known",
    "attack.optimizer.iterations=60",
    "attack.box=false",
    "model=mlp",
    "model.network.hidden_features=[256]",
    "model.network.activation=sigmoid",
]


# Decoded signs follow from neighbouring pixels, so that InstaHide needs real images.
@pytest.mark.parametrize(
    ("overrides", "decibels"),
    [(["defense=mixup"], 3), (["defense=instahide", "dataset=embedded_mnist"], 1)],
)
def test_decoded_leakage_grows_with_the_rounds(tiny_data, overrides, decibels):
    config = tiny_config(tiny_data, *MIXED, *overrides, "defense.k=2", "threat.mixing=known")
    found = run(config)
    counts = values(found, "decoded_encodings")
    assert [counts[round_, 0, -1] for round_ in (1, 2, 3)] == [4, 8, 12]

    def mean(name, server_round):
        return sum(values(found, name)[server_round, 0, i] for i in range(4)) / 4

    pictures = {(i.server_round, i.sample) for i in found.images if i.role == "decoded"}
    assert pictures == {(number, i) for number in (1, 2, 3) for i in range(4)}
    assert mean("decoded_psnr", 3) > mean("psnr", 3) + decibels
    assert mean("decoded_psnr", 3) >= mean("decoded_psnr", 1) - 1e-6


def test_without_the_mixing_nothing_is_decoded(tiny_data):
    found = run(tiny_config(tiny_data, *MIXED, "defense=mixup", "defense.k=2", "num_rounds=1"))
    assert values(found, "psnr") and not values(found, "decoded_psnr")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["defense=none"], "threat.mixing must be unknown unless the defense mixes"),
        (["defense=mixup", "client.same_samples=false"], "unless client.same_samples=true"),
        (["defense=mixup", "threat.labels=inferred"], "mixing='known' takes labels='known'"),
    ],
)
def test_what_cannot_be_decoded_is_refused(tiny_data, overrides, said):
    with pytest.raises(ConfigError, match=said):
        build(tiny_config(tiny_data, *MIXED, "threat.mixing=known", *overrides))
