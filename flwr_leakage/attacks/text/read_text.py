"""Attack a transformer's update: find the tokens and the texts of the batch from the gradient."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.network.linear import find_last_layer, traced
from flwr_leakage.attacks.network.trace import LinearUse
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.text.anatomy import Anatomy, Site
from flwr_leakage.attacks.text.sequences import NEAR, Relaxation, Spans, grow, token_inputs
from flwr_leakage.attacks.text.tables import (
    atoms,
    noise_of,
    pair_weights,
    placed_tokens,
    pursue,
    rows_above,
    tied_rows,
)
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, Reconstruction

CERTAIN = 1e-5
"""Largest relative distance of the texts' vectors from the span of a layer's gradient, and of the
texts' gradient from the observed one, at which texts are certified. Private texts had 4e-7 and
1.3e-7 at most, and nearly right texts (a neighbour token, two tokens swapped) 2e-1 and 3e-2 at
least (MiniLM, batches of 64 tokens)."""

REPLAYS = 5
"""Largest number of replays of guessed texts for an embedding table that is also the last layer's
weight. A replay gives the part of the table's gradient that it has as the embeddings, which is
subtracted from the observed gradient."""


@dataclass(frozen=True)
class ReadText(OneByOne):
    """An attack on transformers that finds the tokens of a batch, and then whole texts.

    *Named* tokens are those that are known to occur. The gradient of a trained table of embeddings
    has a nonzero row for each of them (:mod:`~flwr_leakage.attacks.text.tables`). If the table is
    frozen, the span of the first layer's gradient shows the tokens, as long as it is smaller than
    the space (after Petrov et al. 2024, DAGER).

    *Placed* tokens have their place in a text. A single text follows from the gradients of the
    tables of tokens and positions by least squares. It may have any length up to the model's width,
    and the client any number of steps. Several texts are found by the spans of the gradients behind
    the first attention: a decoder's token by token, and an encoder's by a relaxation
    (:mod:`~flwr_leakage.attacks.text.sequences`). All texts together must have fewer tokens than
    the width.

    Texts are *replay-certified* under two conditions, each up to float32 rounding: their own
    gradient is the observed one, and all their vectors lie in the spans and have the spans' rank
    (or, for the tables, all coefficients are 1). A certificate is no proof in logic. The order of
    the texts, padding, and tokens with equal embeddings remain open.

    ``stats["tokens"]`` holds the named tokens, even if no text was placed. ``stats["named"]``,
    ``placed`` and ``texts`` are the numbers of named tokens, of placed tokens and of whole texts,
    ``certified`` tells whether they are replay-certified, and ``replay`` is the relative distance
    of their gradient from the observed one.

    Attributes:
        relaxation: the search for the texts of an encoder.
        prefixes: largest number of beginnings of texts that are followed at once, as a multiple of
            the number of texts, plus 32.
    """

    purpose: ClassVar[str] = "text"
    reads_text: ClassVar[bool] = True

    relaxation: Relaxation = field(default_factory=Relaxation)
    prefixes: int = 4

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the texts that were found behind one update, and how far they are certain.

        If tokens were found but no text, the result has no batch, and its stats hold the tokens.

        Args:
            problem: the network, the observed update and the attacker's knowledge, in float64.
            generator: the random stream of this observation.
            restart: number of the restart, which is not used.
            budget: the limit of CPU time.

        Raises:
            ValueError: no token can be named, or the client used weight decay.
        """
        if problem.schedule.weight_decay:
            raise ValueError("weight decay adds the tables themselves to their gradients.")
        with torch.no_grad():
            anatomy = Anatomy.of(problem, generator)
            tokens, source = _named(problem, anatomy, generator)
            stats: dict[str, Any] = {"tokens": tuple(tokens.tolist()), "named": len(tokens)}
            named = f"named {len(tokens)} tokens by {source}"
            try:
                found = self._texts(problem, anatomy, tokens, _most(problem), budget)
            except ValueError as error:
                return Reconstruction(None, math.nan, stats, error=f"{named}, placed none: {error}")
            return _answer(problem, anatomy, found, stats, named, budget.is_spent)

    def _texts(
        self, problem: Problem, anatomy: Anatomy, tokens: Tensor, most: int, budget: Budget
    ) -> "_Found":
        """Return the texts that were found, given the ids (U,) of the tokens that occur.

        ``anatomy`` holds the tables, layers and attention of the network. ``most`` is the largest
        number of tokens that a layer may have processed.

        Raises:
            ValueError: no text was found; the message says why.
        """
        count, reason = problem.num_samples, ""
        if count == 1:
            try:
                return _by_tables(problem, anatomy, tokens)
            except ValueError as error:
                reason = f"{error} "
        try:
            spans = Spans.of(problem, anatomy, tokens, most)
            if anatomy.is_causal:
                limit = self.prefixes * count + 32
                texts = grow(spans, budget, limit)
            else:
                texts = self._relaxed(spans, _weights(problem, anatomy, tokens), budget)
        except ValueError as error:
            raise ValueError(f"{reason}{error}") from error
        if not texts:
            raise ValueError(f"{reason}no text has all of its vectors in the spans.")
        # If positions only rotate q and k, the attention of a text that repeats one token averages
        # equal values, whatever the text's length. So spans say little about it, and it comes last.
        texts.sort(key=lambda text: (len(text.unique()) > 1, len(text)), reverse=True)
        return _Found(texts[:count], "spans", spans)

    def _relaxed(self, spans: Spans, weights: Tensor | None, budget: Budget) -> list[Tensor]:
        """Return the token ids (t,) of each text of an encoder's batch that was found.

        Where the search fails again and again, the texts found are subtracted from the gradient,
        and the rest is searched anew. ``spans`` are those of the gradients behind the first
        attention. ``weights`` (T, U) tell how likely a token stands at a position.
        """
        texts: list[Tensor] = []
        tried = 0
        for text in self.relaxation(spans, weights, spans.problem.num_samples, budget):
            if text is not None:
                texts.append(text)
            elif len(texts) > tried:
                tried = len(texts)
                if others := self._others(spans, texts, budget):
                    return texts + others
        return texts

    def _others(self, spans: Spans, texts: list[Tensor], budget: Budget) -> list[Tensor]:
        """Return further texts (t,) of a batch, from the gradient without that of the texts found.

        The rest of the gradient has fewer tokens, and spans of a smaller rank: all vectors of a
        batch are linearly independent if their number is below the width. The list is empty if
        nothing can be subtracted or found.
        """
        problem, anatomy = spans.problem, spans.anatomy
        if not _can_subtract(problem, anatomy):
            return []
        rest, tokens, gone = _without(problem, anatomy, texts)
        if not gone or not rest.num_samples or not len(tokens):
            return []
        most = len(spans.mixed.basis) - sum(len(text) for text in gone)
        try:
            found = self._texts(rest, anatomy, tokens, most, budget).texts
        except ValueError:
            return []
        return [each for each in found if not any(torch.equal(each, text) for text in texts)]


