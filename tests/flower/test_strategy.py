"""Whom the wrapped strategy samples depends on the seed and the round only."""

import random
from uuid import uuid4

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.flower import HonestButCurious, InlineGrid, ServerAudit
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker


def _wrapped(tmp_path, strategy, seed=0):
    gradient_map = GradientMap(torch.nn.Flatten())
    spec, tracker = InputSpec((1, 2, 2), 2), JsonlTracker(tmp_path / uuid4().hex)
    audit = ServerAudit(gradient_map, spec, LocalSchedule(0.1), tracker, seed=seed)
    return HonestButCurious(strategy, audit)


def _sampled(tmp_path, phase, server_round=1, seed=0):
    strategy = FedAvg(fraction_train=0.3, fraction_evaluate=0.3)
    configure = getattr(_wrapped(tmp_path, strategy, seed), f"configure_{phase}")
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


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_the_process_wide_generator_is_left_as_it_was_even_by_an_error(tmp_path, phase):
    class Broken(FedAvg):
        def configure_train(self, *args):
            raise RuntimeError("no nodes")

        configure_evaluate = configure_train

    wrapped, grid = _wrapped(tmp_path, Broken()), InlineGrid(ClientApp(), 1)
    state = random.getstate()
    with pytest.raises(RuntimeError, match="no nodes"):
        getattr(wrapped, f"configure_{phase}")(1, ArrayRecord(), ConfigRecord(), grid)
    assert random.getstate() == state
