"""Invert whole batches exactly through linear layers, for one local step or several.

In several local steps, the images do not change from step to step. So the pseudo-gradient of a
first linear layer is ``(Σ_t S⁽ᵗ⁾) X``, of rank B for B samples. Row i of X is image i, and column i
of S⁽ᵗ⁾ is the *error* of image i in step t, the derivative of its loss by the layer's outputs.

Image i's column of the sum Σ_t S⁽ᵗ⁾ is zero for units that stay inactive on it in all steps. A
single column does not determine its image. So the attack collects sparse columns until it has B
independent ones, and the inverse of their matrix gives all images. The units that an image
activates show whether its column is right, and a replay of all steps proves the images.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.batch_layer import (
    BatchLayer,
    BatchSample,
    layer_behind,
    pose_layers,
)
from flwr_leakage.attacks.exact.batch_masks import null_vector, sparsest, zero_entries
from flwr_leakage.attacks.exact.batch_proof import PROVEN_DEVIATION, BatchInputs, conclude, replays
from flwr_leakage.attacks.exact.batch_search import ROW_START_SHARE, BatchSearch, SearchSettings
from flwr_leakage.attacks.exact.known import MARGIN, above_noise
from flwr_leakage.attacks.labels.assumed import answer
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.head import LARGEST_MISFIT, split_head
from flwr_leakage.attacks.network.linear import traced
from flwr_leakage.attacks.one_by_one import Applicability, ExactAttack, Verdict, in_box
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, Reconstruction

ENLARGED = 1.001
"""Largest ratio of an observed update to that of one step at which features may be proven. A larger
update comes from more steps than the client reports, or from another learning rate; clipping only
makes updates smaller. Samples need to agree on the ratio to a thousandth only, so that a smaller
excess may be an error of its estimate."""


def choose_layer(
    problem: Problem, generator: torch.Generator, images_only: bool = False
) -> tuple[list[BatchLayer], BatchLayer, list[str]]:
    """Return the linear layer through which an attack inverts a batch, and all layers it could use.

    A layer that takes the network's input is preferred. Among several layers, the one whose
    gradient shows the most samples is chosen. With ``images_only`` no layer of features is taken.

    Returns:
        All layers whose gradients can be factored; the chosen layer; and for each linear layer that
        cannot be used a sentence with the reason.

    Raises:
        ValueError: no layer can be used; the message gives the reasons.
    """
    if problem.schedule.weight_decay:
        raise ValueError("weight decay adds the weights themselves to the gradient.")
    layers, refusals = pose_layers(problem, generator)
    if not layers:
        raise ValueError("; ".join(refusals))
    # Rounding raises the apparent rank of a layer with few rows. In one step, a rank above the
    # number of samples is due to noise, so that other layers are preferred.
    layer = min(
        layers,
        key=lambda layer: (
            not layer.takes_input,
            problem.is_single_gradient and layer.factor.rank > problem.num_samples,
            -layer.factor.rank,
        ),
    )
    if images_only and not layer.takes_input:
        raise ValueError(
            f"{layer.name} takes features: images follow from a linear layer on the network's "
            "input only."
        )
    logits = problem.spec.num_classes
    if layer.matrix.shape[0] == logits and layer.factor.rank < problem.num_samples:
        raise ValueError(
            f"the gradient of {layer.name} has rank {layer.factor.rank}, below the "
            f"{problem.num_samples} samples: errors of {logits} classes span at most {logits - 1}."
        )
    return layers, layer, refusals


def recover_batch(
    problem: Problem,
    settings: SearchSettings,
    generator: torch.Generator,
    images_only: bool = False,
    scaled: bool = False,
) -> BatchInputs:
    """Return the inputs of a linear layer for the samples of a batch, from one update.

    The layer is one that takes the network's input, or else the one whose gradient shows the most
    samples. With ``images_only`` no layer of features is taken. ``scaled`` tells that the factor by
    which the client scaled its update is divided out already; otherwise the search looks for the
    factor. ``settings`` limit the search.

    Raises:
        ValueError: no layer can be used, or no sample was found; the message gives the reasons.
    """
    layers, layer, refusals = choose_layer(problem, generator, images_only)
    if not problem.is_single_gradient and not _is_union(problem):
        return replace(recover_steps(problem, layer, settings, generator), refusals=tuple(refusals))
    following = layer_behind(layer, layers, generator)
    told = _from_head(layers, layer, generator)
    if len(told) == layer.factor.rank:
        result = conclude(layer, following, _in_order(told), generator)
        stats = {"proposals": {"last layer": len(told)}, "accepted": {"last layer": len(told)}}
        return replace(result, refusals=tuple(refusals), stats=stats, scale=problem.scale)
    search = BatchSearch(layer, following, settings, generator)
    found = search.run(not scaled)
    if search.scale is not None:
        # Wrong candidates may agree by chance on a wrong factor by which the client scaled its
        # update. So the update is tried with this factor divided out, and as it is.
        results = []
        for trial in (problem.divided(search.scale), problem):
            try:
                result = recover_batch(trial, settings, generator, images_only, True)
            except ValueError:
                continue
            if trial is not problem and search.scale > ENLARGED and result.order is None:
                # More steps than the client reports enlarge an update. The features found are then
                # means over steps, so that none counts as proven.
                kept = tuple("plausible" if v == "proven" else v for v in result.verdicts)
                result = replace(result, verdicts=kept)
            if "proven" in result.verdicts:
                return result
            results.append(result)
        if results:
            return results[0]
    if not found and not scaled:
        found = _from_head(layers, layers[-1], generator)
        if found:
            layer, following = layers[-1], None
            search.proposals["last layer"] = search.accepted["last layer"] = len(found)
    if not found:
        raise ValueError(
            f"none of the {layer.factor.rank} samples that {layer.name} shows was found; tried "
            f"{search.proposals or 'nothing, as neither its inputs nor its errors are sparse'}."
            f"{_surplus(problem, layer.name, layer.factor.rank)}"
        )
    result = conclude(layer, following, _in_order(found), generator)
    stats = {"proposals": search.proposals, "accepted": search.accepted}
    return replace(result, refusals=tuple(refusals), stats=stats, scale=problem.scale)


def _in_order(found: Iterable[BatchSample]) -> list[BatchSample]:
    """Return samples sorted by label, and then by mean input.

    Unlike the order in which a search finds them, this order does not depend on rounding.
    """
    return sorted(found, key=lambda sample: (sample.label, float(sample.inputs.mean())))


def _from_head(
    layers: Sequence[BatchLayer], layer: BatchLayer, generator: torch.Generator
) -> list[BatchSample]:
    """Return samples of a linear layer, found from those that the last layer's gradient shows.

    Features behind a ReLU, ``a = max(0, z)``, show which units are on. So a sample's error ∂L/∂z is
    ``Wᵀ δ`` on these units and zero elsewhere, where W is the next layer's weight and δ the
    derivative of the loss by its outputs. The errors of all samples together give their duals (see
    :class:`LayerFactor`), and the duals give the features of the layer in front.

    The list is empty in three cases: the last layer's gradient does not separate all samples;
    ``layer`` does not lead to the last layer by linear layers with ReLUs alone; or a gradient on
    the way shows another number of samples. ``layers`` are all layers whose gradients can be
    factored.
    """
    chain = [layer]
    while chain[-1].rectified:
        following = layer_behind(chain[-1], layers, generator)
        if following is None:
            return []
        chain.append(following)
    count = layer.problem.num_samples
    if any(not each.alone or each.factor.rank != count for each in chain):
        return []
    try:
        told = split_head(layer.problem, generator)
    except ValueError:
        return []
    if not told.is_whole or told.weight != chain[-1].weight:
        return []
    errors, duals = told.errors, told.duals
    for before, behind in zip(chain[-2::-1], chain[:0:-1], strict=True):
        features = duals @ behind.factor.right
        deviations = behind.factor.noise * duals.norm(dim=1, keepdim=True)
        on = above_noise(features, deviations, margin=MARGIN)
        errors = torch.where(on, errors @ behind.matrix, 0.0)
        duals = torch.linalg.pinv(before.factor.left.T @ errors.T)
        duals = duals / (duals @ before.factor.bias)[:, None]
    checked = [layer.check(*each) for each in zip(duals, told.labels.tolist(), strict=True)]
    return [each for each in checked if each is not None and each.misfit <= LARGEST_MISFIT]


def _is_union(problem: Problem) -> bool:
    """Return whether an update is the plain gradient of all its clients' samples as one batch.

    This holds if the clients took one step without weight decay, and the average over the clients
    weights each client by its number of samples.
    """
    plain = problem.schedule.num_steps == 1 and not problem.schedule.weight_decay
    return plain and sum(problem.members) == problem.num_samples


@dataclass(frozen=True)
class ExactBatch(ExactAttack):
    """Solve a linear layer's gradient for all samples of a batch, with proofs.

    The attack splits ``∂L/∂W = S H`` into the samples' errors S and inputs H (SPEAR: Dimitrov et
    al. 2024). It finds samples one after another, from units that one sample alone activates and
    from sparse vectors in the spans of S and H; see :mod:`flwr_leakage.attacks.exact.batch_search`.

    If the first layer is linear, its inputs H are the images. If convolutions come first, H are
    features. The attack then returns the features in ``stats["features"]`` instead of images, and
    says so in the result's ``error``.

    Attributes:
        search: the limits of the search.
        images_only: whether to refuse at once if convolutions come first; else features are sought.
    """

    purpose: ClassVar[str] = "exact batch"

    search: SearchSettings = field(default_factory=SearchSettings)
    images_only: bool = False

    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """Return which layer the attack uses on a problem, and how it separates the samples.

        Args:
            problem: the network and the observed update.
            generator: the random stream for probe images and for factorisations.

        Raises:
            ValueError: no linear layer can be used, or nothing separates the samples of the best
                layer.
        """
        _, layer, _ = choose_layer(problem, generator, self.images_only)
        if not problem.is_single_gradient and not _is_union(problem):
            require_steps(problem, layer)
        if layer.factor.rank == 1:
            told = "one sample needs no separation"
        elif layer.rectified:
            told = "the ReLU behind it tells them apart"
        elif layer.sparse_inputs:
            told = "zeros of its inputs tell them apart"
        elif layer.takes_input:
            told = "only black pixels could tell them apart, as no ReLU follows"
        else:
            raise ValueError(f"neither the inputs nor the errors of {layer.name} are sparse.")
        rank = f"{layer.factor.rank} of {problem.num_samples}"
        text = f"Layer {layer.name} shows {rank} samples; {told}."
        if not layer.takes_input:
            text += " It takes features, not images."
        return Applicability(layer.takes_input, text)

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the samples that explain a problem's update, with a verdict for each in the stats.

        In place of each sample that is not found, the answer holds an estimate of the mean of all
        missing samples. If the layer takes features, there are no images, and the stats hold the
        features.

        Args:
            problem: the network and the observed update of a batch, in float64.
            generator: the random stream for all random starts.
            restart: number of the restart; it changes nothing but the random stream.
            budget: the CPU time, besides the limit of the attack's own settings.

        Raises:
            ValueError: no linear layer can be used, or no sample was found.
        """
        allowed = min(self.search.max_seconds, budget.left)
        search = replace(self.search, max_seconds=allowed)
        found = recover_batch(problem, search, generator, self.images_only)
        problem = problem.divided(found.scale / problem.scale)
        stopped = budget.is_spent and len(found.labels) < problem.num_samples
        surplus = _surplus(problem, found.layer, found.rank)
        stats: dict[str, Any] = {
            **(found.stats or {}),
            "layer": found.layer,
            "rank": found.rank,
            "found": len(found.labels),
            "proven": found.proven,
            "verdicts": found.verdicts,
            "relative_errors": found.relative_errors.tolist(),
            "refusals": found.refusals,
            **({"stage": surplus.strip().rstrip(".")} if surplus else {}),
            **({"scale": found.scale} if found.scale != 1 else {}),
            **stop_mark(stopped),
        }
        if found.order is None:
            text = (
                f"{found.layer} takes features of the images: {len(found.labels)} of "
                f"{problem.num_samples} samples' features and labels were found, {found.proven} "
                f"proven, but no images.{surplus}"
            )
            return Reconstruction(None, torch.nan, {**stats, "features": found}, text)
        missing = problem.num_samples - len(found.labels)
        stats["verdicts"] = (*found.verdicts, *("not",) * missing)
        boxed = in_box(problem.spec, Reconstruction(complete(problem, found), torch.nan, stats))
        assert boxed.batch is not None
        distance = gradient_distance(problem, boxed.batch)
        batch = answer(boxed.batch.inputs, boxed.batch.targets)
        return replace(boxed, batch=batch, objective=distance)


