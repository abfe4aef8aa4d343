"""With ``reproducible``, whom the wrapped strategy samples depends on seed and round only."""

import random
from uuid import uuid4

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flwr_leakage.flower import HonestButCurious, InlineGrid, ServerAudit
from flwr_leakage.flower.undisturbed import seeded_sampling
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.tracking import JsonlTracker


def _wrapped(tmp_path, seed):
    gradient_map = GradientMap(torch.nn.Linear(4, 2))
    spec, tracker = InputSpec((1, 2, 2), 2), JsonlTracker(tmp_path / uuid4().hex)
    audit = ServerAudit(gradient_map, spec, LocalSchedule(0.1), tracker, seed=seed)
    plain = FedAvg(fraction_train=0.3, fraction_evaluate=0.3)
    return HonestButCurious(plain, audit, reproducible=True)


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
    with pytest.raises(RuntimeError, match="no nodes"), seeded_sampling("seed"):
        random.random()
        raise RuntimeError("no nodes")
    assert random.getstate() == state


def test_the_weight_is_that_of_the_wrapped_strategy_also_inside_of_wrappers(tmp_path):
    plain = FedAvg(weighted_by_key="num-batches")
    private = DifferentialPrivacyServerSideFixedClipping(plain, 0.1, 1.0, 2)
    audit = _wrapped(tmp_path, 0).audit
    assert HonestButCurious(private, audit).weighted_by_key == "num-batches"
    assert HonestButCurious(private, audit, "count").weighted_by_key == "count"
    assert _wrapped(tmp_path, 0).weighted_by_key == "num-examples"


def test_what_to_do_with_bad_replies_is_one_of_two(tmp_path, unchecked):
    with pytest.raises(ValueError, match=r"bad_replies must be one of .*, got 'ignore'"):
        HonestButCurious(FedAvg(), _wrapped(tmp_path, 0).audit, bad_replies="ignore")