@dataclass(frozen=True)
class _Found:
    """The texts that were found. For a next-token model they may lack the last token.

    Attributes:
        texts: the token ids (t,) of each text.
        source: the evidence by which the texts were found, in words.
        spans: the spans of the gradients behind the first attention, if they served as evidence,
            else ``None``.
        is_exact: whether there is one text, and the gradients of the tables of tokens and positions
            give it exactly: each row of the tokens' table is the sum of its positions' rows, all
            with the weight 1.
    """

    texts: list[Tensor]
    source: str
    spans: Spans | None = None
    is_exact: bool = False


SUBTRACTED = 1e-3
"""Largest ratio of what a subtracted text leaves of a token's row of the embedding table's gradient
to the row, at which the text's label counts as right, and a token as gone. A float32 gradient
leaves 1e-5 of a token that occurs once; a wrong label leaves a tenth or more."""

CLASSES = 32
"""Largest number of classes among which the label of a text is sought by one pass for each."""


def _can_subtract(problem: Problem, anatomy: Anatomy) -> bool:
    """Return whether the gradient of single texts can be subtracted from that of a batch.

    That takes a plain gradient, a trained table of embeddings, ``anatomy.words``, and few classes.
    """
    is_plain = problem.is_single_gradient and problem.known_targets is None
    is_trained = anatomy.words in problem.gradient_map.trained and not anatomy.is_tied
    return is_plain and is_trained and problem.spec.num_classes <= CLASSES


