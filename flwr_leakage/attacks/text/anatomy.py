"""Find the embedding tables, the linear layers and the first attention of any transformer.

Nothing is assumed about the family of the model. A pass of random tokens shows which parameters
the token ids and the positions look up, and which linear layers take one vector for each token. A
second pass, with one token changed, shows whether these vectors depend on other tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

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
    """The span of the vectors that a linear layer takes, read from its gradient.

    The gradient is ``∂L/∂W = Σ_t a_t z_tᵀ``, for the layer's input z_t and the error a_t of its
    output at each token t. So its rows lie in the span of the inputs.

    Attributes:
        basis: (r, n) orthonormal rows that span it, for inputs of n entries.
        error: the size of rounding and noise in the gradient, divided by the least singular value
            that counts as signal. A larger one makes the span less exact.
    """

    basis: Tensor
    error: float = 0.0

    @classmethod
    def of(cls, gradient: Float[Tensor, "m n"], most: int) -> "Span":
        """Return the row space of a gradient whose true rank is at most ``most``.

        Singular values beyond the first ``most`` are rounding or noise, whose size the largest of
        them shows. If there are none beyond, the rank is where singular values fall by more than a
        factor of 30 to less than 1e-4 of the largest, or else it is full (chosen on development
        draws; no results are kept).
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
        """Whether the span of a layer's inputs holds almost every vector, and excludes no token.

        It may lack up to three directions: LayerNorm makes the mean of a vector zero, so that even
        all its outputs do not span the whole space.
        """
        return self.basis.shape[0] > self.basis.shape[1] - 4

    def outside(self, vectors: Float[Tensor, "... n"]) -> Float[Tensor, "... n"]:
        """Return the part of each vector that is orthogonal to the span of a layer's inputs."""
        return vectors - vectors @ self.basis.T @ self.basis

    def probes(self, most: int) -> Float[Tensor, "k n"]:
        """Return k ≤ ``most`` orthonormal directions orthogonal to the span of a layer's inputs.

        They are drawn with a fixed seed.
        """
        rank, width = self.basis.shape
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(min(most, width - rank), width, generator=generator)
        return torch.linalg.qr(self.outside(drawn.to(self.basis)).T).Q.T

    def distance(self, vectors: Float[Tensor, "... n"]) -> Float[Tensor, "..."]:
        """Return ``‖z − P z‖ / ‖z‖`` for each vector z; P projects on the span of a layer's inputs.

        It is 0 inside of the span, and 1 for vectors orthogonal to it.
        """
        return self.outside(vectors).norm(dim=-1) / vectors.norm(dim=-1).clamp_min(1e-30)


@dataclass(frozen=True)
class Site:
    """A group of linear layers that take the same vector for each token, such as q, k and v.

    Attributes:
        weights: the names of the layers' weights, of those that are trained.
        is_pointwise: whether a token's vector depends only on the token and its position.
        is_live: whether the loss has a gradient by these layers' outputs at every token, so that
            the span of the layers' gradient holds all vectors.
    """

    weights: tuple[str, ...]
    is_pointwise: bool
    is_live: bool

    def span(self, problem: Problem, most: int) -> Span:
        """Return the span of the vectors, at most ``most``, that the layers of this group took.

        It is read from the layers' gradients.
        """
        return Span.of(torch.cat([problem.gradient[name] for name in self.weights]), most)


@dataclass(frozen=True)
class Turn:
    """The rotation of an attention's queries and keys by their position (RoPE, Su et al. 2021).

    Attributes:
        angles: (T, h / 2) ``cos + i sin`` for each pair of entries at each position.
        is_halved: whether entry i is paired with i + h / 2, as in Llama; else with its neighbour.
    """

    angles: Tensor
    is_halved: bool

    def __call__(self, vectors: Float[Tensor, "... T heads h"]) -> Float[Tensor, "... T heads h"]:
        """Return the queries or keys, each rotated by the angles of its position."""
        turned = _paired(vectors, self.is_halved) * self.angles[:, None]
        if self.is_halved:
            return torch.cat([turned.real, turned.imag], -1)
        return torch.view_as_real(turned).flatten(-2)


def _paired(vectors: Tensor, is_halved: bool) -> Tensor:
    """Return pairs of the entries of queries or keys (…, h) as complex numbers (…, h / 2).

    If ``is_halved``, entry i is paired with i + h / 2; else with its neighbour.
    """
    if is_halved:
        return torch.complex(*vectors.chunk(2, -1))
    return torch.complex(vectors[..., ::2], vectors[..., 1::2])