def _surplus(problem: Problem, name: str, rank: int) -> str:
    """Return a warning if a layer's gradient shows more samples than the client reports, or "".

    ``rank`` is the rank of the gradient of the layer ``name``, the number of samples that it shows.
    """
    if not problem.is_single_gradient or rank <= problem.num_samples:
        return ""
    return (
        f" {name} shows {rank} samples, num_examples says {problem.num_samples}: it may be too "
        "small."
    )


def complete(problem: Problem, found: BatchInputs) -> Batch:
    """Return a whole batch: the samples found, and a mean image for each missing one.

    The samples were found at a layer that takes the network's input. The gradient that they do not
    explain gives the mean input of the missing samples, weighted by the derivatives of their
    losses. The labels of missing samples are guessed one by one: each is the class at which the
    unexplained gradient of the last bias is least.
    """
    order = found.order
    assert order is not None  # the layer's inputs are pixels, not features
    inputs, labels = order.pixels(found.inputs).reshape(-1, *problem.spec.shape), found.labels
    missing = problem.num_samples - len(labels)
    if missing <= 0:
        return Batch(inputs, labels)
    share = len(labels) / problem.num_samples
    explained = problem.gradient_map(problem.params, Batch(inputs, labels), problem.buffers)
    rest = {name: value - share * explained[name] for name, value in problem.gradient.items()}
    use = next(u for u in traced(problem).linear if u.name == found.layer)
    assert use.bias is not None
    mean = order.pixels(mean_feature(rest[use.weight], rest[use.bias]))
    others = problem.spec.clamp(mean.reshape(1, *problem.spec.shape)).expand(missing, -1, -1, -1)
    last = traced(problem).linear[-1]
    pull = rest[last.bias] if last.bias is not None else rest[last.weight].sum(1)
    guesses = []
    for _ in range(missing):
        guesses.append(int(pull.argmin()))
        pull = pull.clone()
        pull[guesses[-1]] += 1 / problem.num_samples
    targets = torch.cat([labels, torch.tensor(guesses, device=labels.device)])
    return Batch(torch.cat([inputs, others]), targets)


