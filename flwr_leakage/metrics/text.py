"""Measure recovered texts against the private texts."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import flwr_leakage._torchvision  # noqa: F401

# isort: split
from torchmetrics.functional.text import edit_distance

TextGrade = Literal["all tokens", "most tokens", "some tokens", "no more than a guess"]


def match_texts(
    truth: Int[Tensor, "B T"], found: Int[Tensor, "M T"], padding: int | None = None
) -> Int[Tensor, " B"]:
    """Return the recovered text that belongs to each true one, so that most tokens are in their
    place.

    Args:
        truth: the token ids of the true texts.
        found: the token ids of the recovered texts; each is used at most once.
        padding: the id of padding, whose places in a true text do not count; ``None`` for none.

    Returns:
        For each true text the index of its recovered text; −1 if there are too few.

    Example:
        >>> match_texts(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[3, 9], [1, 2]]))
        tensor([1, 0])
    """
    same = ((truth[:, None] == found[None]) & _own(truth, padding)[:, None]).sum(2)
    rows, columns = linear_sum_assignment(same.numpy(), maximize=True)
    matched = torch.full((len(truth),), -1)
    matched[torch.as_tensor(rows)] = torch.as_tensor(columns)
    return matched


def token_accuracy(
    truth: Int[Tensor, "B T"], found: Int[Tensor, "B T"], padding: int | None = None
) -> Float[Tensor, " B"]:
    """Return the share of each true text's tokens, without padding, that are found in their place.

    ``padding`` is the id of padding, ``None`` for none. A text of padding alone has the share 0.

    Example:
        >>> token_accuracy(torch.tensor([[5, 6, 0, 0]]), torch.tensor([[5, 7, 0, 0]]), padding=0)
        tensor([0.5000])
    """
    own = _own(truth, padding)
    return ((truth == found) & own).sum(1) / own.sum(1).clamp_min(1)


def rouge_l(
    truth: Int[Tensor, "B T"], found: Int[Tensor, "B T"], padding: int | None = None
) -> Float[Tensor, " B"]:
    """Return ROUGE-L of each pair of texts, the F1 score of the longest common subsequence.

    If the longest common subsequence of texts of n and m tokens has L tokens, ROUGE-L is
    ``2 L / (n + m)`` (Lin 2004). ``padding`` is the id of padding, which does not count. L follows
    from the edit distance without replacements, which is ``n + m − 2 L``.

    Example:
        >>> rouge_l(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, 9]]))
        tensor([0.7500])
    """
    scores = []
    for one, other in zip(truth, found, strict=True):
        # torchmetrics compares strings, so each token id becomes a letter of its own.
        letters = [
            "".join(chr(0x10000 + token) for token in text[_own(text, padding)].tolist())
            for text in (one, other)
        ]
        size = sum(map(len, letters))
        apart = edit_distance(letters[1:], letters[:1], substitution_cost=2, reduction="sum")
        scores.append(1 - float(apart) / size if size else 0.0)
    return torch.tensor(scores)


def text_grade(accuracy: float, blind: float) -> TextGrade:
    """Return in words how much of a text an attack recovered beyond a blind guess.

    The gain over the blind guess is (accuracy − blind) / (1 − blind). From 0.5 on the result is
    ``most tokens``, and from 0.1 on ``some tokens``.

    Args:
        accuracy: the share of tokens that the attack has in their place.
        blind: the share of tokens that the blind guess, one frequent token at all positions, has in
            its place.

    Example:
        >>> text_grade(1.0, 0.1), text_grade(0.5, 0.1), text_grade(0.15, 0.1)
        ('all tokens', 'some tokens', 'no more than a guess')
    """
    if accuracy == 1:
        return "all tokens"
    gain = (accuracy - blind) / (1 - blind) if blind < 1 else 0.0
    if gain >= 0.5:
        return "most tokens"
    return "some tokens" if gain >= 0.1 else "no more than a guess"


def _own(ids: Int[Tensor, "*shape"], padding: int | None) -> Bool[Tensor, "*shape"]:
    """Return booleans, true for tokens that are not the ``padding``; with ``None``, for all."""
    return torch.ones_like(ids, dtype=torch.bool) if padding is None else ids != padding