def _without(
    problem: Problem, anatomy: Anatomy, texts: list[Tensor]
) -> tuple[Problem, Tensor, list[Tensor]]:
    """Return the problem of a batch without some of its texts, its tokens (U,), and these texts.

    The gradient is the mean of the texts' own gradients, which depend on their labels. The right
    label makes the rows of the embedding table's gradient vanish for the tokens that occur in this
    text only. If there are none, the text is not subtracted.
    """
    single, spec, name = problem.to(torch.float32), problem.spec, anatomy.words
    gradient, count = dict(problem.gradient), problem.num_samples
    table = problem.gradient[name].float()
    sizes, gone = table.norm(dim=1).clamp_min(1e-30), list[Tensor]()
    for text in texts:
        ids, tokens = _padded([text], spec.shape[0], spec.padding), text.unique()
        for label in range(spec.num_classes):
            own = single.replay(Batch(ids, torch.tensor([label])))
            gaps = (table[tokens] - own[name][tokens] / count).norm(dim=1)
            if float((gaps / sizes[tokens]).min()) < SUBTRACTED:
                gradient = {key: value - own[key] / count for key, value in gradient.items()}
                gone.append(text)
                break
    left = count - len(gone)
    for key in filter(None, (name, anatomy.positions)):
        rest = gradient[key].norm(dim=1) > SUBTRACTED * problem.gradient[key].norm(dim=1)
        gradient[key] = gradient[key] * rest[:, None]
    tokens = gradient[name].any(1).nonzero()[:, 0]
    if spec.padding is not None:
        tokens = tokens[tokens != spec.padding]
    gradient = {key: value * count / max(left, 1) for key, value in gradient.items()}
    return replace(problem, gradient=gradient, num_samples=left), tokens, gone


def _most(problem: Problem) -> int:
    """Return the largest number of tokens that a layer may have processed over all local steps.

    Of a text for a next-token model, the last token does not count.
    """
    length = problem.spec.shape[0] - problem.spec.next_token
    steps = problem.schedule.num_steps
    return min(steps * problem.schedule.batch_size, steps * problem.num_samples) * length


def _named(problem: Problem, anatomy: Anatomy, generator: torch.Generator) -> tuple[Tensor, str]:
    """Return the tokens (U,) that occur in a batch, and a text on how they were found.

    ``anatomy`` holds the tables and layers of the network.

    Raises:
        ValueError: no token has a gradient of its own.
    """
    spec = problem.spec
    if anatomy.words in problem.gradient_map.trained:
        table = problem.gradient[anatomy.words]
        if anatomy.is_tied:
            tokens = tied_rows(table, _most(problem), generator)
            source = "the table of embeddings, which is the last layer's, too"
        else:
            tokens, source = rows_above(table, noise_of(table)), "the table of embeddings"
    else:
        tokens, source = _by_first_layer(problem, anatomy)
    if spec.padding is not None:
        tokens = tokens[tokens != spec.padding]
    if not len(tokens):
        raise ValueError("no token has a gradient of its own.")
    return tokens, source


