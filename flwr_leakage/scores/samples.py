"""The problem of every sample on its own: its Jacobian, its gradient and its share of δ.

Convention. The released pseudo-gradient is, to first order in the learning rate,
Σᵢ wᵢ gᵢ + δ with gᵢ the gradient of sample i alone at θ_t and wᵢ its weight in the schedule: 1/B
for one step over B samples. An attacker who knows everything but sample i therefore solves
wᵢ Jᵢᵀ Δxᵢ = δ, and the sample's own perturbation is **δᵢ = δ/wᵢ**: B·δ for one step. A sample on
its own has no batch statistics, so BatchNorm keeps those of the whole batch, as constants.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.operators import FunctionJacobian, last_layer, sample_gradients
from flwr_leakage.params import Params, ravel, subtract
from flwr_leakage.records import Batch, Direction, Exposure, Measurement
from flwr_leakage.spectral import (
    EigenPairs,
    Estimate,
    gradient_start,
    largest_eigenvalue,
    last_layer_start,
)

Point = Literal["defended", "private"]
Precision = Literal["float32", "float64"]
DEFAULT_MEMORY_BYTES = 2 * 1024**3
WELL_KNOWN = 1e-2
"""Largest tolerance of λmax for which Lanczos starts from the last layer's share of JJᵀ."""
_GRAPH_COPIES = 12
"""Tensors of the size of a sample's gradient that the two graphs and a product hold, roughly."""


@dataclass(frozen=True)
class SampleProblem:
    """Some samples of a client's round, ready to be scored.

    Attributes:
        inputs: x of each of S samples, flat, (S, N).
        oracle: inputs (S, N) ↦ gradients (S, P).
        last_layer: inputs (S, N) ↦ those of the last layer's parameters.
        gradients: g of each sample, (S, P).
        deltas: δᵢ of each sample, (S, P); all zero where nothing was done to the update.
        sound: (S,) whether the sample's gradient is finite and the sample is in the schedule.
        notes: one for each sample, empty where it is sound.
        memory: what scores of the same problem share, by name.
    """

    inputs: Float[Tensor, "S N"]
    oracle: Callable[[Tensor], Tensor]
    last_layer: Callable[[Tensor], Tensor]
    gradients: Float[Tensor, "S P"]
    deltas: Float[Tensor, "S P"]
    sound: tuple[bool, ...]
    notes: tuple[str, ...]
    memory: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def operator(self) -> FunctionJacobian:
        """A = Jᵀ of each sample, built when it is first asked for."""
        if "operator" not in self.memory:
            self.memory["operator"] = FunctionJacobian(self.oracle, self.inputs)
        return self.memory["operator"]

    def start(self, generator: torch.Generator, tolerance: float) -> Float[Tensor, "S N"]:
        """A start for Krylov methods that look for the top to a relative tolerance.

        A better one than Jg pays where it must be known well.
        """
        if tolerance > WELL_KNOWN:
            return gradient_start(self.operator, generator)
        if "start" not in self.memory:
            last_layer = FunctionJacobian(self.last_layer, self.inputs)
            self.memory["start"] = last_layer_start(self.operator, last_layer, generator)
        return self.memory["start"]

    def largest(self, generator: torch.Generator, tolerance: float, max_steps: int) -> EigenPairs:
        """λmax of JJᵀ; computed once for all scores that ask for no smaller tolerance."""
        known: tuple[float, EigenPairs] | None = self.memory.get("largest")
        if known is None or known[0] > tolerance:
            start = self.start(generator, tolerance)
            pairs = largest_eigenvalue(self.operator, start, tolerance, max_steps)
            known = self.memory["largest"] = (tolerance, pairs)
        return known[1]


def validate_batch(gradient_map: GradientMap, exposure: Exposure, batch: Batch) -> None:
    """Raise ``ValueError`` where the batch is none that the model can be scored on."""
    inputs, targets = batch.inputs, batch.targets
    if not inputs.is_floating_point():
        raise ValueError(
            f"inputs must be floating-point to be differentiated, got {inputs.dtype}; convert "
            f"images to floats, and score the embeddings of tokens."
        )
    if not len(batch):
        raise ValueError("a client must have at least one sample to be scored, got none.")
    logits = gradient_map.logits(exposure.params, inputs[:2], exposure.buffers)
    num_classes = logits.shape[1] if logits.ndim > 1 else 0
    if targets.ndim == 1 and not targets.is_floating_point() and num_classes:
        lowest, highest = int(targets.min()), int(targets.max())
        if lowest < 0 or highest >= num_classes:
            raise ValueError(
                f"targets must lie in 0 … {num_classes - 1}, got {lowest} … {highest}."
            )


_shared: ContextVar[dict[Any, SampleProblem] | None] = ContextVar("shared", default=None)
_selected: ContextVar[tuple[int, ...] | None] = ContextVar("selected", default=None)


@contextmanager
def shared_work(samples: tuple[int, ...] | None) -> Iterator[None]:
    """Let the scores inside the block share their problem, and look at these samples only."""
    tokens = _shared.set({}), _selected.set(samples)
    try:
        yield
    finally:
        _shared.reset(tokens[0])
        _selected.reset(tokens[1])


