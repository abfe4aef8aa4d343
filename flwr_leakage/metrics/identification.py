"""Identification: whether a reconstruction tells its original apart from other samples."""

from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.records import InputSpec

MEAN_COLOUR = "one flat image, in the mean colour that the inputs are normalised with"


@dataclass(frozen=True)
class Reference:
    """The attacker's knowledge of the data before any update is seen.

    Attributes:
        guess: (C, H, W) pixels in [0, 1], or (T,) token ids: the blind guess.
        pool: (N, C, H, W) pixels in [0, 1] of other samples, among which the original is hidden, or
            (N, T) token ids.
        class_names: one a class, or empty.
        meaning: what the blind guess is, in words for a reader, such as ``the mean of …``; or
            empty.
        words: the word that each token id of a text stands for, or empty.
    """

    guess: Tensor
    pool: Tensor
    class_names: tuple[str, ...] = ()
    meaning: str = ""
    words: tuple[str, ...] = ()

    @staticmethod
    def of(spec: InputSpec) -> "Reference":
        """Return the least that is public: the mean colour of the normalisation, and an empty pool.

        For texts it is any token, at all positions.
        """
        if spec.is_text:
            (ids,) = spec.blank(1, torch.zeros(()))
            return Reference(ids, ids.new_zeros(0, *spec.shape), meaning="one token, repeated")
        guess = spec.denormalize(torch.zeros(spec.shape)).clamp(0, 1)
        return Reference(guess, torch.empty(0, *spec.shape), meaning=MEAN_COLOUR)

    @staticmethod
    def of_texts(
        spec: InputSpec,
        public: Int[Tensor, "M T"],
        pool: Int[Tensor, "N T"] | None = None,
        class_names: tuple[str, ...] = (),
        words: tuple[str, ...] = (),
    ) -> "Reference":
        """Return the most frequent token of public texts, at all positions.

        Args:
            spec: the public facts about the texts.
            public: texts that the guess is made of; padding does not count.
            pool: texts among which the original is hidden; the public ones if ``None``.
            class_names: one a class, or empty.
            words: what each id stands for, or empty.
        """
        tokens = public.flatten() if spec.padding is None else public[public != spec.padding]
        guess = tokens.mode().values.expand(spec.shape)
        told = "the most frequent token of other texts, repeated"
        return Reference(guess, public if pool is None else pool, class_names, told, words)


def identification_ranks(
    reconstructed: Float[Tensor, "B C H W"],
    truth: Float[Tensor, "B C H W"],
    reference: Reference,
    up_to_brightness: bool = False,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Return the original's place when all images are ordered by their likeness.

    The likeness of two images is the cosine of what sets each apart from the blind guess m:
    ``⟨x̂ − m, x − m⟩ / (‖x̂ − m‖ ‖x − m‖)``. It ignores contrast, and what all images have in
    common tells nobody apart. After the identification precision of Yin et al. (2021, section
    4), which is the share of rank 1, in pixels instead of a network's features. An attack that
    knows nothing reaches rank 1 once in as many times as there are images.

    Args:
        reconstructed: pixels in [0, 1].
        truth: the original of each.
        reference: the blind guess and the others; what equals the original is left out, else the
            last one.
        up_to_brightness: whether the likeness also ignores brightness, and contrast about any grey
            level: constants and multiples of the blind guess are projected out of all images.

    Returns:
        The rank of each original, 1 for the likeliest, ties counted against the attack; and the
        number of images, the original included.
    """
    guess = reference.guess.to(truth).flatten()

    def deviation(images: Tensor) -> Tensor:
        flat = images.to(truth).flatten(1)
        if not up_to_brightness:
            return _directions(flat - guess)
        shape = _directions((guess - guess.mean())[None])
        centred = flat - flat.mean(1, keepdim=True)
        return _directions(centred - (centred @ shape.T) * shape)

    others, ours, originals = map(deviation, (reference.pool, reconstructed, truth))
    own = (ours * originals).sum(1)
    same = _equal(truth, reference.pool)
    # The pool may hold the original itself; where it does not, one is left out all the same, so
    # that all samples are looked for among equally many.
    same[~same.any(1), -1:] = True
    nearer = ((ours @ others.T) >= own[:, None]) & ~same
    return 1 + nearer.sum(1), 1 + (~same).sum(1)


def text_ranks(
    found: Int[Tensor, "B T"],
    truth: Int[Tensor, "B T"],
    reference: Reference,
    padding: int | None = None,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Return the original text's place when all texts are ordered by their likeness.

    The likeness of two texts is the number of tokens that they share, each as often as it occurs
    in both, as a share of their mean length (ROUGE-1 of Lin 2004). It does not depend on the order
    of the tokens.

    Args:
        found: the recovered texts; −1 where no token was found.
        truth: the original of each.
        reference: holds the others; what equals the original is left out, else the last one.
        padding: the id that does not count.

    Returns:
        As :func:`identification_ranks`.
    """
    ranks, counts = [], []
    others = [_tokens(text, padding) for text in reference.pool]
    for ours, original in zip(found, truth, strict=True):
        own, answer = _tokens(original, padding), _tokens(ours, padding)
        rest = [each for each, text in zip(others, reference.pool, strict=True)
                if not torch.equal(text, original)]  # fmt: skip
        rest = rest[:-1] if len(rest) == len(others) else rest
        least = _likeness(answer, own)
        ranks.append(1 + sum(_likeness(answer, each) >= least for each in rest))
        counts.append(1 + len(rest))
    return torch.tensor(ranks, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)


def _tokens(text: Int[Tensor, " T"], padding: int | None) -> Counter[int]:
    return Counter(token for token in text.tolist() if token not in (padding, -1))


def _likeness(one: Counter[int], other: Counter[int]) -> float:
    return 2 * (one & other).total() / max(one.total() + other.total(), 1)


def _directions(deviations: Tensor) -> Tensor:
    """Return unit vectors, zero where there is no deviation, which resembles nothing."""
    norms = deviations.norm(dim=1, keepdim=True)
    return torch.where(norms > 1e-6, deviations / norms.clamp_min(1e-12), 0.0)


def _equal(truth: Tensor, pool: Tensor) -> Tensor:
    """Return booleans (B, N), true where an image of the pool equals the original."""
    flat, others = truth.flatten(1).float(), pool.flatten(1).float()
    rows = [(others - one).abs().amax(1) < 1e-4 for one in flat] if len(others) else []
    return torch.stack(rows) if rows else torch.zeros(len(flat), len(others), dtype=torch.bool)