def _by_first_layer(problem: Problem, anatomy: Anatomy) -> tuple[Tensor, str]:
    first = next((site for site in anatomy.sites if site.is_pointwise), None)
    if first is None:
        raise ValueError("the table of embeddings is frozen, and so is the first layer behind it.")
    rows = torch.cat([problem.gradient[name] for name in first.weights])
    try:
        found = pursue(rows, *atoms(problem, anatomy, first), _most(problem))
        return found, "few atoms of the first layer"
    except ValueError:
        return _by_first_span(problem, anatomy, first), "the span of the first layer"


def _by_first_span(problem: Problem, anatomy: Anatomy, first: Site) -> Tensor:
    span = first.span(problem, _most(problem))
    if span.is_full:
        raise ValueError(
            f"the table of embeddings is frozen, and the first layer's gradient has full rank "
            f"{len(span.basis)}: every token fits."
        )
    found = []
    for chunk in torch.arange(problem.spec.vocabulary).split(1024):
        inputs = token_inputs(problem, anatomy, first, chunk)
        found.append(chunk[(span.distance(inputs) < NEAR).any(1)])
    return torch.cat(found)


def _position_rows(problem: Problem, anatomy: Anatomy) -> Tensor | None:
    """Return the gradient (T, d) of the embedding table of positions, one row for each position.

    The result is ``None`` if there is no such table, if it or that of the tokens is frozen, or if
    the tokens' table is also the last layer.
    """
    name, trained = anatomy.positions, problem.gradient_map.trained
    if name is None or anatomy.is_tied or not {name, anatomy.words} <= trained:
        return None
    return problem.gradient[name][anatomy.places]


def _weights(problem: Problem, anatomy: Anatomy, tokens: Tensor) -> Tensor | None:
    rows = _position_rows(problem, anatomy)
    return None if rows is None else pair_weights(problem.gradient[anatomy.words][tokens], rows)


def _by_tables(problem: Problem, anatomy: Anatomy, tokens: Tensor) -> _Found:
    """Return the single text that the gradients of the tables of tokens and positions give.

    ``anatomy`` names these tables. ``tokens`` (U,) are the ids of the tokens that occur.

    Raises:
        ValueError: there is no trained table of positions, or the gradients give no text.
    """
    rows = _position_rows(problem, anatomy)
    if rows is None:
        raise ValueError("no table of positions tells the order.")
    table = problem.gradient[anatomy.words]
    noise = noise_of(table)
    used = rows_above(rows, noise)
    if not torch.equal(used, torch.arange(len(used))):
        raise ValueError("the positions that have a gradient do not follow one another.")
    chosen, weights = placed_tokens(table[tokens], rows[used], noise)
    is_exact = bool(((weights - 1).abs() < 1e-3).all())
    return _Found([tokens[chosen]], "the tables of tokens and positions", is_exact=is_exact)


def _answer(
    problem: Problem,
    anatomy: Anatomy,
    found: _Found,
    stats: dict[str, Any],
    named: str,
    is_spent: bool,
) -> Reconstruction:
    """Return the reconstruction of the texts, after their labels or last tokens are found.

    Its stats, which extend the given ones, say in words how far the texts are certified. ``named``
    tells how the tokens were found, and ``is_spent`` whether the budget ended the search.
    """
    spec, count = problem.spec, problem.num_samples
    try:
        head: LinearUse | None = find_last_layer(problem)
    except ValueError:
        head = None
    if head is not None and head.weight not in problem.gradient_map.trained:
        head = None
    # A single gradient is replayed in single precision, as the client computed it, in half the
    # time. The change by several steps is a difference of near numbers, which needs double
    # precision.
    like = problem.to(torch.float32) if problem.is_single_gradient else problem
    placed = sum(len(text) for text in found.texts)
    words = f"{named}, placed {placed} by {found.source}"
    ids, own = _padded(found.texts, spec.shape[0], spec.padding), None
    if spec.next_token:
        lengths = [len(text) for text in found.texts]
        hidden = torch.tensor(stats["tokens"]) if anatomy.is_tied else torch.tensor([]).long()
        ids, ends, own = _with_last_tokens(problem, ids, lengths, head, hidden, like)
        source = "the last layer and replays" if anatomy.is_tied else "the last layer"
        words += f", {len(ends)} of {len(ids)} last tokens by {source}"
        stats["tokens"] = tuple(sorted({*stats["tokens"], *ends}))
        batch = Batch(ids, ids)
    else:
        targets, sure = _labels(problem, ids, head)
        words += f", {sure}"
        batch = Batch(ids, targets)
    words += f": {len(ids)} of {count} {'texts' if count > 1 else 'text'}"
    replay = _distance(problem, like.replay(batch) if own is None else own)
    certified = len(ids) == count and replay <= CERTAIN
    if found.spans is None:
        certified &= found.is_exact
    elif certified:
        certified &= _fits(problem, found.spans, ids, [len(text) for text in found.texts])
    words += ", replay-certified" if certified else ", not certified"
    words += f" (the gradient is met to {replay:.1g})"
    stats |= {"placed": placed, "texts": len(ids), "certified": certified, "replay": replay}
    return Reconstruction(batch, replay**2, {**stats, "stage": words, **stop_mark(is_spent)})


