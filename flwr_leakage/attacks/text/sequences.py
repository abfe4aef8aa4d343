"""Find whole texts from a transformer's gradients, given the tokens that occur in them.

Each vector that a linear layer took from a private text lies in the row space of the layer's
gradient, its span. The outputs of the first attention depend on the whole text, so that they lie in
the span of the next layer for the right texts only. The span must be smaller than the space, so
that all texts together must have fewer tokens than the model's width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.text.anatomy import Anatomy, Attention, Site, Span

NEAR = 1e-3
"""Relative distance of a vector from the row space of a layer's gradient up to which the search for
texts takes it for an input of the layer. True inputs had 1e-6 at most with a float32 gradient, and
the best wrong ones 0.2 (MiniLM, batches of 64 tokens)."""

ROUGH = 0.5
"""Largest :attr:`Span.error` of a span that is used to recognise texts. The relative distance of
private vectors from a span was at most a hundredth of this error (width 192, one step at rates 0.1
and 0.01, parameters sent in float32)."""

FAINT = 1e-5
"""Share of a token at a position, in the search of :class:`Relaxation`, up to which the token is
left out when the attention's outputs are computed. A hundred tokens that are left out change an
output by at most ``NEAR``."""

PRIOR = 4.0
"""Logit with which the search begins for a pair of token and position to which the gradients of the
embedding tables give the weight 1. Pairs of little weight then soon stop counting: the search for
eight texts took 1,370 steps in place of 1,970 (MiniLM, one development draw, with pairs left out
below a share of 1e-4). No results are kept."""

SITES = 4
"""Number of groups of layers whose spans are compared. The two groups with the most exact spans
serve to recognise texts. Further groups would cost passes through more layers. If a model averages
its states, the last layers have no exact span, as all tokens of a text have almost the same error
there."""

PROBES = 48
"""Number of directions orthogonal to the span of a layer's inputs, by which most vectors are
rejected quickly. No vector near the span is rejected, as its part in these directions is at most
its distance. No results for other numbers are kept."""


@dataclass(frozen=True)
class Spans:
    """The spans of vectors behind the first attention, by which right texts are recognised.

    A span is the row space of a layer's gradient, which holds the vectors that the layer took.

    Attributes:
        problem: the problem, in double precision.
        anatomy: the tables, layers and attention of the problem's model.
        mixed: the span of the first attention's outputs.
        sites: groups of layers behind the first attention, in the order of the pass. They are those
            whose spans are smaller than the space and most exact.
        spans: the span of each of these groups.
        inputs: (U, T, n) the inputs of the first attention for each token at each position.
        tokens: (U,) the ids of the tokens that may occur.
        allowed: (U, T) booleans, true for tokens that may stand at a position, as the span of the
            first layer holds their inputs.
    """

    problem: Problem
    anatomy: Anatomy
    mixed: Span
    sites: tuple[Site, ...]
    spans: tuple[Span, ...]
    inputs: Tensor
    tokens: Tensor
    allowed: Tensor

    @classmethod
    def of(
        cls, problem: Problem, anatomy: Anatomy, tokens: Int[Tensor, " U"], most: int
    ) -> "Spans":
        """Return the spans of the layers behind the first attention, from a float64 update.

        ``tokens`` (U,) are the ids of the tokens that may occur, and ``most`` is the largest number
        of vectors that a layer may have taken.

        Raises:
            ValueError: the first attention is not found, no trained layer lies behind it, its span
                is the whole space, or noise hides the spans.
        """
        if anatomy.attention is None:
            raise ValueError(
                "the first attention is none of softmax(q kᵀ / √h) v, so that texts are not put "
                "together."
            )
        if anatomy.mixed is None:
            raise ValueError("no trained layer behind the first attention has a gradient.")
        mixed = anatomy.mixed.span(problem, most)
        if mixed.is_full:
            raise ValueError(
                f"the gradient behind the first attention has full rank ({len(mixed.basis)}), so "
                "that every text fits: the texts have too many tokens for the width."
            )
        sharp: list[tuple[Site, Span]] = []
        for site in anatomy.deep[: 2 * SITES]:
            span = mixed if site is anatomy.mixed else site.span(problem, most)
            if not span.is_full and span.error < ROUGH:
                sharp.append((site, span))
            if len(sharp) == SITES:
                break
        limit = sorted(span.error for _, span in sharp)[:2][-1:]
        kept = [each for each in sharp if each[1].error <= limit[0]]
        if not kept:
            raise ValueError("the gradients behind the first attention are too rough for spans.")
        first = next(site for site in anatomy.sites if site.is_pointwise)
        inputs = token_inputs(problem, anatomy, first, tokens)
        span = first.span(problem, most)
        allowed = torch.ones(inputs.shape[:2], dtype=torch.bool)
        if not span.is_full:
            allowed = span.distance(inputs) < NEAR
        if not bool(allowed.any()):
            raise ValueError("no token lies in the span of the first layer: it holds noise.")
        sites, spans = zip(*kept, strict=True)
        return cls(problem, anatomy, mixed, sites, spans, inputs, tokens, allowed)

    @property
    def attention(self) -> Attention:
        """The first attention of the model. It is known, as :meth:`of` refuses other models."""
        assert self.anatomy.attention is not None
        return self.anatomy.attention

    def distances(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return for each token of whole texts (B, T) how far its vectors lie outside of ``spans``.

        The vectors are those that the layers behind the first attention would take for the token.
        The result is the largest over all spans of a vector's relative distance from the span. If
        the rounding error e that was estimated for a span exceeds 50 ``NEAR``, the distance from it
        is divided by e / (50 ``NEAR``).
        """
        vectors = self.anatomy.vectors(self.problem, ids, self.sites)
        pairs = zip(self.spans, vectors, strict=True)
        each = [span.distance(v) / max(1.0, span.error / (50 * NEAR)) for span, v in pairs]
        return torch.stack(each).amax(0)


