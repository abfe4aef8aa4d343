"""Load texts of Python's own documentation, which every CPython installs; nothing is downloaded."""

import re
from collections import Counter
from collections.abc import Sequence

import torch

from flwr_leakage.data.splitting import stratified_split
from flwr_leakage.data.text_dataset import PADDING, TextDataset
from flwr_leakage.randomness import make_generator

TOPICS = (
    "specialnames", "compound", "types", "formatstrings", "string-methods", "typesseq", "debugger",
    "typesmapping", "comparisons", "assignment",
)  # fmt: skip
"""Topics of Python's ``help`` with long texts that have few passages in common."""

FEWEST = 6
"""The least number of tokens of a text, and the least allowed ``length``. A shorter end of a
paragraph is left out."""

RARE = "…"
"""The word in ``TextDataset.words`` that stands for all tokens outside of the vocabulary."""

_TEST_FRACTION = 0.2
_TOKEN = re.compile(r"[a-z_]+|\d+|[^\sa-z_\d*=\-#]")


def python_docs(
    length: int = 16,
    vocabulary: int = 2000,
    topics: Sequence[str] = TOPICS,
    split_seed: int = 0,
    next_token: bool = False,
) -> tuple[TextDataset, TextDataset]:
    """Return texts cut from topics of Python's own ``help``, labelled by their topic.

    The topics are read from ``pydoc_data`` of the running interpreter, under its licence (PSF-2.0),
    and no text is copied into this package. Another minor version of Python has slightly other
    texts. Each paragraph is cut into texts of ``length`` tokens (words in lower case, numbers and
    punctuation marks); the end of the paragraph becomes a shorter text. No text occurs twice. Id 0
    is the padding, the ids from 2 on belong to the most frequent tokens, and id 1 stands for all
    others.

    Args:
        length: the largest number T of tokens of a text.
        vocabulary: the number V of ids.
        topics: the topics of ``help``; each is a class.
        split_seed: the seed of the split and of the order of the texts.
        next_token: whether a model learns the next token at each position, and not the topic.

    Returns:
        The training set and the test set, of 80 % and 20 % of each topic's texts.

    Raises:
        ValueError: a topic is unknown or has too few texts, or ``length`` or ``vocabulary`` is too
            small.
        ImportError: the interpreter was installed without ``pydoc_data``.
    """
    if length < FEWEST:
        raise ValueError(f"length must be at least {FEWEST} tokens, got {length}.")
    if vocabulary < 3:
        raise ValueError(f"vocabulary must be at least 3 ids, got {vocabulary}.")
    try:
        from pydoc_data.topics import topics as pages
    except ImportError as error:
        raise ImportError(
            "python_docs reads the topics of Python's own help, and this interpreter was "
            "installed without pydoc_data: install Python's full standard library."
        ) from error
    unknown = [topic for topic in topics if topic not in pages]
    if unknown or not topics:
        raise ValueError(
            f"topics must be names of Python's help, such as {TOPICS[:3]}, got "
            f"{unknown or list(topics)}."
        )
    found: dict[tuple[str, ...], int] = {}
    for label, topic in enumerate(topics):
        for paragraph in re.split(r"\n\s*\n", pages[topic]):
            tokens = _TOKEN.findall(paragraph.lower())
            for start in range(0, len(tokens), length):
                text = tuple(tokens[start : start + length])
                if len(text) >= FEWEST:
                    found.setdefault(text, label)
    counts = Counter(word for text in found for word in text)
    words = ("", RARE, *(word for word, _ in counts.most_common(vocabulary - 2)))
    numbers = {word: number for number, word in enumerate(words)}
    ids = torch.full((len(found), length), PADDING)
    for row, text in zip(ids, found, strict=True):
        row[: len(text)] = torch.tensor([numbers.get(word, 1) for word in text])
    labels = torch.tensor(list(found.values()))
    generator = make_generator(split_seed, purpose="python_docs")
    sides = stratified_split(labels, _TEST_FRACTION, generator)
    train, test = (
        TextDataset("python_docs", ids[side], labels[side], tuple(topics), words, next_token)
        for side in sides
    )
    return train, test