def _padded(texts: list[Tensor], length: int, padding: int | None) -> Tensor:
    ids = torch.full((len(texts), length), padding or 0)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return ids


@dataclass(frozen=True)
class _Head:
    """The last layer at all predictions that enter the loss; its gradient gives their errors.

    The N predictions have features F (N, n), the layer's inputs, and errors ``D = p − y`` (N, K),
    with the probabilities p and the one-hot targets y. As ``∂L/∂W = Dᵀ F / N``, the errors are
    ``D = N (F⁺)ᵀ ∂L/∂Wᵀ``, if the features are linearly independent.

    Attributes:
        weight: the name of W (K, n).
        softmax: (N, K) the probabilities p that the model predicts.
        inverse: (n, N) the pseudoinverse F⁺.
    """

    weight: str
    softmax: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, problem: Problem, ids: Tensor, weight: str, at: Tensor) -> "_Head":
        """Return the last layer, given by its weight, at some of its inputs in a pass of texts.

        ``at`` (N,) are the indices of these inputs among all: (B · T, n), one for each token, or
        (B, n) if the model gives each text a class.
        """
        use = [each for each in traced(problem, ids).linear if each.weight == weight][-1]
        features = use.inputs.reshape(-1, use.inputs.shape[-1])[at]
        outputs = use.outputs.reshape(-1, use.outputs.shape[-1])[at]
        return cls(weight, outputs.softmax(-1), torch.linalg.pinv(features, rtol=1e-9))

    def errors(self, problem: Problem, gradient: Tensor, total: int, rows: Tensor) -> Tensor:
        """Return the errors p − y (R, K) of R of the last layer's N predictions, given by ``rows``.

        ``gradient`` (K, n) is the observed gradient by the layer's weight, or some rows of it. The
        loss is a mean over ``total`` predictions. The result is divided by the weight of a local
        step in the update, which ``problem`` holds.
        """
        return total / problem.gradient_weight * (gradient @ self.inverse[:, rows]).T


def _labels(problem: Problem, ids: Tensor, head: LinearUse | None) -> tuple[Tensor, str]:
    """Return the classes (B,) of texts (B, T), and a sentence on how they were found.

    If the last layer is frozen, ``head`` is ``None``, and all classes are 0.
    """
    granted = problem.known_targets
    if granted is not None and len(ids) == 1 == problem.num_samples:
        return granted, "labels granted"
    if head is None:
        return torch.zeros(len(ids), dtype=torch.int64), "labels unknown (the last layer is frozen)"
    rows = torch.arange(len(ids))
    last = _Head.of(problem, ids, head.weight, rows)
    errors = last.errors(problem, problem.gradient[head.weight], problem.num_samples, rows)
    return (last.softmax - errors).argmax(1), "labels by the last layer"


