"""Convert a captured training into the form that scores and defenses take."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.capture.inputs import infer_spec
from flwr_leakage.capture.names import NamedTensor, name_tensors
from flwr_leakage.capture.samples import (
    captured_batches,
    captured_gradient_map,
    captured_schedule,
    private_samples,
)
from flwr_leakage.capture.training import CapturedTraining
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update


@dataclass(frozen=True)
class CapturedRound:
    """A client's round in the form that scores and defenses take, as its captured training shows
    it.

    Attributes:
        gradient_map: the captured model and loss.
        spec: shapes, classes and normalisation of the inputs, given or inferred from the samples.
        schedule: the schedule of the captured steps.
        private: the samples that the steps used, in the order of use.
        params: the received parameters θ_t, by name.
        buffers: the received buffers, by name.
        raw: the update at the end of training, before mods and defenses.
    """

    gradient_map: GradientMap
    spec: InputSpec
    schedule: LocalSchedule
    private: Batch
    params: Params
    buffers: Params
    raw: Update


def read_round(
    training: CapturedTraining,
    received: Mapping[str, Tensor],
    num_examples: int,
    spec: InputSpec | None = None,
    schedule: LocalSchedule | None = None,
) -> CapturedRound:
    """Return a client's round in the form that scores and defenses take, from its captured
    training.

    ``received`` are the arrays that the server sent, and ``num_examples`` is the number of samples
    that the client reports. By default ``spec`` is inferred from the samples, and ``schedule`` is
    that of the captured steps. A given ``schedule`` is for steps that no schedule can express.

    Raises:
        ValueError: the model, the loss or the steps are of a kind that scores do not support. The
            message says which.
    """
    schedule = schedule or captured_schedule(training, num_examples)
    call = captured_batches(training)[0]
    names = name_tensors(received, training.roots)
    missing = [name for name in received if name not in names]
    if missing:
        raise ValueError(f"{missing[0]} is in no module that was called")
    gradient_map = captured_gradient_map(training, names, call)
    if not call.num_outputs and not (spec is not None and spec.next_token):
        raise ValueError("the model does not return logits (B, K)")
    start = {name: value.to(names[name].before.dtype) for name, value in received.items()}
    params, buffers = _split(start, names)
    end, end_buffers = _split({name: named.live.detach() for name, named in names.items()}, names)
    delta = {name: end[name].cpu() - params[name] for name in params}
    raw = Update(delta, {k: v.clone() for k, v in end_buffers.items()}, schedule, num_examples)
    found = spec or infer_spec(call.batch, call.num_outputs)
    private = private_samples(training, num_examples)
    return CapturedRound(gradient_map, found, schedule, private, params, buffers, raw)


def _split(state: Mapping[str, Tensor], names: Mapping[str, NamedTensor]) -> tuple[Params, Params]:
    return (
        {name: value for name, value in state.items() if names[name].is_parameter},
        {name: value for name, value in state.items() if not names[name].is_parameter},
    )
