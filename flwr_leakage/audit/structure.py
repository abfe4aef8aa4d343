"""Find, before any training, which exact attacks apply to an update."""

import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from flwr_leakage.attacks import Analytic, ExactBatch, FeatureMatching, FeatureRecursion
from flwr_leakage.attacks.exact.patches import Patches
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.loss_check import check_loss
from flwr_leakage.attacks.one_by_one import ExactAttack
from flwr_leakage.attacks.problem import as_met, pose, require_arguments
from flwr_leakage.audit.progress import count
from flwr_leakage.audit.structure_report import (
    RECOVERED_DB,
    Directions,
    Opening,
    Structure,
    Verdict,
)
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.losses import Loss
from flwr_leakage.metrics import Evaluator
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.operators import BatchJacobian, LinearOperator, UpdateJacobian
from flwr_leakage.params import Params
from flwr_leakage.per_sample import differentiable, separate
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel, Update
from flwr_leakage.spectral import numerical_rank, rows_needed
from flwr_leakage.spectral.image_prior import ImagePrior

FEW_ROWS = 64
"""The number of random combinations of a Jacobian's rows that are taken if its rank would need more
than ``max_products``. Then a rank below this number is found, and for a larger rank only a lower
bound. The value is a choice: more rows cost more products, and find larger ranks.
"""


def exact_attacks() -> dict[str, ExactAttack]:
    """Return the attacks that solve equations, by name, with the settings of ``conf/attack``."""
    return {
        "analytic": Analytic(),
        "feature_matching": FeatureMatching(),
        "feature_recursion": FeatureRecursion(),
        "exact_batch": ExactBatch(),
        "patches": Patches(),
    }


@torch.random.fork_rng(devices=[])  # a model may draw from the global generator
def structure(
    model: nn.Module,
    spec: InputSpec,
    num_examples: int = 1,
    schedule: LocalSchedule | None = None,
    *,
    loss: Loss = F.cross_entropy,
    batch_norm: BatchNormMode = "running",
    attacks: Mapping[str, ExactAttack] | None = None,
    attempt: bool = False,
    tolerance: float = 1e-8,
    max_products: int = 4000,
    seed: int = 0,
) -> Structure:
    """Return which exact attacks apply to a client's update, and how many input directions it
    determines.

    A synthetic batch is drawn: images of noise with a power spectrum of 1/f² (``ImagePrior``) and
    random labels. Its update by the schedule, with the model's present weights, is checked by each
    attack, which tells whether the attack applies. The numerical rank of the update's Jacobian by
    the inputs is computed in float64 (``numerical_rank``). The result holds for these weights
    alone: in training, ReLU units die and losses become small.

    Args:
        model: the model, with the weights that the first round starts from.
        spec: shape, classes and normalisation of the inputs.
        num_examples: the number of samples of the client's round.
        schedule: the client's local training; one step over all samples by default.
        loss: the loss, a function of logits and targets that returns a scalar.
        batch_norm: ``batch`` for a client that trains in train mode, else ``running``.
        attacks: the attacks to check, by name; ``exact_attacks()`` by default.
        attempt: whether the attacks that apply are run on the synthetic batch, which takes seconds
            to minutes.
        tolerance: singular values below this share of the largest count as zero.
        max_products: the largest number of products with the Jacobian for a rank. If more are
            needed, the result is a lower bound of the rank.
        seed: the seed of the synthetic batch.

    Dropout is left out, even if the model applies it in eval mode. If ``torch.func`` cannot
    differentiate the model, plain autograd is used. If that fails as well, the rank is not
    computed, and the result says why.

    Raises:
        ValueError: ``spec`` is no ``InputSpec`` or one of texts, the model does not accept such
            inputs, the loss cannot be computed, or the update is zero.
    """
    gradient_map = GradientMap(model, loss, batch_norm)
    require_arguments(spec, num_examples)
    if spec.is_text:
        raise ValueError(
            "structure draws images, and these inputs are token ids: attack an update of your own "
            "texts by flwr_leakage.attack, which says what is read."
        )
    schedule = schedule or LocalSchedule(1.0, 1, num_examples)
    batch = synthetic_batch(spec, schedule.num_samples_used(num_examples), seed)
    batch = Batch(batch.inputs.to(next(iter(gradient_map.params.values()))), batch.targets)
    check_loss(gradient_map.loss, len(batch), spec.num_classes, device=batch.inputs.device)
    gradient_map = as_met(gradient_map, spec, gradient_map.params, gradient_map.buffers)
    params, buffers = gradient_map.params, gradient_map.buffers
    precise = Batch(batch.inputs.double(), batch.targets)
    doubled = {name: value.double() for name, value in params.items()}
    by_any_means = differentiable(gradient_map, doubled, buffers, precise)
    change = local_update(by_any_means, params, batch, schedule, buffers)
    update = Update({k: v.detach() for k, v in change.items()}, buffers, schedule, num_examples)
    job = AttackJob(
        gradient_map, spec, [Observation(1, 0, params, buffers, update)], ThreatModel(), seed
    )
    chosen = exact_attacks() if attacks is None else attacks
    openings = [_open(name, attack, job, batch, attempt) for name, attack in chosen.items()]
    directions = partial(_directions, tolerance=tolerance, max_products=max_products)
    draw = make_generator(seed, purpose="random rows")
    one = together = None
    reason = ""
    try:
        alone = separate(by_any_means, doubled, buffers, precise, torch.ones(len(batch)))[[0]]
        one = together = directions(alone.jacobian(), draw)
        if len(batch) > 1:
            jacobian = _jacobian(by_any_means, doubled, precise, schedule, buffers)
            together = directions(jacobian, draw)
    except RuntimeError as error:  # torch.func and autograd may raise any error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    unknowns, equations = batch.inputs.numel(), sum(value.numel() for value in params.values())
    title = (
        f"{type(model).__name__}: {count(len(batch), 'sample')} of "
        f"{'×'.join(map(str, spec.shape))}, {count(schedule.num_steps, 'local step')}; "
        f"{equations:,} equations for {unknowns:,} input values"
    )
    return Structure(title, one, together, tuple(openings), reason)