LEAST_AGREEMENT = 0.9
"""Least share of a layer's units for which two statements must agree: that a found image activates
the unit, and that the derivative of the image's loss by the unit's output is not zero. By chance
they agree for half of the units, and for 0.9 of 50 units or more once in 4e8 times."""


def recover_steps(
    problem: Problem, layer: BatchLayer, settings: SearchSettings, generator: torch.Generator
) -> BatchInputs:
    """Return all images of a batch whose client took several local steps on all of its samples.

    ``layer`` is the linear layer that takes the network's input. ``settings`` limit the search.

    Raises:
        ValueError: :func:`require_steps` refuses the layer or the update, or a sample was not
            found.
    """
    require_steps(problem, layer)
    columns, duals = _collect(layer, settings, generator)
    inputs = duals @ layer.factor.right
    errors = (layer.factor.left @ columns / (duals @ columns).diagonal()).T
    classes, found = problem.spec.num_classes, []
    for own, values in zip(inputs, errors, strict=True):
        # A sample's class is the class whose errors at the first step have the least angle to the
        # sample's sum of errors over all steps.
        outputs = (layer.matrix @ own + layer.offset).expand(classes, -1)
        first = layer.errors(outputs, torch.arange(classes), own.expand(classes, -1))
        found.append(int((first @ values / first.norm(dim=1).clamp_min(1e-300)).argmax()))
    labels = torch.tensor(found)
    relative = layer.factor.noise * duals.norm(dim=1) * inputs.shape[1] ** 0.5
    relative = relative / inputs.norm(dim=1)

    def replay(points: Tensor) -> Params:
        images = layer.images(points)
        assert images is not None  # require_steps has checked that the layer takes images
        return problem.replay(Batch(images, labels))

    proven = problem.schedule.batch_size >= problem.num_samples == len(labels)
    proven = proven and replays(layer, replay, inputs, relative, generator)
    proven = proven and float((relative * layer.in_units(inputs)).max()) <= PROVEN_DEVIATION
    verdict: Verdict = "proven" if proven else "plausible"
    return BatchInputs(
        layer.name,
        layer.order,
        inputs,
        labels,
        errors,
        (verdict,) * len(labels),
        relative,
        layer.factor.rank,
        torch.nan,
    )