def token_inputs(
    problem: Problem, anatomy: Anatomy, site: Site, tokens: Int[Tensor, " U"]
) -> Float[Tensor, "U T n"]:
    """Return the inputs of the layers of ``site`` for each of U token ids at each of T positions.

    ``anatomy`` holds the model's tables and layers. The inputs come from passes of texts that each
    repeat one token. So they are right only if they depend on nothing but the token and its
    position.
    """
    length = problem.spec.shape[0]
    parts = [
        anatomy.vectors(problem, chunk[:, None].expand(-1, length), [site])[0]
        for chunk in tokens.split(256)
    ]
    return torch.cat(parts)


def grow(spans: Spans, budget: Budget, most: int) -> list[Int[Tensor, " t"]]:
    """Return the texts (t,) of a decoder's batch, found token by token.

    A decoder's vectors depend on earlier tokens only, so that the vectors of each prefix of a right
    text lie in the spans behind the first attention. All prefixes that fit are continued by each
    token whose output of the first attention lies in its span. The deeper spans cost passes of the
    model, so that they are used only if there are more prefixes than texts, and for all texts at
    the end. A text is the longest prefix whose vectors lie in all spans. It lacks a last token on
    which no loss depends.

    Raises:
        ValueError: more prefixes remain than ``most``, or the budget is spent.
    """
    length, kept = spans.inputs.shape[1], spans.problem.num_samples
    # Single precision suffices to compare distances with NEAR, as those of right texts are a
    # thousandth of it.
    parts = [part.float() for part in spans.attention.split(spans.inputs)]
    mixed = Span(spans.mixed.basis.float())
    probes, limit = mixed.probes(PROBES), max(NEAR, spans.mixed.error)
    prefixes, ended = torch.zeros(1, 0, dtype=torch.int64), set[tuple[int, ...]]()
    for t in range(length):
        if budget.is_spent:
            raise ValueError("the time was up while texts were put together.")
        found = []
        for some in prefixes.split(8):
            outputs = _continued(parts, some)
            near = (outputs @ probes.T).norm(dim=-1) < limit * outputs.norm(dim=-1)
            row, token = (near & spans.allowed[:, t]).nonzero().T
            near = mixed.distance(outputs[row, token]) < limit
            found.append(torch.cat([some[row[near]], token[near, None]], 1))
        grown = torch.cat(found)
        going = set(map(tuple, grown[:, :t].tolist()))
        ended |= {prefix for each in prefixes.tolist() if (prefix := tuple(each)) not in going}
        if len(grown) > kept:
            inside = _inside(spans, grown)
            ended |= {tuple(each[:n]) for each, n in zip(grown.tolist(), inside, strict=True)}
            grown = grown[inside > t]
            kept = max(kept, len(grown))
        if len(grown) > most:
            raise ValueError(f"{len(grown)} beginnings of texts fit: spans do not part them.")
        prefixes = grown
        if not len(prefixes):
            break
    ended |= set(map(tuple, prefixes.tolist()))
    texts = {each[: int(_inside(spans, torch.tensor([each])))] for each in _longest(ended)}
    return [spans.tokens[list(text)] for text in sorted(_longest(texts))]


