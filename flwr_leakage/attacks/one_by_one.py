"""Attack one observation after another, with steps that many attacks have in common.

Before an attack, :func:`unscaled` divides the update by the factor by which the client scaled it.
After an attack, :func:`in_box` turns a proof about the network's inputs into one about pixels.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.base import AttackProgress, ProgressCallback, failure, require_kind
from flwr_leakage.attacks.budget import Budget, BudgetExhausted, Stopwatch, stop_mark
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.labels.assumed import idlg_label
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.network.linear import find_last_layer, logits_behind
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR, NOISE_DEVIATIONS
from flwr_leakage.conventions import read_normalization
from flwr_leakage.records import Batch, InputSpec, Reconstruction

Verdict = Literal["proven", "plausible", "not"]


def unscaled(problem: Problem) -> Problem:
    """Return the problem with its gradient divided by the client's scale, if that can be inferred.

    A client that clips sends c g in place of its gradient g, with an unknown scale c. For one
    sample, a linear last layer of weight W and bias b has the gradient ``c e [h, 1]ᵀ``, with its
    input h and the error ``e(h) = ∂L/∂(W h + b)``. The quotient of the weight's and the bias's part
    gives h, h gives e, and ``c = ⟨c e, e⟩ / ‖e‖²``. The problem is returned unchanged if the update
    is of several samples or steps, if no last layer with bias is trained, or if c differs from 1 by
    no more than noise explains.
    """
    if problem.num_samples != 1 or not problem.is_single_gradient or problem.earlier:
        return problem
    if problem.spec.next_token:
        return problem  # the errors of a text's positions add up like those of several samples
    try:
        layer = find_last_layer(problem)
    except ValueError:
        return problem
    if layer.bias is None or not {layer.weight, layer.bias} <= problem.gradient_map.trained:
        return problem
    weight, errors = problem.gradient[layer.weight].double(), problem.gradient[layer.bias].double()
    if not bool(errors.any()):
        return problem
    features = mean_feature(weight, errors)
    targets = problem.known_targets
    targets = idlg_label(errors) if targets is None else targets
    outputs = problem.params[layer.weight].double() @ features
    outputs = (outputs + problem.params[layer.bias]).to(problem.params[layer.bias])[None]
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        loss = problem.gradient_map.loss(logits_behind(problem, layer.weight, leaf), targets)
        (expected,) = torch.autograd.grad(loss, leaf)
    expected = expected[0].double()
    size = float(expected.square().sum())
    if not size > 0:
        return problem
    scale = float(errors @ expected) / size
    rough = max(
        float((errors - scale * expected).norm() / errors.norm()),
        float((weight - errors[:, None] * features).norm() / weight.norm()),
        FLOAT32_RELATIVE_ERROR,
    )
    # The scale is not inferred if the gradient is too far from an outer product, as after pruning,
    # or if the error of the scale explains its difference from 1.
    if not scale > 0 or not rough <= 0.1 or abs(scale - 1) <= NOISE_DEVIATIONS * rough:
        return problem
    return problem.divided(scale)


class OneByOne(ABC):
    """A base of attacks that take one observation after another, in float64.

    A subclass implements :meth:`solve`, which is given one observation as a problem. The stats of
    each result contain the CPU seconds that it took, as ``cpu_seconds``. They contain the factor by
    which the client scaled its update, as ``scale``, and a text on the masks of dropout, as
    ``dropout``, if the update shows these.

    Attributes:
        purpose: the name that separates the attack's random numbers from those of other attacks.
        reads_text: whether the attack takes token ids, and nothing else.
    """

    purpose: ClassVar[str]
    reads_text: ClassVar[bool] = False

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction of the private samples for each observed update of a job."""
        results = []
        for index in range(len(job.observations)):
            watch = Stopwatch()
            stream = job.generator(index, self.purpose)
            budget = Budget.of(job.max_seconds)
            try:
                require_kind(self, job.spec)
                problem = unscaled(job.problem(index)).to(torch.float64)
                found = self.solve(problem, stream, job.restart(index), budget)
                told: dict[str, Any] = {"scale": problem.scale} if problem.scale != 1 else {}
                told |= {"dropout": problem.masks} if problem.masks else {}
                stats = {**told, **found.stats, "cpu_seconds": watch.seconds}
                results.append(replace(found, stats=stats))
            except (ValueError, RuntimeError, ArithmeticError) as error:
                is_spent = isinstance(error, BudgetExhausted)
                results.append(replace(failure(error), stats=stop_mark(is_spent)))
            if progress is not None:
                objective = results[-1].objective
                progress(AttackProgress(index + 1, len(job.observations), 1, 1, objective))
        return results

    @abstractmethod
    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the reconstruction of one problem.

        Only restart 0 may take a start that is not random, such as grey. Once the budget is spent,
        an iterative attack returns its best result.

        Raises:
            BudgetExhausted: the budget is too small for any answer.
            ValueError: the attack does not fit the problem.
        """


@dataclass(frozen=True)
class Applicability:
    """A statement that an attack can be run on a problem, which it may still fail to solve.

    Attributes:
        gives_images: whether the attack returns images; otherwise it returns only features, the
            inputs of a later layer.
        reason: the layer or the equations that the attack uses, in words for the user.
    """

    gives_images: bool
    reason: str


class ExactAttack(OneByOne):
    """An attack that solves equations, and can check beforehand if an update provides them."""

    @abstractmethod
    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Predict whether the attack would give images or only a layer's inputs, and say why.

        Raises:
            ValueError: the attack does not apply to the problem. The message is the one that the
                attack itself would give.
        """


