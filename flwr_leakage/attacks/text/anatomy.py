"""Find a transformer's tables, the inputs of its layers and its attention by one pass.

Nothing is known of a family of models. One pass of random tokens shows which parameters are looked
up by the ids and by the positions, and which linear layers take a vector of each token. A second
pass, with one token changed, shows what the vectors depend on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.network.calls import Affine, Lookup, Op
from flwr_leakage.attacks.network.trace import ReachedError, Run, Trace
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR


@dataclass(frozen=True)
class Span:
    """The row space of the gradient of linear layers, in which their inputs lie.

    ``∂L/∂W = Σ_t a_t z_tᵀ`` for the inputs z_t of all tokens t with errors a_t.

    Attributes:
        basis: (r, n) orthonormal rows.
        error: the size of rounding and noise as a share of the least singular value that counts.
    """

    basis: Tensor
    error: float = 0.0

    @classmethod
    def of(cls, gradient: Float[Tensor, "m n"], most: int) -> "Span":
        """Return the span of a gradient whose true rank is at most ``most``.

        Singular values beyond ``most`` are rounding or noise, so that the largest of them shows
        their size. If there are none, the rank is where values fall by more than a factor of 30 to
        less than 1e-4 of the largest, or else it is full (chosen on development draws; no table).
        """
        _, values, rows = torch.linalg.svd(gradient, full_matrices=False)
        least = 1e-13 * float(values[0])
        if most < len(values):
            edge = max(3 * float(values[most]), least)
            rank = int((values > edge).sum())
        else:
            falls = values[:-1] / values[1:].clamp_min(least)
            falls[values[1:] > 1e-4 * values[0]] = 0
            rank = int(falls.argmax()) + 1 if float(falls.max()) > 30 else len(values)
            edge = max(float(values[rank]), least) if rank < len(values) else least
        return cls(rows[:rank], edge / float(values[rank - 1]) if rank else 1.0)

    @property
    def is_full(self) -> bool:
        """Return whether almost every vector lies in the span, so that it tells nothing.

        Normalised vectors have mean zero, so that a span of any vectors may lack a few directions.
        """
        return self.basis.shape[0] > self.basis.shape[1] - 4

    def outside(self, vectors: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Return the part of each vector that lies outside of the span."""
        return vectors - vectors @ self.basis.T @ self.basis

    def distance(self, vectors: Float[Tensor, "... n"]) -> Float[Tensor, "..."]:
        """Return the share ``‖z − P z‖ / ‖z‖`` of each vector outside of the span."""
        return self.outside(vectors).norm(dim=-1) / vectors.norm(dim=-1).clamp_min(1e-30)


@dataclass(frozen=True)
class Site:
    """Linear layers that take one and the same vector of each token.

    Attributes:
        weights: the names of their weights.
        is_pointwise: whether the vector depends on the token and its position alone.
        is_live: whether every token has an error there, so that the span holds all of them.
    """

    weights: tuple[str, ...]
    is_pointwise: bool
    is_live: bool

    def span(self, problem: Problem, most: int) -> Span:
        """Return the span of their gradients in the update."""
        return Span.of(torch.cat([problem.gradient[name] for name in self.weights]), most)