def _longest(texts: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return the texts, as tuples of tokens, that are not the beginning of another given text."""
    return texts - {text[:n] for text in texts for n in range(len(text))} - {()}


def _continued(parts: list[Tensor], prefixes: Int[Tensor, "P t"]) -> Float[Tensor, "P U m"]:
    """Return the first attention's outputs at each of U tokens behind each of P prefixes.

    ``parts`` are queries, keys and values of the attention, each (U, T, heads, h), for each token
    at each position. A prefix (t,) holds indices of tokens.
    """
    t = prefixes.shape[1]
    keys, values = (part[prefixes, torch.arange(t)] for part in parts[1:])
    q, k, v = (part[:, t] for part in parts)
    earlier = torch.einsum("uhc,pjhc->puhj", q, keys)
    own = (q * k).sum(-1, keepdim=True).expand(len(prefixes), -1, -1, -1)
    weights = torch.cat([earlier, own], -1).softmax(-1)
    outputs = torch.einsum("puhj,pjhc->puhc", weights[..., :t], values)
    return (outputs + weights[..., t:] * v).flatten(2)


def _inside(spans: Spans, prefixes: Int[Tensor, "P t"]) -> Int[Tensor, " P"]:
    """Return for each prefix (t,) how many of its first tokens have their vectors in all spans.

    ``spans`` are the row spaces of gradients of the layers behind the first attention. A prefix
    holds indices in the list of tokens that may occur.
    """
    length = prefixes.shape[1]
    last = prefixes[:, -1:].expand(-1, spans.inputs.shape[1] - length)
    distances = spans.distances(spans.tokens[torch.cat([prefixes, last], 1)])[:, :length]
    return (distances < NEAR).long().cumprod(1).sum(1)


@dataclass(frozen=True)
class Relaxation:
    """A search for the texts of an encoder's batch by gradient descent, one text after another.

    Let j count all pairs of a token and a position, with key k_j and value v_j. The first
    attention's output at pair i, with query q_i, is a mean over the text, ``Σ_j y_j w_ij v_j / Σ_j
    y_j w_ij`` with ``w_ij = exp(q_i k_j)``, where y_j is 1 if the token stands at the position, and
    else 0. The search relaxes y to shares that sum to 1 at each position. The layer that takes the
    outputs has a gradient whose row space holds the true ones. Adam minimises the part of the
    outputs outside of it. In this objective only the output at the likeliest token of each position
    counts, by that token's share. Every mixture of several texts would nearly minimise it. So one
    token that occurs once in the batch, the *anchor*, is fixed at its position, and only its own
    text is a minimum. One token after another is taken as the anchor.

    Attributes:
        iterations: number of steps of Adam for each anchor.
        rate: learning rate of Adam.
        anchors: largest number of anchors that are tried for each text.
        patience: number of anchors in a row that may fail, as a multiple of the number of texts,
            before the search offers to subtract the texts found (1 and 0.25 were tried, on two
            development draws of MiniLM).
    """

    iterations: int = 200
    rate: float = 0.3
    anchors: int = 30
    patience: float = 0.25

    def __call__(
        self, spans: Spans, weights: Float[Tensor, "T U"] | None, count: int, budget: Budget
    ) -> Iterator[Int[Tensor, " t"] | None]:
        """Yield the token ids (t,) of one text after another, up to ``count``, as they are found.

        ``spans`` hold the row spaces of gradients of the layers behind the first attention layer,
        in which the vectors of a right text lie, and the U tokens that may occur. ``weights`` tell
        how likely each of these tokens stands at each of T positions, or are ``None``. The search
        yields ``None`` each time that too many anchors failed in a row.
        """
        parts = list(spans.attention.split(spans.inputs))
        start = torch.zeros(spans.allowed.T.shape)
        if weights is not None:
            start = PRIOR * weights.float().clamp(0, 1)
        found: list[Tensor] = []
        used = torch.zeros_like(spans.allowed)
        anchors = _anchors(spans.allowed, weights)[: self.anchors * count]
        failed = 0
        while anchors and not budget.is_spent and len(found) < count:
            if failed > self.patience * count:
                failed = 0
                yield None
            # The next anchor is a token of no text found so far, as it must be in one of the texts
            # left.
            covered = used.any(1)
            first = next((n for n, (token, _) in enumerate(anchors) if not covered[token]), 0)
            token, place = anchors.pop(first)
            if used[token, place]:
                continue
            # The texts that are left have at least as many tokens as the span has dimensions beyond
            # the number of tokens found. If that is the number of their positions, none of these
            # texts is padded.
            left = len(spans.mixed.basis) - sum(len(text) for text in found)
            may_end = spans.problem.spec.padding is not None
            may_end &= left < (count - len(found)) * len(start)
            shares = self._shares(spans, parts, start - 2.0 * used.T, token, place, may_end)
            text = self._rounded(spans, parts, shares, place)
            if text is None or any(torch.equal(text, other) for other in found):
                failed += 1
                continue
            failed = 0
            found.append(text)
            used[text, torch.arange(len(text))] = True
            yield spans.tokens[text]

    def _shares(
        self,
        spans: Spans,
        parts: list[Tensor],
        start: Float[Tensor, "T U"],
        token: int,
        place: int,
        may_end: bool,
    ) -> Float[Tensor, "T more"]:
        """Return the shares (T, U + 1) of each token at each position; the last one is padding's.

        ``spans`` hold the span of the first attention's outputs, which lie in it for a right text.
        ``parts`` are the attention's queries, keys and values, each (U, T, heads, h). ``start``
        holds the logits of the first shares. The anchor, a token by index, is fixed at the position
        ``place``. If ``may_end`` is False, no position holds padding, unless no token fits it.
        """
        q, k, v = (part.float() for part in parts)
        span = Span(spans.mixed.basis.float())
        padding = torch.full_like(spans.allowed[:1], may_end)
        open_ = torch.cat([spans.allowed, padding]).T
        logits = F.pad(start, (0, 1))
        open_[place] = False
        open_[place, token] = True
        # A position that no listed token fits holds padding.
        open_[:, -1] |= ~open_.any(1)
        logits.requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=self.rate)
        for step in range(self.iterations):
            if step % 10 == 0:
                shares = self._normal(logits.detach(), open_)
                text = _likeliest(shares, place)
                if text is not None and bool((_distances(spans, parts, text[None]) < NEAR).all()):
                    return shares
                likely = shares[:, :-1].max(1)
                trust = likely.values / likely.values.sum()
                at = likely.indices, torch.arange(len(trust))
                queries = _Mean.of(q[at], k, v, shares[:, :-1] > FAINT)
            with torch.enable_grad():
                mixed = queries(self._normal(logits, open_)[:, :-1])
                losses = span.outside(mixed).square().sum(1) / mixed.square().sum(1)
                optimizer.zero_grad()
                (losses * trust).sum().backward()
            optimizer.step()
        return self._normal(logits.detach(), open_)

    @staticmethod
    def _normal(logits: Tensor, open_: Tensor) -> Tensor:
        return logits.masked_fill(~open_, -1e9).softmax(1)

    def _rounded(
        self, spans: Spans, parts: list[Tensor], shares: Float[Tensor, "T more"], place: int
    ) -> Int[Tensor, " t"] | None:
        """Return the text of the largest shares; ``None`` if its vectors leave the spans.

        The spans are the row spaces of gradients of the layers behind the first attention. If some
        vectors leave them, other likely tokens are tried at each position first. The result is also
        ``None`` if the text ends before the position ``place``. ``parts`` are the first attention's
        queries, keys and values, each (U, T, heads, h). ``shares`` are those of tokens and padding
        at each position.
        """
        text = _likeliest(shares, place)
        if text is None:
            return None
        best = _distances(spans, parts, text[None])[0]
        for _ in range(3):
            if float(best.max()) < NEAR or float(best.median()) > 0.5:
                break
            for at in range(len(text)):
                options = shares[at, :-1].topk(min(6, len(spans.tokens))).indices
                tried = text.repeat(len(options), 1)
                tried[:, at] = options
                distances = _distances(spans, parts, tried)
                least = int(distances.square().sum(1).argmin())
                text, best = tried[least], distances[least]
        deep = spans.distances(_whole(spans, text[None]))[0, : len(text)]
        return text if float(deep.max()) < NEAR else None


def _likeliest(shares: Float[Tensor, "T more"], place: int) -> Int[Tensor, " t"] | None:
    """Return the tokens (t,) of the largest shares, up to the first position that is padding.

    The result is ``None`` if the text ends before the position ``place``.
    """
    likely = shares.argmax(1)
    padded = (likely == shares.shape[1] - 1).nonzero()
    length = int(padded[0, 0]) if len(padded) else len(shares)
    return likely[:length] if length > place else None


def _distances(
    spans: Spans, parts: list[Tensor], texts: Int[Tensor, "B t"]
) -> Float[Tensor, "B t"]:
    """Return the relative distance of the first attention's outputs from their span, per token.

    ``parts`` are the attention's queries, keys and values, each (U, T, heads, h). ``texts`` holds
    indices of tokens.
    """
    q, k, v = (part[texts, torch.arange(texts.shape[1])] for part in parts)
    weights = torch.einsum("bihc,bjhc->bhij", q, k).softmax(-1)
    return spans.mixed.distance(torch.einsum("bhij,bjhc->bihc", weights, v).flatten(2))


def _whole(spans: Spans, texts: Int[Tensor, "B t"]) -> Int[Tensor, "B T"]:
    """Return the token ids (B, T) of texts, filled up with padding to the model's length T.

    The texts (B, t) hold indices in the list of tokens that may occur.
    """
    spec = spans.problem.spec
    left = spec.shape[0] - texts.shape[1]
    padding = texts.new_full((len(texts), left), spec.padding or 0)
    return torch.cat([spans.tokens[texts], padding], 1)


@dataclass(frozen=True)
class _Mean:
    """The first attention's outputs (Q, m) at Q queries, as a function of shares (T, U).

    A share tells how far a token stands at a position. Only n pairs of a token and a position have
    shares that are large enough to count.

    Attributes:
        weights: (heads, Q, n) exp(q k) of each query q and the key k of each of these pairs.
        values: (heads, n, h + 1) the value of each pair, followed by 1.
        counts: (T, U) booleans, true for the pairs that count.
    """

    weights: Tensor
    values: Tensor
    counts: Tensor

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, values: Tensor, counts: Tensor) -> "_Mean":
        keys, values = (each.transpose(0, 1)[counts].transpose(0, 1) for each in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2)
        weights = (scores - scores.amax(2, keepdim=True)).exp()
        return cls(weights, F.pad(values, (0, 1), value=1.0), counts)

    def __call__(self, shares: Tensor) -> Tensor:
        sums = (shares[self.counts] * self.weights) @ self.values
        return (sums[..., :-1] / sums[..., -1:]).transpose(0, 1).flatten(1)


def _anchors(
    allowed: Bool[Tensor, "U T"], weights: Float[Tensor, "T U"] | None
) -> list[tuple[int, int]]:
    """Return pairs of a token's index and a position, first those likeliest to occur only once.

    ``allowed`` is true for tokens that may stand at a position. ``weights`` tell how likely each
    token stands there; if ``None``, tokens that are allowed at few positions come first.
    """
    pairs = allowed.nonzero()
    if weights is None:
        middle = (pairs[:, 1] - allowed.shape[1] / 2).abs()
        order = allowed.sum(1)[pairs[:, 0]] * allowed.shape[1] + middle
    else:
        order = -weights.T[pairs[:, 0], pairs[:, 1]]
    return [(int(token), int(place)) for token, place in pairs[order.argsort(stable=True)]]
