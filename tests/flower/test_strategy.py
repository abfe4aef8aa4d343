"""Whom the wrapped strategy samples depends on the seed and the round only."""

import random
from uuid import uuid4

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.flower import HonestButCurious, InlineGrid, ServerAudit
from flwr_leakage.flower.strategy import _sampling
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker


def _wrapped(tmp_path, seed):
    gradient_map = GradientMap(torch.nn.Flatten())
    spec, tracker = InputSpec((1, 2, 2), 2), JsonlTracker(tmp_path / uuid4().hex)
    audit = ServerAudit(gradient_map, spec, LocalSchedule(0.1), tracker, seed=seed)
    return HonestButCurious(FedAvg(fraction_train=0.3, fraction_evaluate=0.3), audit)


def _sampled(tmp_path, phase, server_round=1, seed=0):
    configure = getattr(_wrapped(tmp_path, seed), f"configure_{phase}")
    grid = InlineGrid(ClientApp(), 20)
    messages = configure(server_round, ArrayRecord(), ConfigRecord(), grid)
    return [message.metadata.dst_node_id for message in messages]


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_the_same_seed_samples_the_same_clients(tmp_path, phase):
    chosen = _sampled(tmp_path, phase)
    assert len(chosen) == 6
    assert _sampled(tmp_path, phase) == chosen
    assert _sampled(tmp_path, phase, server_round=2) != chosen
    assert _sampled(tmp_path, phase, seed=1) != chosen


def test_the_process_wide_generator_is_left_as_it_was_even_by_an_error():
    state = random.getstate()
    with pytest.raises(RuntimeError, match="no nodes"), _sampling("seed"):
        random.random()
        raise RuntimeError("no nodes")
    assert random.getstate() == state