@dataclass(frozen=True)
class Attention:
    """The first attention of a model: ``softmax(q kᵀ / √h) v`` in each of several heads.

    q, k and v are a head's queries, keys and values, vectors of h entries for each token.

    Attributes:
        query: weight and bias of the layer that gives q.
        key: weight and bias of the layer that gives k.
        value: weight and bias of the layer that gives v.
        heads: the number of heads of q.
        turn: the rotation of q and k by the position, or ``None``.
    """

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    heads: int
    turn: Turn | None = None

    def split(self, inputs: Float[Tensor, "... T n"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return q / √h, k and v, each (…, T, heads, h), for inputs of the attention's layers.

        If k and v have fewer heads than q, they are repeated (grouped queries, Ainslie et al.
        2023).
        """
        layers = [F.linear(inputs, *layer) for layer in (self.query, self.key, self.value)]
        size = layers[0].shape[-1] // self.heads
        parts = [each.unflatten(-1, (-1, size)) for each in layers]
        q, k, v = (each.repeat_interleave(self.heads // each.shape[-2], -2) for each in parts)
        if self.turn is not None:
            q, k = self.turn(q), self.turn(k)
        return q / math.sqrt(q.shape[-1]), k, v

    def mixed(
        self, inputs: Float[Tensor, "T n"], at: Int[Tensor, " Q"], is_causal: bool
    ) -> Float[Tensor, "Q m"]:
        """Return the attention's outputs for one text at Q positions ``at``, heads side by side.

        ``inputs`` (T, n) are those of the attention's layers. If ``is_causal``, a position only
        attends to itself and earlier ones.
        """
        q, k, v = self.split(inputs)
        scores = torch.einsum("ihc,jhc->hij", q[at], k)
        if is_causal:
            scores = scores.masked_fill(torch.arange(len(k)) > at[:, None], -math.inf)
        return torch.einsum("hij,jhc->ihc", scores.softmax(-1), v).flatten(1)


_ATTENTIONS = (
    F.scaled_dot_product_attention, torch.matmul, Tensor.matmul, Tensor.__matmul__
)  # fmt: skip


class _Pass(Trace):
    """A record of the calls in a pass of tokens, which also notes the first attention's queries.

    Attributes:
        queries: the first tensor of four dimensions (1, heads, T, h) that is the first argument of
            a matrix product or an attention. These are the queries q that the first attention
            takes. ``None`` if there are none.
    """

    queries: Tensor | None = None

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a torch call; if it is the first attention, keep its ``queries``."""
        if self.queries is None and function in _ATTENTIONS:
            first = args[0] if args else kwargs.get("query")
            self.queries = first if isinstance(first, Tensor) and first.ndim == 4 else None
        return super().on_call(function, args, kwargs)


def _pass(problem: Problem, ids: Tensor, params: dict[str, Tensor], last: str = "") -> _Pass:
    """Return a record of the calls in a pass of tokens (B, T).

    The pass ends behind the linear layer with the weight ``last``, if this is not empty. ``params``
    are the model's parameters.
    """
    is_done = False

    def answer(op: Op, run: Run) -> Tensor:
        nonlocal is_done
        if is_done:
            raise ReachedError(op.inputs)
        is_done = bool(last) and isinstance(op, Affine) and op.name == last
        outputs: Tensor = run()
        return outputs

    logits = problem.gradient_map.logits
    return _Pass.of(partial(logits, params, ids, problem.buffers), params, answer)


def _vectors(trace: Trace, ids: Tensor) -> dict[str, Tensor]:
    """Return the inputs (B, T, n) of each linear layer that takes a vector for each token.

    The pass took tokens (B, T). The keys are the layers' weights by name, in the pass's order.
    """
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
        words: the name of the embedding table (V, d) of the tokens.
        positions: the name of the embedding table of positions, or ``None`` if there is none.
        places: (T,) the index of the row of that table for each position.
        offsets: (T, d) the sum of all rows that are looked up at a position, without the token's.
        is_tied: whether the tokens' table is also a linear layer's weight.
        is_causal: whether each vector depends on its token and earlier tokens only.
        sites: the groups of trained layers that take a vector for each token, in the pass's order.
        attention: the first attention, or ``None`` if it is of another kind.
    """

    words: str
    positions: str | None
    places: Tensor
    offsets: Tensor
    is_tied: bool
    is_causal: bool
    sites: tuple[Site, ...]
    attention: Attention | None

    @classmethod
    def of(cls, problem: Problem, generator: torch.Generator) -> "Anatomy":
        """Return the tables, layers and attention of a problem's model.

        Raises:
            ValueError: the token ids are no indices into an embedding table of the model.
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
        width = problem.params[words[0]].shape[1]
        offsets = problem.params[words[0]].new_zeros(shape[1], width)
        for at, name in {name: (at, name) for at, name in found if name != words[0]}.values():
            if (rows := problem.params[name]).shape[1:] == (width,) and at.ndim:
                offsets = offsets + rows[at.reshape(-1, at.shape[-1])[0]]
        # The table must be a leaf of autograd, so that errors at all outputs behind it can be
        # computed.
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
            same = [group for group in groups if torch.equal(vectors[group[0]], vectors[name])]
            if same:
                same[0].append(name)
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
            offsets,
            words[0] in outputs,
            is_causal,
            tuple(sites),
            _attention(problem, trace, vectors, groups, moved, is_causal, middle),
        )

    @property
    def mixed(self) -> Site | None:
        """The trained layers that take the first attention's outputs; ``None`` if none do."""
        return next(iter(self.deep), None)

    @property
    def deep(self) -> tuple[Site, ...]:
        """The groups of layers behind the first attention, in the order of the pass.

        Their vectors depend on other tokens. Groups at which the loss has no gradient for some
        token are left out.
        """
        return tuple(site for site in self.sites if site.is_live and not site.is_pointwise)

    def vectors(
        self, problem: Problem, ids: Int[Tensor, "B T"], sites: Sequence[Site]
    ) -> list[Float[Tensor, "B T n"]]:
        """Return the inputs of some groups of layers in a pass of texts (B, T).

        The groups stand in the order of the pass, which ends behind the final one.
        """
        trace = _pass(problem, ids, problem.params, sites[-1].weights[0])
        found = _vectors(trace, ids)
        return [found[site.weights[0]] for site in sites]


def _attention(
    problem: Problem,
    trace: _Pass,
    vectors: dict[str, Tensor],
    groups: list[list[str]],
    moved: dict[str, Tensor],
    is_causal: bool,
    middle: int,
) -> Attention | None:
    """Return the first attention if it is ``softmax(q kᵀ / √h) v``, else ``None``.

    Its queries, keys and values come from three layers of the same inputs, in any order, or from
    one layer that is cut into three. All orders and numbers of heads are tried. The right ones
    predict the inputs of the next layer.

    ``vectors`` holds the inputs (1, T, n) of each linear layer in a pass of one text, which
    ``trace`` records, by the weight's name. ``moved`` are those in a second pass, in which the
    token at the position ``middle`` differs. ``groups`` are the names of the weights that take the
    same inputs, in the order of the pass. ``is_causal`` tells whether vectors depend on their token
    and earlier ones only.
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
    if len(layers) != 3:
        return None
    at = torch.arange(mixed.shape[1])[-4:]
    likely = 0 if trace.queries is None else trace.queries.shape[1]
    counts = [count for count in range(1, width + 1) if width % count == 0]
    for heads in sorted(counts, key=lambda count: count != likely):
        for query, key, value in permutations(layers):
            sizes = [len(weight) for weight, _ in (query, key, value)]
            if sizes[0] != width or sizes[1] != sizes[2] or sizes[1] % (width // heads):
                continue
            if width % sizes[1]:
                continue
            for turn in (None, *_turns(trace.queries, F.linear(inputs[0], *query), heads)):
                tried = Attention(query, key, value, heads, turn)
                gap = tried.mixed(inputs[0], at, is_causal) - mixed[0, at]
                if float(gap.norm() / mixed[0, at].norm()) < FLOAT32_RELATIVE_ERROR:
                    return tried
    return None


def _turns(taken: Tensor | None, outputs: Float[Tensor, "T m"], heads: int) -> list[Turn]:
    """Return the rotations by position that turn a layer's outputs into an attention's queries.

    ``outputs`` (T, m) are those of the layer, with m = heads · h. ``taken`` (1, heads, T, h) are
    the queries that the attention takes. An entry may be paired with its neighbour, or with the one
    h/2 places on (rotary embeddings); both are tried. The list is empty if no rotation fits, if the
    queries have another shape, or if ``taken`` is ``None``, as no attention was found.
    """
    size = outputs.shape[-1] // heads
    if taken is None or taken.shape != (1, heads, len(outputs), size) or size % 2:
        return []
    found = []
    for is_halved in (True, False):
        given = _paired(outputs.unflatten(-1, (heads, size)), is_halved)
        ratio = _paired(taken[0].transpose(0, 1), is_halved) * given.conj()
        found.append(Turn(ratio.sum(1) / given.abs().square().sum(1), is_halved))
    return [turn for turn in found if bool(((turn.angles.abs() - 1).abs() < 1e-3).all())]