def _jacobian(
    gradient_map: GradientMap,
    params: Params,
    batch: Batch,
    schedule: LocalSchedule,
    buffers: Params,
) -> LinearOperator:
    """Return the Jacobian of a batch's update by the batch's inputs, as a linear operator. The
    update is that of the local training ``schedule`` from the parameters ``params``.
    """
    if schedule.num_steps == 1 and not schedule.weight_decay:
        return BatchJacobian(gradient_map, params, batch, buffers)
    return UpdateJacobian(gradient_map, params, batch, schedule, buffers)


def synthetic_batch(spec: InputSpec, count: int, seed: int) -> Batch:
    """Return ``count`` noise images with the spectrum of natural images, and random labels.

    The images are inputs (B, C, H, W) of valid pixels in float64, and the labels (B,) are drawn
    from all classes.
    """
    draw = make_generator(seed, purpose="synthetic batch")
    prior = ImagePrior.of(spec)
    shape = (count, *spec.shape)
    noise = torch.randn(shape, generator=draw, dtype=torch.float64)
    images = torch.cat([prior.inputs(each) for each in noise])
    return Batch(spec.clamp(images), torch.randint(spec.num_classes, (count,), generator=draw))


def _open(name: str, attack: ExactAttack, job: AttackJob, batch: Batch, attempt: bool) -> Opening:
    """Return the verdict of an attack's own check, and, if the attack is run, the images it
    recovers.

    ``job`` holds the update of the synthetic batch. If ``attempt`` is true and the attack applies,
    the attack is run, and its answer is compared with ``batch``.
    """
    problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
    draw = job.generator(0, "structure")
    try:
        found = attack.check(problem.to(torch.float64), draw)
    except (ValueError, RuntimeError) as error:
        return Opening(name, "does not apply", str(error))
    verdict: Verdict = "applies" if found.gives_images else "features only"
    if not attempt:
        return Opening(name, verdict, found.reason)
    began = time.process_time()
    (result,) = attack(job)
    seconds = time.process_time() - began
    if result.batch is None:
        return Opening(name, verdict, f"{found.reason} On noise: {result.error}")
    measured = Evaluator().evaluate(result, batch, job.spec).measurements
    decibels = [value for m in measured if m.name == "psnr" for value in m.values]
    near = sum(value is not None and value >= RECOVERED_DB for value in decibels)
    if near == len(batch):
        verdict = "recovers"
    return Opening(
        name,
        verdict,
        f"{found.reason} On noise: {near} of {len(batch)} images above {RECOVERED_DB:.0f} dB, "
        f"{seconds:.0f} CPU seconds.",
    )


def _directions(
    operator: LinearOperator, draw: torch.Generator, tolerance: float, max_products: int
) -> Directions:
    unknowns, equations = operator.num_inputs, operator.num_outputs
    fits = rows_needed(unknowns, equations) <= max_products
    rows = max_products if fits else min(FEW_ROWS, max_products)
    found = numerical_rank(operator, draw, tolerance, rows)
    return Directions(
        unknowns,
        equations,
        int(found.rank),
        bool(found.resolved),
        float(found.least_seen),
        float(found.most_unseen),
    )
