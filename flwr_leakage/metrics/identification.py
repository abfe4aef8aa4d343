"""Measure whether a reconstruction identifies its original among other samples."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.records import InputSpec

MEAN_COLOUR = "one flat image, in the mean colour that the inputs are normalised with"


@dataclass(frozen=True)
class Reference:
    """A blind guess, made without the update, and other samples, to compare a reconstruction with.

    Attributes:
        guess: the blind guess, (C, H, W) pixels in [0, 1] or (T,) token ids.
        pool: the other samples among which the original is looked for, N samples in the form of
            ``guess``; without any, no rank is measured.
        class_names: the name of each class, by index; empty if unknown.
        meaning: a description of the blind guess, such as ``the mean of …``; empty if there is
            none.
        words: the word that each token id stands for, by id; empty if unknown.
    """

    guess: Tensor
    pool: Tensor
    class_names: tuple[str, ...] = ()
    meaning: str = ""
    words: tuple[str, ...] = ()

    @staticmethod
    def of(spec: InputSpec) -> "Reference":
        """Return the reference that needs no data, with an empty pool of other samples.

        The blind guess is one flat image in the normalisation's mean colour. For texts it is the
        token id 0 at all positions, or 1 if 0 is the id of padding.
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
        """Return a reference for texts; its guess is public texts' most frequent token, repeated.

        Args:
            spec: the public facts about the texts.
            public: the public texts, as token ids; padding does not count.
            pool: the texts among which the original is looked for; the public ones if ``None``.
            class_names: the name of each class, or empty.
            words: the word that each token id stands for, or empty.
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
    """Return the rank of each original among other images, by likeness to its reconstruction.

    The likeness of a reconstruction x̂ and an image x is the cosine of their differences from the
    blind guess m, which is made without the update: ``⟨x̂ − m, x − m⟩ / (‖x̂ − m‖ ‖x − m‖)``. It
    ignores contrast, and what all images have in common does not count. The share of rank 1 is the
    identification precision of Yin et al. (2021, section 4), here in pixels instead of a network's
    features. Among n images, an attack that knows nothing reaches rank 1 with probability 1/n.

    Args:
        reconstructed: the reconstructions, pixels in [0, 1].
        truth: the original of each, pixels in [0, 1].
        reference: the blind guess m, and the pool of other images. For each original, the pool's
            image that equals it is left out, or the last one if none does, so that each is ranked
            among equally many.
        up_to_brightness: whether the likeness also ignores brightness, by projecting constants and
            multiples of the blind guess out of all images.

    Returns:
        The rank of each original, 1 for the most alike, with ties counted against the attack; and
        the number n of images it is ranked among, itself included.
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
    # The pool's copy of the original is left out, or the last image if there is none, so that each
    # original is ranked among equally many.
    same[~same.any(1), -1:] = True
    nearer = ((ours @ others.T) >= own[:, None]) & ~same
    return 1 + nearer.sum(1), 1 + (~same).sum(1)


def text_ranks(
    found: Int[Tensor, "B T"],
    truth: Int[Tensor, "B T"],
    reference: Reference,
    padding: int | None = None,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Return the rank of each original among other texts, by likeness to the recovered text.

    The likeness is the number of tokens that two texts share in any order, each as often as it
    occurs in both, divided by the mean length of the two texts (ROUGE-1 of Lin 2004).

    Args:
        found: the token ids of the recovered texts; −1 where no token was found.
        truth: the token ids of the originals.
        reference: its pool are the other texts. For each original, the pool's text that equals it
            is left out, or the last one if none does.
        padding: the id of padding, which does not count; ``None`` for none.

    Returns:
        The rank of each original, 1 for the most alike, with ties counted against the attack; and
        the number of texts it is ranked among, itself included.
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
    """Return the rows of ``deviations`` scaled to unit length; a row with a norm of at most 1e-6
    becomes zero.
    """
    norms = deviations.norm(dim=1, keepdim=True)
    return torch.where(norms > 1e-6, deviations / norms.clamp_min(1e-12), 0.0)


def _equal(truth: Tensor, pool: Tensor) -> Tensor:
    """Return booleans (B, N), true where sample n of the pool equals original b.

    They are equal if no pixel or token id differs by 1e-4 or more.
    """
    return torch.cdist(truth.flatten(1).float(), pool.flatten(1).float(), p=math.inf) < 1e-4