def sample_problems(
    gradient_map: GradientMap,
    exposure: Exposure,
    point: Point = "defended",
    precision: Precision = "float32",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
) -> Iterator[SampleProblem]:
    """Yield the client's samples, as many at a time as fit into memory.

    Args:
        gradient_map: of the client's model and loss.
        exposure: the client's round.
        point: ``defended``: the samples as they entered training, and δ = released − raw;
            ``private``: the samples before the defense, and δ = released − the update that
            undefended training on them would have given, replayed here. The second counts
            what an encoding of the batch hides.
        precision: of all computations.
        memory_bytes: for the graphs of the samples treated together.
    """
    if point not in ("defended", "private"):
        raise ValueError(f"point must be 'defended' or 'private', got {point!r}.")
    if precision not in ("float32", "float64"):
        raise ValueError(f"precision must be 'float32' or 'float64', got {precision!r}.")
    shared = _shared.get()
    key = (id(gradient_map), id(exposure), point, precision, memory_bytes)
    if shared is not None and key in shared:
        yield shared[key]
        return
    dtype = torch.float64 if precision == "float64" else torch.float32
    batch = exposure.defended if point == "defended" else exposure.private
    validate_batch(gradient_map, exposure, batch)
    params = {name: value.to(dtype) for name, value in exposure.params.items()}
    batch = _cast(batch, dtype)
    sample_map, buffers = fixed_statistics(gradient_map, params, batch, exposure.buffers)
    delta = update_perturbation(gradient_map, exposure, point).to(dtype)
    # The first samples of the round may be all that were kept.
    weights = exposure.raw.schedule.sample_weights(exposure.raw.num_examples)[: len(batch)]
    per_sample = _GRAPH_COPIES * delta.numel() * delta.element_size()
    selected = _selected.get()
    order = torch.arange(len(batch)) if selected is None else torch.tensor(selected)
    windows = order.split(max(1, memory_bytes // max(1, per_sample)))
    for window in windows:
        part = batch[window]
        oracle = partial(
            sample_gradients,
            sample_map,
            params,
            part.targets,
            tuple(part.inputs.shape[1:]),
            buffers,
        )
        inputs = part.inputs.flatten(1)
        gradients = oracle(inputs)
        finite = gradients.isfinite().all(1)
        if not bool(finite.all()):
            # The samples share their eigendecompositions, so a stand-in takes a bad one's place.
            inputs = torch.where(finite[:, None], inputs, 0.0)
            gradients = oracle(inputs)
            if not bool(gradients.isfinite().all()):
                raise ValueError(
                    "gradients must be finite, but even an input of zeros has one that is not: "
                    "look for NaN or infinity in the parameters, the buffers or the targets."
                )
        notes = []
        for usable, weight in zip(finite.tolist(), weights[window].tolist(), strict=True):
            reason = "" if weight > 0 else "the local schedule never uses this sample"
            notes.append(reason if usable else "the gradient of this sample is not finite")
        safe = torch.where(weights[window] > 0, weights[window], 1.0).to(delta)
        problem = SampleProblem(
            inputs,
            oracle,
            partial(oracle, names=last_layer(params)),
            gradients,
            delta[None] / safe[:, None],
            tuple(not note for note in notes),
            tuple(notes),
        )
        # Several windows mean that memory is short: each is dropped before the next.
        if shared is not None and len(windows) == 1:
            shared[key] = problem
        yield problem


def fixed_statistics(
    gradient_map: GradientMap, params: Params, batch: Batch, buffers: Params
) -> tuple[GradientMap, Params]:
    """Return a map for single samples, with BatchNorm by the statistics of ``batch``."""
    if gradient_map.batch_norm != "batch":
        return gradient_map, buffers
    statistics = gradient_map.statistics(params, batch.inputs, buffers)
    return gradient_map.with_batch_norm("running"), {**buffers, **statistics}


def update_perturbation(
    gradient_map: GradientMap, exposure: Exposure, point: Point
) -> Float[Tensor, " P"]:
    """δ: the released pseudo-gradient minus the one without the defense, in float64."""
    released = exposure.released.pseudo_gradient()
    if point == "defended":
        reference = exposure.raw.pseudo_gradient()
    else:
        schedule = exposure.raw.schedule
        used = schedule.num_samples_used(exposure.raw.num_examples)
        if len(exposure.private) < used:
            raise ValueError(
                f"point='private' replays the training on its {used} samples, but only the first "
                f"{len(exposure.private)} were kept: raise max_samples."
            )
        delta = local_update(
            gradient_map, exposure.params, exposure.private, schedule, exposure.buffers
        )
        reference = {k: -v.detach() / schedule.learning_rate for k, v in delta.items()}
    difference = subtract(
        {name: value.double() for name, value in released.items()},
        {name: value.double() for name, value in reference.items()},
    )
    return ravel({name: difference[name] for name in exposure.params})


def measurement(
    name: str,
    values: list[float | None],
    notes: list[str],
    unit: str,
    direction: Direction,
    products: int,
) -> Measurement:
    """Build a measurement; a value that is not finite becomes ``None`` with a note."""
    clean: list[float | None] = []
    for index, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            notes[index] = notes[index] or f"no number: {value}"
            value = None
        clean.append(value)
    kept = tuple(notes) if any(notes) else ()
    return Measurement(name, tuple(clean), unit, direction, kept, products)


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    targets = batch.targets
    return Batch(
        batch.inputs.to(dtype), targets.to(dtype) if targets.is_floating_point() else targets
    )


def from_estimate(
    problem: SampleProblem, estimate: Estimate, bound: str
) -> tuple[list[float | None], list[str]]:
    """Values and notes of an estimate: what did not converge is no number but a bound."""
    values: list[float | None] = []
    notes: list[str] = []
    for sample, sound in enumerate(problem.sound):
        value = float(estimate.value[sample])
        resolved = bool(estimate.converged[sample])
        values.append(value if sound and resolved else None)
        unresolved = f"unresolved: {bound} {value:.3g} ({estimate.method})"
        notes.append(problem.notes[sample] or ("" if resolved else unresolved))
    return values, notes
