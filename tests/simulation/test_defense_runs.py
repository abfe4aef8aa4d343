"""Every defense of the configs through a run, and every error before one starts."""

import math
import sys

import numpy as np
import pytest
from audits import run, tiny_config, values

from flwr_leakage._conf import conf_dir
from flwr_leakage.defenses import dp_epsilon, gaussian_epsilon
from flwr_leakage.simulation.build import build
from flwr_leakage.simulation.config import ConfigError

OPTIONS = sorted(path.stem for path in (conf_dir() / "defense").glob("*.yaml"))
DRAWS = {
    **dict.fromkeys(("clipping", "none", "pruning", "soteria", "withhold_buffers"), False),
    **dict.fromkeys(("gaussian", "laplacian", "dp_sgd", "mixup", "instahide"), True),
}
"""Whether options draw anything, where that is known beforehand."""
SIZES = ["client.num_examples=8", "client.batch_size=4", "client.num_steps=2"]


def config_of(folder, option, *overrides):
    if option == "instahide_inter":
        images = np.random.default_rng(1).integers(0, 256, (5, 8, 8), dtype=np.uint8)
        np.savez(folder / "public.npz", images=images)
        overrides = (f"defense.public.path={folder / 'public.npz'}", *overrides)
    return tiny_config(folder, *SIZES, f"defense={option}", *overrides)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.filterwarnings("ignore:target_rmse")
def test_every_option_runs(tiny_data, option):
    data = run(config_of(tiny_data, option, "num_clients=2"))
    seeds = [event for event in data.events if "draw from a seed" in event.message]
    assert [event.level for event in seeds] == ["info"] * DRAWS.get(option, len(seeds) > 0)
    private = [event for event in data.events if "Differential privacy" in event.message]
    assert len(private) == (option == "dp_sgd")
    others = [event for event in data.events if event not in (*seeds, *private)]
    assert all("Clients train on encodings" in event.message for event in others)
    assert set(values(data, "train_cpu_seconds")) == {(r, c, -1) for r in (1, 2) for c in (0, 1)}


def test_what_encodings_do_to_the_numbers_is_told(tiny_data):
    once = config_of(tiny_data, "pruning_mixup")
    assert len(build(once).caveats()) == 1
    twice = build(config_of(tiny_data, "pruning_mixup", "client.num_steps=4"))
    assert "no sign of safety" in twice.caveats()[1]
    assert not build(config_of(tiny_data, "pruning", "client.num_steps=4")).caveats()


def test_epsilon_is_reported_by_round(tiny_data):
    data = run(config_of(tiny_data, "dp_sgd", "defense.noise_multiplier=2"))
    # In each round one step holds the sample, whose gradient moves the sum by twice the clip.
    assert values(data, "dp_epsilon_replace_one") == {
        (r, -1, -1): pytest.approx(gaussian_epsilon(math.sqrt(r), 1e-5)) for r in (1, 2)
    }
    assert not values(data, "dp_epsilon_add_or_remove")
    (told,) = [event for event in data.events if "Differential privacy" in event.message]
    assert (told.server_round, told.level) == (1, "info")
    assert "2 rounds" in told.message and "delta=1e-05" in told.message
    assert "ε = 6.57 for replace-one (a sample is another)" in told.message
    assert "ε has no finite bound for add-or-remove (a sample is there or not)" in told.message


def test_epsilon_of_poisson_sampling_is_reported_for_both_adjacencies(tiny_data):
    pytest.importorskip("opacus")
    data = run(config_of(tiny_data, "dp_sgd", "defense.sampling=poisson"))
    for adjacency in ("replace-one", "add-or-remove"):
        found = values(data, f"dp_epsilon_{adjacency.replace('-', '_')}")
        assert found == {
            (r, -1, -1): pytest.approx(dp_epsilon(1.0, 0.5, 2 * r, 1e-5, adjacency)) for r in (1, 2)
        }


def test_poisson_sampling_needs_a_schedule_that_reaches_all_samples(tiny_data):
    few = ["client.num_steps=1", "defense.sampling=poisson", "defense.delta=null"]
    with pytest.raises(ConfigError, match=r"defense: .*all 8 samples .* schedule reaches 4"):
        build(config_of(tiny_data, "dp_sgd", *few))
    other = "{p:{_target_:flwr_leakage.defenses.DPSGD,sampling:poisson,delta:null}}"
    with pytest.raises(ConfigError, match=r"what_if\.p: .*all 8 samples"):
        build(config_of(tiny_data, "none", "client.num_steps=1", f"what_if={other}"))


@pytest.mark.parametrize(
    ("option", "overrides", "said"),
    [
        ("pruning", ["defense.prune_ratio=1.5"], "prune_ratio must lie in"),
        ("gaussian", ["defense.noise_std=-1"], "noise_std must be finite and ≥ 0"),
        ("clipping", ["defense.max_norm=0"], "max_norm must be positive"),
        ("mixup", ["defense.k=9"], "k must be at most 8, the samples that are encoded at once"),
        ("mixup", ["client.num_examples=3"], "k must be at most 3"),
        ("instahide", ["client.num_examples=3"], "4 private images are mixed"),
        ("pruning_mixup", ["client.num_examples=2"], "k must be at most 2"),
        ("instahide_inter", ["defense.public.path=null"], "needs a public set"),
        ("dp_sgd", ["model=resnet8", "model.batch_norm=batch"], "gradients of single samples"),
        ("soteria", ["defense.layer=nothing"], "layer must name a linear layer"),
    ],
)
def test_what_cannot_work_is_an_error_before_the_run(tiny_data, option, overrides, said):
    with pytest.raises(ConfigError, match=f"defense: .*{said}"):
        build(config_of(tiny_data, option, *overrides))


def test_dp_sgd_needs_all_samples_of_a_round(tiny_data):
    with pytest.raises(ConfigError, match=r"client\.max_samples must be at least 8"):
        build(config_of(tiny_data, "dp_sgd", "client.max_samples=4"))


def test_what_no_step_uses_is_neither_mixed_nor_kept(tiny_data):
    experiment = build(config_of(tiny_data, "mixup", "client.num_steps=1"))
    truth = experiment.truth(1, 0, 8)
    assert len(truth.private) == len(truth.defended) == 4
    alone = build(config_of(tiny_data, "mixup", "client.num_steps=1", "client.num_examples=4"))
    assert (truth.defended.inputs - alone.truth(1, 0, 4).defended.inputs).abs().max() < 1e-6


def test_epsilon_without_opacus_is_an_error_before_the_run(tiny_data, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants.analysis", None)
    poisson = ("defense=dp_sgd", "defense.sampling=poisson")
    config = tiny_config(tiny_data, *SIZES, *poisson, name="no_opacus")
    with pytest.raises(ConfigError, match=r"defense: .*flwr-leakage\[opacus\].*delta to null"):
        build(config)


def test_mini_batches_beyond_the_limit_are_not_kept(tiny_data):
    limits = ["client.max_samples=3", "score=gradient_norm", "scoring.send=true"]
    limits.append("scoring.relative_cost=null")
    data = run(tiny_config(tiny_data, *SIZES, *limits, name="few"))
    scored = {sample for _, _, sample in values(data, "gradient_norm") if sample >= 0}
    assert scored == {0, 1, 2, 3}