def require_single_gradient(problem: Problem, who: str) -> None:
    """Raise ``ValueError`` unless the update is the plain gradient step of one sample.

    The message begins with ``who``, the name of the attack.
    """
    if problem.num_samples != 1 or not problem.is_single_gradient:
        decay = " with weight decay" if problem.schedule.weight_decay else ""
        raise ValueError(
            f"{who} takes 1 sample in 1 plain step, got {problem.num_samples} samples in "
            f"{problem.schedule.num_steps} steps{decay}."
        )


PROVEN_INPUTS = "proven_inputs"
"""The key, in the stats of a result, of the number of samples whose network inputs are proven."""

NORMALISATION = "normalisation"
"""The key, in the stats of a result, of the source of the normalisation of its inputs: a
:data:`flwr_leakage.conventions.Claim`."""


def in_box(spec: InputSpec, answer: Reconstruction) -> Reconstruction:
    """Return an attack's result with verdicts that hold for pixels, not only for network inputs.

    Pixels follow from network inputs by the normalisation, which may have been assumed wrongly. If
    no sample is proven (``stats["verdicts"]``), the inputs are clamped to valid pixels. Otherwise
    the proven inputs show whether the normalisation is right, and ``stats["normalisation"]`` is

    - ``confirmed`` or ``as told``: the proofs hold, and the inputs are clamped, which moves them by
      no more than their error. With ``as told``, the inputs do not show the normalisation, and the
      proofs depend on the assumed normalisation.
    - ``read off``: the inputs show another normalisation, and only one. It becomes the result's
      ``spec``, under which the proofs hold. Nothing is clamped.
    - ``refuted``: no pixel is proven. The verdicts ``proven`` become ``plausible``. Nothing is
      clamped.

    ``stats["proven_inputs"]`` is the number of samples whose network inputs are proven. In the last
    two cases ``stats["stage"]`` ends with the reason. If pixels have no bounds (``spec.box`` is
    false), no normalisation is needed, and the result is returned as it is.
    """
    if answer.batch is None or not spec.box or PROVEN_INPUTS in answer.stats:
        return answer
    inputs, stats = answer.batch.inputs, answer.stats
    verdicts: tuple[Verdict, ...] = stats.get("verdicts", ())
    proven = [index for index, verdict in enumerate(verdicts) if verdict == "proven"]
    clamped = replace(answer, batch=Batch(spec.clamp(inputs), answer.batch.targets))
    if not proven:
        return clamped
    reading = read_normalization(inputs[proven], spec, _error(inputs, stats, proven))
    stats = {**stats, PROVEN_INPUTS: len(proven), NORMALISATION: reading.claim}
    if reading.spec is spec:
        return replace(clamped, stats=stats)
    if reading.spec is None:
        stats = doubted(stats)
    return replace(answer, stats=remarked(stats, reading.reason), spec=reading.spec)


def doubted(stats: dict[str, Any]) -> dict[str, Any]:
    """Return the stats of a result with ``plausible`` in place of each verdict ``proven``."""
    verdicts = tuple("not" if v == "not" else "plausible" for v in stats.get("verdicts", ()))
    return {**stats, "verdicts": verdicts, **({"proven": 0} if "proven" in stats else {})}


def remarked(stats: dict[str, Any], remark: str) -> dict[str, Any]:
    """Return the stats of a result with one more sentence, ``remark``, at the end of ``stage``.

    ``stats["stage"]`` is a text for the user on how the attack ended.
    """
    stage = str(stats.get("stage", "")).rstrip(".")
    return {**stats, "stage": f"{stage}. {remark}" if stage else remark}


def _error(inputs: Tensor, stats: dict[str, object], proven: list[int]) -> float:
    """Return the largest standard deviation of error among the proven samples, in input units.

    The error of a sample is the root mean square of its input, in ``inputs`` (B, C, H, W), times
    its entry of ``stats["relative_errors"]``, which counts as at least ``FLOAT32_RELATIVE_ERROR``,
    also if the attack states none. ``proven`` are the indices of these samples.
    """
    errors = torch.full((len(inputs),), FLOAT32_RELATIVE_ERROR, dtype=torch.float64)
    told = torch.as_tensor(stats.get("relative_errors", ()), dtype=torch.float64)
    errors[: len(told)] = told.clamp_min(FLOAT32_RELATIVE_ERROR)
    sizes = inputs.detach().cpu().double().flatten(1).square().mean(1).sqrt()
    return float((errors * sizes)[proven].max())