@dataclass(frozen=True)
class Attention:
    """The first attention of a model: ``softmax(q kᵀ / √h) v`` in each of several heads.

    Attributes:
        query: W and b of q; ``key`` and ``value`` likewise.
        heads: the number of heads.
    """

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    heads: int

    def split(self, inputs: Float[Tensor, "... n"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return q / √h, k and v (…, heads, h) of the layers' inputs."""
        q, k, v = (
            F.linear(inputs, weight, bias).unflatten(-1, (self.heads, -1))
            for weight, bias in (self.query, self.key, self.value)
        )
        return q / math.sqrt(q.shape[-1]), k, v


def _mixed(
    layers: Sequence[Float[Tensor, "T m"]], heads: int, at: Int[Tensor, " Q"], is_causal: bool
) -> Float[Tensor, "Q m"]:
    """Return the mixed values of q, k and v of a text at some positions, heads side by side."""
    q, k, v = (each.unflatten(-1, (heads, -1)) for each in layers)
    scores = torch.einsum("ihc,jhc->hij", q[at], k) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.arange(len(k)) > at[:, None], -math.inf)
    return torch.einsum("hij,jhc->ihc", scores.softmax(-1), v).flatten(1)


def _pass(problem: Problem, ids: Tensor, params: dict[str, Tensor], last: str = "") -> Trace:
    """Return the record of a pass of tokens, up to the layer with the weight ``last``, if any."""
    is_done = False

    def answer(op: Op, run: Run) -> Tensor:
        nonlocal is_done
        if is_done:
            raise ReachedError(op.inputs)
        is_done = bool(last) and isinstance(op, Affine) and op.name == last
        outputs: Tensor = run()
        return outputs

    logits = problem.gradient_map.logits
    return Trace.of(partial(logits, params, ids, problem.buffers), params, answer)


def _vectors(trace: Trace, ids: Tensor) -> dict[str, Tensor]:
    """Return the inputs (B, T, n) of each linear layer that takes a vector of each token."""
    found = {}
    for use in trace.linear:
        width = use.inputs.shape[-1]
        if use.inputs.numel() == ids.numel() * width:
            found[use.weight] = use.inputs.reshape(*ids.shape, width)
    return found


@dataclass(frozen=True)
class Anatomy:
    """The tables, layers and attention of a transformer, as one pass shows them.

    Attributes:
        words: the name of the table (V, d) that the ids look up.
        positions: the name of the table that the positions look up, or ``None``.
        places: (T,) the row of each position in it.
        is_tied: whether the table of words is a linear layer's weight, too.
        is_causal: whether vectors depend on earlier tokens only.
        sites: the layers that take a vector of each token, in their order.
        attention: the first attention, or ``None`` if it is of another kind.
    """

    words: str
    positions: str | None
    places: Tensor
    is_tied: bool
    is_causal: bool
    sites: tuple[Site, ...]
    attention: Attention | None

    @classmethod
    def of(cls, problem: Problem, generator: torch.Generator) -> "Anatomy":
        """Return the anatomy of a problem's model.

        Raises:
            ValueError: the ids look up no table of the model.
        """
        spec = problem.spec
        first = 1 if spec.padding == 0 else 0
        shape = (1, *spec.shape)
        ids = torch.randint(first, spec.vocabulary, shape, generator=generator)
        if spec.padding:
            ids[ids == spec.padding] = first
        steps = _pass(problem, ids, problem.params).steps
        found = [(op.inputs, op.name) for step in steps if isinstance(op := step.op, Lookup)]
        words = [name for at, name in found if at.shape == ids.shape and torch.equal(at, ids)]
        if not words:
            raise ValueError("the ids must look up a table of embeddings, and no table is.")
        positions, places = None, torch.arange(shape[1])
        for at, name in found:
            rows = at.reshape(-1, at.shape[-1])
            distinct = at.shape[-1] == shape[1] and len(rows[0].unique()) == shape[1]
            if name != words[0] and distinct and bool((rows == rows[0]).all()):
                positions, places = name, rows[0]
        # The table is a leaf, so that the errors of all outputs behind it can be computed.
        leaf = problem.params[words[0]].detach().clone().requires_grad_()
        params = {**problem.params, words[0]: leaf}
        with torch.enable_grad():
            trace = _pass(problem, ids, params)
            targets = ids if spec.next_token else torch.zeros(1, dtype=torch.int64)
            loss = problem.gradient_map.loss(trace.outputs, targets)
        outputs = {use.weight: use.outputs for use in trace.linear}
        vectors = {name: value.detach() for name, value in _vectors(trace, ids).items()}
        wanted = [outputs[name] for name in vectors]
        found_errors = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
        errors = dict(zip(vectors, found_errors, strict=True))
        middle = shape[1] // 2
        other = ids.clone()
        other[:, middle] = torch.where(ids[:, middle] == first, first + 1, first)
        moved = _vectors(_pass(problem, other, problem.params), ids)
        groups: list[list[str]] = []
        for name in vectors:
            if groups and torch.equal(vectors[groups[-1][0]], vectors[name]):
                groups[-1].append(name)
            else:
                groups.append([name])
        sites, is_causal = [], True
        for group in groups:
            gap = (vectors[group[0]] - moved[group[0]]).norm(dim=-1).amax(0)
            changed = gap > 1e-9 * vectors[group[0]].norm(dim=-1).amax()
            is_causal &= not bool(changed[:middle].any())
            given = [errors[name] for name in group if name in problem.gradient_map.trained]
            told = [each.reshape(*ids.shape, -1).norm(dim=-1) for each in given if each is not None]
            live = sum(told, torch.zeros(shape))[:, : shape[1] - spec.next_token] > 0
            is_pointwise = int(changed.sum()) <= 1
            own = tuple(name for name in group if name in problem.gradient_map.trained)
            if own:
                sites.append(Site(own, is_pointwise, bool(live.all())))
        return cls(
            words[0],
            positions,
            places,
            words[0] in outputs,
            is_causal,
            tuple(sites),
            _attention(problem, trace, vectors, groups, moved, is_causal, middle),
        )

    @property
    def mixed(self) -> Site | None:
        """The first live site that depends on other tokens, the mixed values of the attention."""
        return next(iter(self.deep), None)

    @property
    def deep(self) -> tuple[Site, ...]:
        """The live sites that depend on other tokens, in their order."""
        return tuple(site for site in self.sites if site.is_live and not site.is_pointwise)

    def vectors(
        self, problem: Problem, ids: Int[Tensor, "B T"], sites: Sequence[Site]
    ) -> list[Float[Tensor, "B T n"]]:
        """Return the inputs of some sites in a pass of texts, which ends behind the last."""
        trace = _pass(problem, ids, problem.params, sites[-1].weights[0])
        found = _vectors(trace, ids)
        return [found[site.weights[0]] for site in sites]


def _attention(
    problem: Problem,
    trace: Trace,
    vectors: dict[str, Tensor],
    groups: list[list[str]],
    moved: dict[str, Tensor],
    is_causal: bool,
    middle: int,
) -> Attention | None:
    """Return the attention whose outputs the first layer behind it takes, or None.

    Its query, key and value are three layers of the same inputs, in any order, or one that is cut
    into three. The number of heads is the one that explains the inputs of the layer behind.
    """
    biases = {use.weight: use.bias for use in trace.linear}
    if len(groups) < 2:
        return None
    inner, outer = groups[0], groups[1]
    others = torch.arange(moved[inner[0]].shape[1]) != middle
    if not torch.allclose(moved[inner[0]][:, others], vectors[inner[0]][:, others]):
        return None
    if torch.allclose(moved[outer[0]][:, others], vectors[outer[0]][:, others]):
        return None
    inputs, mixed = vectors[inner[0]], vectors[outer[0]]
    layers = []
    for name in inner:
        weight, bias = problem.params[name], biases.get(name)
        offset = weight.new_zeros(len(weight)) if bias is None else problem.params[bias]
        count = 3 if len(inner) == 1 and len(weight) % 3 == 0 else 1
        layers += list(zip(weight.chunk(count), offset.chunk(count), strict=True))
    width = mixed.shape[-1]
    if len(layers) != 3 or any(len(weight) != width for weight, _ in layers):
        return None
    outputs = [F.linear(inputs[0], weight, offset) for weight, offset in layers]
    at = torch.arange(mixed.shape[1])[-4:]
    for heads in (count for count in range(1, width + 1) if width % count == 0):
        for order in permutations(range(3)):
            tried = _mixed([outputs[index] for index in order], heads, at, is_causal)
            gap = float((tried - mixed[0, at]).norm() / mixed[0, at].norm())
            if gap < FLOAT32_RELATIVE_ERROR:
                query, key, value = (layers[index] for index in order)
                return Attention(query, key, value, heads)
    return None