def _with_last_tokens(
    problem: Problem,
    ids: Tensor,
    lengths: list[int],
    head: LinearUse | None,
    hidden: Tensor,
    like: Problem,
) -> tuple[Tensor, list[int], Params | None]:
    """Complete texts that lack their last token, which only the last prediction's error shows.

    The error p − y of the last prediction, with the one-hot y of the token, follows from the
    gradient of the last layer's weight W and the pseudoinverse F⁺ of its N inputs. If the last
    layer is also the embedding table, its rows also hold the gradients of the inputs. A replay of a
    guess y′, with the gradient g′, removes them: ``y = y′ − N (∂L/∂W − g′) F⁺``. The replay is
    repeated with the tokens found.

    The texts (B, T) are filled up with padding; ``lengths`` are their numbers of known tokens. The
    last layer, ``head``, is ``None`` if it is frozen. ``hidden`` are tokens whose rows of its
    gradient hold more than errors. ``like`` is the problem in the precision of the replays.

    Returns:
        The completed texts (B, T), in which a token that is not sure is padding; the tokens that
        are sure; and the completed texts' own gradient if a replay confirmed all tokens, else
        ``None``.
    """
    length, spec = ids.shape[1], problem.spec
    rows = torch.tensor([row for row, n in enumerate(lengths) if n < length])
    if head is None or not len(rows):
        return ids, [], None
    at = torch.cat([row * length + torch.arange(n) for row, n in enumerate(lengths)])
    place = torch.tensor(lengths)[rows]
    ends = torch.tensor(lengths).cumsum(0)[rows] - 1
    last, gradient = _Head.of(problem, ids, head.weight, at), problem.gradient[head.weight]
    likely = last.softmax[ends] - last.errors(problem, gradient, len(at), ends)
    likely[:, hidden] = 0.0
    if spec.padding is not None:
        likely[:, spec.padding] = 0.0
    found = likely.max(1)
    chosen, sure = found.indices, found.values > 0.5
    ids, confirmed = ids.clone(), None
    for _ in range(REPLAYS if len(hidden) and not bool(sure.all()) else 0):
        ids[rows, place] = chosen
        own = like.replay(Batch(ids, ids))
        left = (gradient - own[head.weight])[hidden]
        errors = last.errors(problem, left, len(at), ends)
        # Only hidden tokens are sought, as a last token that is not hidden is sure already.
        best = ((chosen[:, None] == hidden).to(errors) - errors).max(1)
        before, chosen = chosen, torch.where(sure, chosen, hidden[best.indices])
        if torch.equal(before, chosen):
            sure = sure | (best.values > 0.5)
            confirmed = own if bool(sure.all()) else None
            break
    ids[rows, place] = torch.where(sure, chosen, spec.padding or 0)
    return ids, chosen[sure].tolist(), confirmed


def _distance(problem: Problem, own: Params) -> float:
    """Return ``‖g − g*‖ / ‖g*‖`` over trained parameters.

    g is the gradient of a candidate batch by parameter name, ``own``, and g* the observed one.
    """
    names = [name for name in problem.gradient if name in problem.gradient_map.trained]
    pairs = [(own[name], problem.gradient[name]) for name in names]
    gap = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs)
    return math.sqrt(gap / sum(float(theirs.square().sum()) for _, theirs in pairs))


def _fits(problem: Problem, spans: Spans, ids: Tensor, lengths: list[int]) -> bool:
    """Return whether all vectors of texts (B, T) lie in the most exact span, and have its rank.

    ``spans`` are the row spaces of gradients of the layers behind the first attention. The vectors
    are those layers' inputs. ``lengths`` count the texts' tokens.
    """
    live = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    site, span = min(zip(spans.sites, spans.spans, strict=True), key=lambda each: each[1].error)
    vectors = spans.anatomy.vectors(problem, ids, [site])[0][live]
    rank = int(torch.linalg.matrix_rank(vectors, rtol=1e-9))
    return rank == len(span.basis) and float(span.distance(vectors).max()) <= CERTAIN
