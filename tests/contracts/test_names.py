"""Parts by name in Python are those that the command builds of the same file."""

import pytest
import torch
from flwr.clientapp import ClientApp
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from flwr_leakage import Batch, LocalSchedule, Observation, Reconstruction, Update, score
from flwr_leakage._conf import conf_dir, load_part
from flwr_leakage.defenses import GradientPruning
from flwr_leakage.flower import audit
from flwr_leakage.scores import GradientNorm

FILES = [
    (group, file.stem)
    for group in ("score", "defense")
    for file in sorted((conf_dir() / group).glob("*.yaml"))
    if not any(part in file.read_text() for part in ("defaults:", "${"))
    and file.stem != "instahide_inter"  # which needs a path
]


@pytest.mark.parametrize(("group", "name"), FILES)
def test_a_part_is_built_as_hydra_builds_it(group, name):
    made = instantiate(OmegaConf.load(conf_dir() / group / f"{name}.yaml"), _convert_="all")
    assert repr(load_part(group, name)) == repr(made)


def test_scores_are_chosen_by_name_alone_or_beside_others():
    torch.manual_seed(0)
    model, inputs, targets = (
        nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
        torch.rand(2, 1, 4, 4),
        [0, 1],
    )
    assert list(score(model, inputs, targets, "gradient_norm")) == ["GradientNorm"]
    assert list(score(model, inputs, targets, ["lambda_max", GradientNorm()])) == [
        "LambdaMax", "GradientNorm",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"score must be one of .*'lavp'.*, got 'lavq'"):
        score(model, inputs, targets, ["lavq"])
    with pytest.raises(ValueError, match="got 'own_records'"):  # which needs a run's data set
        score(model, inputs, targets, "own_records")


def test_a_defense_is_chosen_by_name():
    assert audit(ClientApp(), defense="pruning")._plan.defense == GradientPruning(0.99)
    with pytest.raises(ValueError, match=r"defense must be one of .*, got 'prune'"):
        audit(ClientApp(), defense="prune")


def test_records_print_shapes_and_no_tensor():
    batch = Batch(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    update = Update({"w": torch.rand(3, 4), "b": torch.rand(3)}, {}, LocalSchedule(0.1), 2)
    seen = Observation(1, 0, {"w": torch.rand(3, 4)}, {}, update)
    assert repr(batch) == "Batch(inputs=(2, 1, 4, 4), targets=(2,))"
    for record in (batch, update, seen, Reconstruction(batch, 0.1)):
        assert "tensor(" not in repr(record) and len(repr(record)) < 500
    assert "delta={2 tensors of 15 numbers}, buffers={}" in repr(seen)
