"""The client's mod: what it leaves alone, and where it computes."""

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from observed import SCHEDULE, SPEC, network

from flwr_leakage.flower import ClientAudit, InlineGrid, LeakageMod
from flwr_leakage.flower.arrays import read_arrays, read_reply
from flwr_leakage.flower.client_session import Session
from flwr_leakage.gradient_map import GradientMap


@pytest.fixture(autouse=True)
def _a_run():
    InlineGrid(ClientApp(), 1)  # messages can be made within a run only


@pytest.mark.parametrize("kind", ["evaluate", "query", "evaluate.custom", "query.scores"])
def test_messages_that_ask_for_no_training_pass_untouched(unchecked, kind):
    """With no arrays or several, as evaluations and queries may have."""

    def refuse(context):
        raise AssertionError("no audit is needed")

    message = Message(RecordDict({"metrics": MetricRecord({"a": 1})}), 5, kind)
    context = Context(1, 5, {}, RecordDict(), {})
    answer = object()
    seen = []

    def call_next(*call):
        seen.append(call)
        return answer

    assert LeakageMod(refuse)(message, context, call_next) is answer
    assert seen == [(message, context)]


@pytest.mark.parametrize("kind", ["train", "train.warmup"])
def test_training_does_not(kind):
    message = Message(RecordDict(), 5, kind)
    mod = LeakageMod(ClientAudit(GradientMap(network()), SPEC, SCHEDULE))
    reply = mod(message, Context(1, 5, {}, RecordDict(), {}), lambda *call: message)
    assert "expected one ArrayRecord" in reply.error.reason


def test_batches_are_kept_where_the_audits_model_is():
    """A GPU's place is taken by ``meta``, the only other device that every machine has."""
    audit = ClientAudit(GradientMap(network(), device="meta"), SPEC, SCHEDULE)
    session = Session(audit, 1, 0, Context(1, 5, {}, RecordDict(), {}))
    images, labels = torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    inputs, targets = session.encode(images, labels)
    assert inputs is images
    assert targets is labels
    kept = [session.private[0], session.defended[0]]
    assert {tensor.device.type for b in kept for tensor in (b.inputs, b.targets)} == {"meta"}


def test_arrays_are_read_to_where_the_audits_model_is():
    params, buffers = read_arrays(
        ArrayRecord(network().state_dict()), GradientMap(network(), device="meta")
    )
    assert {value.device.type for value in (*params.values(), *buffers.values())} == {"meta"}


@pytest.mark.parametrize(("dtype", "narrow"), [("float16", True), ("int32", True),
                                               ("float32", False), ("float64", False)])  # fmt: skip
def test_arrays_less_precise_than_the_models_are_named(dtype, narrow):
    state = network().state_dict()
    state["3.bias"] = state["3.bias"].to(getattr(torch, dtype))
    state["1.num_batches_tracked"] = state["1.num_batches_tracked"].double()
    model = GradientMap(network())
    *_, names = read_reply(ArrayRecord(state), model.params, model.buffers)
    assert names == (("3.bias",) if narrow else ())
