"""Hold the samples of a client's round, with intermediate results that all of its scores share."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import BudgetExhausted, Meter
from flwr_leakage.per_sample.embedded import on_embeddings
from flwr_leakage.per_sample.loss_factors import loss_weights
from flwr_leakage.per_sample.perturbation import Point, scale_note, update_perturbation
from flwr_leakage.per_sample.problem import SampleProblem
from flwr_leakage.per_sample.route import differentiable
from flwr_leakage.per_sample.samples import Samples, separate
from flwr_leakage.per_sample.second_derivative import (
    SecondDerivative,
    check_second_derivative,
    product_is_right,
)
from flwr_leakage.records import Batch, Exposure

Precision = Literal["float32", "float64"]
DEFAULT_MEMORY_BYTES = 2 * 1024**3
_DTYPES = {"float32": torch.float32, "float64": torch.float64}
MOST_ROUNDING = 1e-3
"""Largest rounding error, relative to ‖J‖, in a product with a sample's Jacobian J at which the
sample is still computed in float32. A sample with a larger error is computed in float64. So a
smaller limit is more exact, and costs time and memory."""
LEAST_SLOPE = 1e-17
"""Least norm ‖∂L/∂z‖ of the loss's gradient by the logits at which a sample is computed in float32.
Below it, squares of the entries of the sample's Jacobian would underflow, so that float64 is
used."""
NOT_FINITE = "the gradient of this sample is not finite"
NOT_USED = "the local schedule never uses this sample"
_CHECKED = 8
"""Number of a round's first samples among which one is chosen, on which the model's second
derivatives are checked. It is the one that rounding affects least. More samples cost more forward
passes."""
_GRAPH_COPIES = 12
"""Approximate memory of one sample's two autograd graphs and a product, in units of the size of its
gradient. The value tells how many samples are computed together. If it is too small, memory may run
out."""


class ClientSamples:
    """The samples of a client's round, with the gradients and Jacobians that its scores share.

    If the model supports it, texts are replaced by the embeddings of their tokens.

    Gradients and Jacobians (a ``SampleProblem``) are kept for the next score that asks for the same
    samples, before or after the defense, in the same precision. The result of the check of second
    derivatives is kept, too.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        exposure: the private data of the client's round, or of the samples that are to be scored.
        seed: the seed of the start vectors of Krylov methods, which the scores share.
        meter: the meter that counts the Jacobian products of all scores, and stops them when a
            budget is spent.
    """

    def __init__(
        self,
        gradient_map: GradientMap,
        exposure: Exposure,
        seed: int = 0,
        meter: Meter | None = None,
    ) -> None:
        self._gradient_map = gradient_map
        self._routed = False
        try:
            self.exposure = on_embeddings(gradient_map, exposure)
        except ValueError:
            self.exposure = exposure  # each score reports it, see ``_validate``
        self.seed = seed
        self.meter = Meter() if meter is None else meter
        self._kept: dict[tuple[Point, Precision], tuple[SampleProblem, ...]] = {}
        self._model = _Model()

    def __len__(self) -> int:
        return len(self.exposure.indices)

    @property
    def gradient_map(self) -> GradientMap:
        """Return the client's gradient map, differentiated by ``torch.func``, or else by plain
        autograd, one sample at a time.
        """
        if not self._routed:
            exposure = self.exposure
            params, buffers, batch = exposure.params, exposure.buffers, exposure.whole.defended
            self._gradient_map = differentiable(self._gradient_map, params, buffers, batch)
            self._routed = True
        return self._gradient_map

    def select(self, places: Sequence[int]) -> "ClientSamples":
        """Return the samples at some places in ``exposure``, with the meter and the batch
        statistics of all samples.
        """
        part = copy.copy(self)  # the copy shares the model, and the findings on its derivatives
        part.exposure, part._kept = self.exposure.select(places), {}
        return part

    def problems(
        self,
        point: Point = "defended",
        precision: Precision = "float32",
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        extra_bytes: int = 0,
    ) -> Iterator[SampleProblem]:
        """Yield the samples with their gradients and Jacobians, as many at a time as memory allows.

        Each sample comes once, in the order of ``exposure.indices``. Those of which the model is so
        sure that their gradients would drown in float32's rounding (see ``Samples.rounding``) come
        last, in float64.

        Args:
            point: with ``defended``, the samples are those that entered training, and the
                perturbation is δ = released update − update before the defense. With ``private``,
                the samples are those before the defense, and δ = released update − the update of
                undefended training on them. Only the latter includes the effect of a defense that
                encodes samples.
            precision: the precision of all computations; see above for an exception in ``float32``.
            memory_bytes: the most bytes for the autograd graphs of the samples processed together.
            extra_bytes: the bytes that each sample needs beside its graphs, which count, too.
        """
        _check_choices(point, precision)
        entries = sum(value.numel() for value in self.exposure.params.values())
        one = _GRAPH_COPIES * entries * (8 if precision == "float64" else 4) + extra_bytes
        size = max(1, memory_bytes // max(1, one))
        if len(self) <= size and (point, precision) in self._kept:
            yield from self._kept[point, precision]
            return
        made = self._windows(point, precision, size)
        if not self._routed:
            self._routed = True  # an error in the first gradients sets it back
            try:
                first = next(made, None)
            except BudgetExhausted:
                raise
            except Exception:  # torch.func may raise any error
                self._routed = False
                if not self.gradient_map.one_by_one:
                    raise
                self._model, made = _Model(), self._windows(point, precision, size)
                first = next(made, None)
            if first is None:
                return
            yield first
        yield from made

    def _windows(self, point: Point, precision: Precision, size: int) -> Iterator[SampleProblem]:
        """Yield groups of at most ``size`` samples, each with its gradients and Jacobians. A group
        of all samples is kept for the next score.
        """
        delta = update_perturbation(self.gradient_map, self.exposure, point)
        kept = []
        for dtype, samples, places, rounding in self._by_dtype(point, precision):
            for window in places.split(size if dtype == _DTYPES[precision] else (size + 1) // 2):
                indices = tuple(self.exposure.indices[place] for place in window.tolist())
                problem = _problem(
                    samples[window],
                    indices,
                    delta.to(dtype),
                    rounding[window],
                    self.seed,
                    self.meter,
                    self.derivable,
                    self.exposure.raw.schedule.num_steps == 1,
                )
                # If the samples do not fit together, memory is short, so that each window is
                # dropped before the next one is made.
                kept += [problem] if len(self) <= size else []
                yield problem
        if kept:
            self._kept[point, precision] = tuple(kept)

    def _by_dtype(
        self, point: Point, precision: Precision
    ) -> Iterator[tuple[torch.dtype, Samples, Tensor, Tensor]]:
        """Yield for each dtype in use: the dtype; the samples to score in this dtype; the indices
        of those among them that are to be computed in it; and the rounding error of a product with
        each sample's Jacobian, relative to the Jacobian's norm.
        """
        dtype, double = _DTYPES[precision], torch.float64
        samples = self._of_type(point, dtype)
        relative, slopes = samples.rounding()
        lost = (relative > MOST_ROUNDING) | (slopes < LEAST_SLOPE)
        lost &= torch.tensor(dtype != double)
        everyone = torch.arange(len(self))
        if not bool(lost.all()):
            yield dtype, samples, everyone[~lost], relative
        if bool(lost.any()):
            samples = self._of_type(point, double)
            yield double, samples, everyone[lost], samples.rounding()[0]

    def samples(self, point: Point = "defended", precision: Precision = "float32") -> Samples:
        """Return the samples to score, whose gradients can be computed one by one, with the round's
        BatchNorm statistics. ``point`` is ``defended`` for the samples that entered training, or
        ``private`` for those before the defense. ``precision`` is that of the samples and
        parameters.
        """
        _check_choices(point, precision)
        return self._of_type(point, _DTYPES[precision])

    def _of_type(self, point: Point, dtype: torch.dtype) -> Samples:
        exposure, whole = self.exposure, self.exposure.whole
        if point == "defended":
            shown, batch = exposure.defended, whole.defended
        else:
            shown, batch = exposure.private, whole.private
        _validate(self.gradient_map, exposure, shown)
        separated = self._model.separated
        if (point, dtype) not in separated:
            weights = loss_weights(self.gradient_map, whole, batch)
            params, buffers = exposure.params, exposure.buffers
            separated[point, dtype] = separate(
                self.gradient_map, params, buffers, batch, weights, dtype
            )
        return separated[point, dtype][list(exposure.indices)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences for the user on how samples were scored, such as one at a time."""
        model, notes = self._model, []
        for (point, _), samples in model.separated.items():
            note = scale_note(self.exposure, samples.weights) if point == "defended" else ""
            notes += [note] if note and note not in notes else []
        if self.gradient_map.uses_batch_statistics:
            notes.append(
                "BatchNorm in train mode: a sample is scored with the statistics of its whole "
                "batch, which are held constant"
            )
        slow = self.gradient_map.one_by_one or (model.second.one_by_one if model.second else "")
        if slow:
            notes.append(f"samples were differentiated one by one, which is slower: {slow}")
        return tuple(notes)

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return sentences on why the scores so far may be wrong; empty if there is no doubt."""
        second = self._model.second
        if second is None or not second.unchecked:
            return ()
        return (f"the second derivative of the model was not checked: {second.unchecked}",)

    def derivable(self, problem: SampleProblem | None = None) -> str:
        """Return why second derivatives need plain autograd, or an empty text if ``torch.func``
        computes them rightly. The check is made once.

        Args:
            problem: samples to be scored; one product with their Jacobian is a cheaper check.

        Raises:
            ValueError: second derivatives are wrong by ``torch.func`` and by plain autograd.
        """
        if self._model.second is None and problem is not None and _seen_right(problem):
            self._model.second = SecondDerivative()
        if self._model.second is None:
            every = self._of_type("defended", torch.float64)
            places = every.inputs.isfinite().all(1).nonzero()[:_CHECKED, 0]
            if not len(places):
                return ""  # there is no sample to check, and none will get a number
            finite = every[places]
            # The sample that rounding affects least is checked: the one of which the model is least
            # sure.
            best = finite.rounding()[0].argmin()[None]
            self._model.second = check_second_derivative(finite[best], self.seed)
        if self._model.second.fault:
            raise ValueError(self._model.second.fault)
        return self._model.second.one_by_one


@dataclass
class _Model:
    """Results on a model that all samples of a round, and all selections of them, share.

    Attributes:
        separated: all samples of the round, each of which can be differentiated without the others.
            The key is a pair (point, dtype). The point is ``defended`` or ``private``, for samples
            with or without the defense's changes.
        second: the result of the check of the model's second derivatives; ``None`` before it.
    """

    separated: dict[tuple[Point, torch.dtype], Samples] = field(default_factory=dict)
    second: SecondDerivative | None = None


def _seen_right(problem: SampleProblem) -> bool:
    """Return whether one product with the Jacobian of a sample's gradient confirms the model's
    second derivatives. If not, they may still be right.
    """
    sound = [place for place, note in enumerate(problem.notes) if note != NOT_FINITE]
    if not sound:
        return False
    rounding = problem.rounding.tolist()
    # The sample that rounding affects least is tried: the one of which the model is least sure.
    best = min(sound, key=rounding.__getitem__)
    try:
        start, product = problem.unchecked_product
        sample = problem.samples[[best]]
        return product_is_right(sample, rounding[best], start[best], product[best])
    except BudgetExhausted:
        raise
    except Exception:  # torch.func may raise any error; check_second_derivative tells the reason
        return False


def _check_choices(point: Point, precision: Precision) -> None:
    if point not in get_args(Point):
        raise ValueError(f"point must be 'defended' or 'private', got {point!r}.")
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be 'float32' or 'float64', got {precision!r}.")


def _problem(
    samples: Samples,
    indices: tuple[int, ...],
    delta: Tensor,
    rounding: Tensor,
    seed: int,
    meter: Meter,
    derivable: Callable[[SampleProblem], str],
    single_step: bool,
) -> SampleProblem:
    """Return S samples with their gradients and perturbations, ready to be scored.

    A sample that cannot be scored gets a note with the reason. ``delta`` (P,) is the defense's
    perturbation of the update's pseudo-gradient. The other arguments are fields of
    :class:`SampleProblem`.

    Raises:
        ValueError: even an input of zeros has a gradient that is not finite.
    """
    gradients = samples.gradients()
    finite = gradients.isfinite().all(1)
    if not bool(finite.all()):
        samples = samples.with_inputs(torch.where(finite[:, None], samples.inputs, 0.0))
        gradients = samples.gradients()
        if not bool(gradients.isfinite().all()):
            raise ValueError(
                "gradients must be finite, but even an input of zeros has one that is not: "
                "look for NaN or infinity in the parameters, the buffers or the targets."
            )
    used = samples.weights > 0
    notes = tuple(
        NOT_FINITE if not sound else "" if uses else NOT_USED
        for sound, uses in zip(finite.tolist(), used.tolist(), strict=True)
    )
    deltas = delta[None] / torch.where(used, samples.weights, 1.0).to(delta)[:, None]
    shared = rounding, seed, meter, derivable, single_step
    return SampleProblem(samples, indices, gradients, deltas, notes, *shared)


def _validate(gradient_map: GradientMap, exposure: Exposure, batch: Batch) -> None:
    """Raise ``ValueError`` if no score can be computed of the samples in ``batch``, such as for
    targets that are no classes of the model.
    """
    inputs, targets = batch.inputs, batch.targets
    if not inputs.is_floating_point():
        on_embeddings(gradient_map, exposure)  # raises an error with the reason
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