def require_steps(problem: Problem, layer: BatchLayer) -> None:
    """Raise ``ValueError`` if images cannot be found from several local steps through a layer.

    The layer must take the network's input and have a ReLU behind it, and the update must be one
    client's.
    """
    if not layer.takes_input or not layer.rectified:
        raise ValueError(
            f"{layer.name} must be a linear layer with ReLU on the input: features move between "
            f"{problem.schedule.num_steps} local steps."
        )
    if problem.members:
        raise ValueError("several steps must be one client's, got a mean of several clients'.")


def _collect(
    layer: BatchLayer, settings: SearchSettings, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the columns Q (b, b) of all b samples, and their duals T (b, b).

    Column i of ``U Q`` is sample i's sum of errors over the steps, where U (m, b) is the
    orthonormal left factor of the gradient of the first linear layer. T is the inverse of Q, with
    row t scaled such that t·β = 1; β (b,) is the bias's factor. Row i of ``T R`` is the sample's
    input of the layer, where R (b, n) is the right factor.

    Raises:
        ValueError: fewer than b sparse columns were found.
    """
    rank = layer.factor.rank
    left = layer.factor.left[layer.live]
    budget = Budget.of(settings.max_seconds)
    columns: list[Tensor] = []
    for _ in range(settings.starts):
        if budget.is_spent:
            break
        row = left[int(torch.randint(len(left), (), generator=generator))]
        noise = torch.randn(rank, generator=generator, dtype=torch.float64).to(left)
        from_row = float(torch.rand((), generator=generator)) < ROW_START_SHARE
        column = _column(left, row if from_row else noise)
        # Two columns with a cosine above 0.95 belong to the same sample, so that the new one is
        # left out.
        if column is None or any(abs(float(column @ other)) > 0.95 for other in columns):
            continue
        columns.append(column)
        if len(columns) < rank:
            continue
        found = torch.stack(columns, 1)
        duals = torch.linalg.pinv(found)
        duals = duals / (duals @ layer.factor.bias)[:, None]
        outputs = duals @ layer.projected.T + layer.offset
        values = (layer.factor.left @ found).T
        active = values.abs() > 1e-2 * values.abs().mean(1, keepdim=True)
        agreement = (active == (outputs > 0)).double().mean(1)
        if float(agreement.min()) > LEAST_AGREEMENT:
            return found, duals
        # A column that belongs to no sample makes other images wrong, too. So of the columns that
        # disagree with the units their images activate, the one with the fewest zeros is dropped.
        doubtful = torch.where(agreement > LEAST_AGREEMENT, -1, active.sum(1))
        columns.pop(int(doubtful.argmax()))
    raise ValueError(
        f"{len(columns)} of {rank} sparse columns were found; images need all of them."
    )


def _column(left: Tensor, start: Tensor) -> Tensor | None:
    """Return q (b,) for which ``U q`` has many zeros, or None if the zeros do not determine q.

    U (m, b), ``left``, has orthonormal columns. The vector q, near the given start, and the set of
    zeros of U q are computed from each other, up to five times.
    """
    rank = left.shape[1]
    column = sparsest(left, start)
    zeros = None
    for _ in range(5):
        found = zero_entries(left @ column, rank + rank // 4)
        if found is None:
            return None
        if zeros is not None and torch.equal(found, zeros):
            break
        zeros = found
        column, ratio = null_vector(left[zeros])
        if ratio > 0.1:
            return None
    return column
