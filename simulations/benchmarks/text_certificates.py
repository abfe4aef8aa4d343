"""Whether a certificate of texts is ever wrong: right answers, and answers that nearly are.

    python -m simulations.benchmarks.text_certificates --seed 100 --draws 40

Each draw is a batch of three texts of twelve tokens (docstrings of Python's standard library) and
an untrained two-layer transformer of width 64, an encoder or a decoder in turn. The preset ``text``
reads the plain gradient. Its texts are then spoilt before their certificate: a token is replaced by
its nearest neighbour in the table of embeddings, two neighbours are swapped, two texts swap a
token, or a text starts with its first token twice. A row has the answers, those certified, the
certificates that are wrong, and the least relative distance of a gradient that was replayed.
"""

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flwr_leakage
from flwr_leakage.attacks.text import read_text
from flwr_leakage.losses import NextToken
from flwr_leakage.models import TextTransformer
from flwr_leakage.records import Batch, InputSpec
from simulations.benchmarks import lab
from simulations.benchmarks.text import Case, draw_words, word_ids

PADDING, CLASSES, AT = 0, 4, 3


def neighbour(ids: Tensor, table: Tensor) -> None:
    """Replace a token by its nearest neighbour."""
    apart = torch.cdist(table[ids[0, AT]][None], table[1:])[0]
    ids[0, AT] = 1 + apart.topk(2, largest=False).indices[1]


def swapped(ids: Tensor, table: Tensor) -> None:
    """Swap two neighbours that differ."""
    at = int((ids[0, 1:-2] != ids[0, 2:-1]).nonzero()[0, 0]) + 1
    ids[0, [at, at + 1]] = ids[0, [at + 1, at]]


def crossed(ids: Tensor, table: Tensor) -> None:
    """Let two texts swap a token at a place where they differ."""
    at = int((ids[0, :-1] != ids[1, :-1]).nonzero()[0, 0])
    ids[[0, 1], at] = ids[[1, 0], at]


def repeated(ids: Tensor, table: Tensor) -> None:
    """Let a text start with its first token twice, or its second if it does."""
    ids[0, 1] = ids[0, 0] if ids[0, 1] != ids[0, 0] else ids[0, 2]


Change = Callable[[Tensor, Tensor], None]

KINDS: dict[str, Change | None] = {
    "as it was found": None,
    "a token's nearest neighbour": neighbour,
    "two neighbours swapped": swapped,
    "a token swapped between texts": crossed,
    "the first token repeated": repeated,
}


def _spoilt(
    padded: Callable[..., Tensor], change: Change | None, table: Tensor, *arguments: object
) -> Tensor:
    ids = padded(*arguments)
    if change is not None and len(ids) == 3:
        change(ids, table)
    return ids


def main() -> None:
    """Certify every draw's answers."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=40)
    given = lab.start(parser)
    words = word_ids(2000)
    told: dict[str, list[tuple[bool, bool, float]]] = {name: [] for name in KINDS}
    padded = read_text._padded
    with lab.Stopwatch() as watch:
        for seed in range(given.seed, given.seed + given.draws):
            torch.manual_seed(seed)
            causal = bool(seed % 2)
            model = TextTransformer(
                (12,), 2000 if causal else CLASSES, 2000, PADDING, causal, width=64
            ).eval()
            generator = torch.Generator().manual_seed(seed)
            ids = draw_words(Case(3, 12, 64), words, generator)
            labels = torch.randint(CLASSES, (3,), generator=generator)
            truth = Batch(ids, ids if causal else labels)
            loss: nn.Module | Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
            loss = NextToken(PADDING) if causal else loss
            gradient = torch.autograd.grad(
                loss(model(ids), truth.targets), list(model.parameters())
            )
            spec = InputSpec.text(2000, 12, None if causal else CLASSES, PADDING)
            table = model.tokens.weight.detach()
            for name, change in KINDS.items():
                spoilt = partial(_spoilt, padded, change, table)
                with mock.patch.object(read_text, "_padded", spoilt):
                    found = flwr_leakage.attack(
                        model, gradient, spec=spec, loss=loss, num_examples=3, preset="text"
                    )
                if found.batch is None:
                    continue
                right = sorted(found.batch.inputs.tolist()) == sorted(ids.tolist())
                stats = found.stats
                told[name].append((bool(stats["certified"]), right, float(stats["replay"])))
    print("| answer | answers | right | certified | wrong | least distance | largest |")
    print("|" + " --- |" * 7)
    for name, answers in told.items():
        certified, right, replays = zip(*answers, strict=True)
        wrong = sum(c and not r for c, r in zip(certified, right, strict=True))
        print(
            f"| {name} | {len(answers)} | {sum(right)} | {sum(certified)} | {wrong} "
            f"| {min(replays):.1g} | {max(replays):.1g} |"
        )
    print(f"\n{watch.seconds:.0f} CPU s.")


if __name__ == "__main__":
    main()
