"""Texts read off one update of the project's own transformer, and where that ends.

    python -m simulations.benchmarks.text --seed 100 --draws 10

prints a Markdown table. Every row has ``--draws`` draws of weights, texts and labels, from
``--seed`` on. Texts are pieces of the docstrings of Python's standard library, whose most frequent
words are the tokens, or (``--text zipf``) tokens that are drawn by Zipf's law. Given are the texts
that are exact, the tokens in place, the tokens named, others named in error, the answers that are
certified, the certificates that are wrong, and CPU seconds of an update, mean and most. The attack
is the preset ``text``, with at most ``--seconds`` of the CPU. One thread.
"""

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import NextToken
from flwr_leakage.metrics import Evaluator
from flwr_leakage.models import TextTransformer
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel, Update
from simulations.benchmarks import lab

PADDING, CLASSES = 0, 4


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        texts: B, the texts of an update.
        length: T, the tokens of a text.
        width: d of the model.
        causal: a decoder of the next token, instead of an encoder with classes.
        tied: the decoder's last layer is its table of embeddings.
        frozen: the tables of tokens and positions are not trained.
        shortest: texts have ``shortest`` to T tokens; 0 for T.
        steps: local steps of the whole batch.
        rate: their learning rate. The parameters travel in float32.
        adam: the steps are Adam's, of which the server knows nothing.
        dropout: rate of dropout at the client.
        noise: standard deviation of noise on the gradient.
        pruned: share of each tensor's entries that are set to zero.
        half: the gradient travels in bfloat16.
    """

    texts: int
    length: int
    width: int
    causal: bool = False
    tied: bool = False
    frozen: bool = False
    shortest: int = 0
    steps: int = 0
    rate: float = 0.1
    adam: bool = False
    dropout: float = 0.0
    noise: float = 0.0
    pruned: float = 0.0
    half: bool = False

    def __str__(self) -> str:
        """Return the row's first three cells."""
        kind = "decoder" if self.causal else "encoder"
        how = [
            "tied" * self.tied,
            "frozen tables" * self.frozen,
            f"{self.shortest} to {self.length} tokens" * bool(self.shortest),
            f"{self.steps} local step{'s' * (self.steps > 1)}{' of Adam' * self.adam} "
            f"at {self.rate:g}" * bool(self.steps),
            f"dropout {self.dropout:g}" * bool(self.dropout),
            f"noise {self.noise:g}" * bool(self.noise),
            f"{100 * self.pruned:g} % pruned" * bool(self.pruned),
            "bfloat16" * self.half,
        ]
        told = ", ".join(filter(None, how)) or "plain gradient"
        return f"{kind}, width {self.width} | {self.texts} × {self.length} | {told}"


ONE = [Case(1, length, width) for length, width in ((64, 64), (256, 128), (512, 128), (512, 384))]
HARD = [Case(1, 64, 128), Case(1, 256, 384)]
CASES: dict[str, list[Case]] = {
    "one": [*ONE, Case(1, 512, 64), Case(1, 512, 384, causal=True)],
    "hard": [
        *(
            replace(case, **change)  # type: ignore[arg-type]
            for case in HARD
            for change in (
                {"dropout": 0.1}, {"steps": 8}, {"steps": 8, "dropout": 0.1},
                {"steps": 8, "rate": 0.001}, {"half": True}, {"noise": 1e-5}, {"noise": 1e-4},
                {"noise": 1e-3}, {"pruned": 0.5}, {"pruned": 0.9},
                {"steps": 4, "rate": 0.001, "adam": True},
            )
        )
    ],
    "batches": [
        Case(4, 16, 128), Case(8, 16, 192), Case(4, 32, 192), Case(8, 16, 384), Case(4, 32, 384),
        Case(8, 16, 384, shortest=4), Case(8, 16, 192, causal=True), Case(4, 32, 192, causal=True),
        Case(16, 32, 768, causal=True), Case(8, 16, 192, causal=True, shortest=4),
        Case(4, 16, 128, causal=True, tied=True), Case(4, 16, 128, frozen=True),
        Case(8, 16, 384, frozen=True), Case(8, 16, 128),
    ],
    "frozen": [
        replace(Case(4, 16, 384, frozen=True), **change)  # type: ignore[arg-type]
        for change in ({}, {"noise": 1e-5}, {"noise": 3e-5}, {"pruned": 0.5}, {"half": True})
    ],
    "ends": [
        replace(Case(4, 16, 192), **change)  # type: ignore[arg-type]
        for change in (
            {"steps": 1}, {"steps": 8}, {"steps": 8, "rate": 0.01}, {"steps": 8, "rate": 0.001},
            {"half": True}, {"dropout": 0.1}, {"noise": 1e-6}, {"noise": 1e-5}, {"pruned": 0.5},
            {"steps": 4, "rate": 0.001, "adam": True},
        )
    ],
}  # fmt: skip


def draw_texts(case: Case, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return token ids (B, T) from 1 on, drawn by Zipf's law and padded with 0."""
    weights = 1 / torch.arange(1, vocabulary)
    count = case.texts * case.length
    ids = 1 + torch.multinomial(weights, count, replacement=True, generator=generator)
    return _cut(ids.reshape(case.texts, case.length), case, generator)


def docstring_words() -> list[str]:
    """Return the words and marks of docstrings of Python's standard library, in lower case."""
    names = "argparse bisect collections csv decimal difflib email fractions functools heapq \
        inspect itertools json logging pathlib pickle random shutil statistics string subprocess \
        tarfile tempfile textwrap threading typing unittest urllib.parse zipfile"
    found: list[str] = []
    for name in names.split():
        module = importlib.import_module(name)
        entries = [module, *(value for _, value in sorted(vars(module).items()) if callable(value))]
        for entry in entries:
            found += re.findall(r"[a-z]+|[.,;:()]", (inspect.getdoc(entry) or "").lower())
    return found


def word_ids(vocabulary: int) -> Tensor:
    """Return the words of docstrings of Python's standard library as ids, most frequent first.

    Words that are rarer than the vocabulary has room for are left out.
    """
    found = docstring_words()
    common = [word for word, _ in Counter(found).most_common(vocabulary - 1)]
    numbers = {word: 1 + index for index, word in enumerate(common)}
    return torch.tensor([numbers[word] for word in found if word in numbers])


def draw_words(case: Case, words: Tensor, generator: torch.Generator) -> Tensor:
    """Return pieces (B, T) of running text from random places, padded with 0."""
    starts = torch.randint(len(words) - case.length, (case.texts, 1), generator=generator)
    return _cut(words[starts + torch.arange(case.length)], case, generator)


def _cut(ids: Tensor, case: Case, generator: torch.Generator) -> Tensor:
    if case.shortest:
        lengths = torch.randint(case.shortest, case.length + 1, (case.texts,), generator=generator)
        ids[torch.arange(case.length) >= lengths[:, None]] = PADDING
    return ids


def observe(model: nn.Module, case: Case, batch: Batch, spec: InputSpec, seed: int) -> Observation:
    """Return what the server sees of a client that trains on the batch."""
    loss = NextToken(PADDING) if case.causal else F.cross_entropy
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    model.train(case.dropout > 0)
    trained = [value for value in model.parameters() if value.requires_grad]
    schedule = LocalSchedule(case.rate if case.steps else 1.0, max(case.steps, 1), case.texts)
    torch.manual_seed(seed)
    delta: Params = {}
    if case.steps:
        kind = torch.optim.Adam if case.adam else torch.optim.SGD
        optimizer = kind(trained, lr=case.rate)
        for _ in range(case.steps):
            optimizer.zero_grad()
            loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()
        delta = {name: v.detach() - params[name] for name, v in model.named_parameters()}
        model.load_state_dict(params, strict=False)
    else:
        found = torch.autograd.grad(loss(model(batch.inputs), batch.targets), trained)
        named = (name for name, value in model.named_parameters() if value.requires_grad)
        sent = dict(zip(named, (_sent(each, case) for each in found), strict=True))
        delta = {name: -sent.get(name, torch.zeros_like(v)) for name, v in params.items()}
    model.eval()
    return Observation(1, 0, params, {}, Update(delta, {}, schedule, case.texts))


def _sent(gradient: Tensor, case: Case) -> Tensor:
    if case.noise:
        gradient = gradient + case.noise * torch.randn_like(gradient)
    if case.pruned:
        limit = gradient.abs().flatten().kthvalue(int(case.pruned * gradient.numel()) or 1).values
        gradient = gradient * (gradient.abs() > limit)
    return gradient.bfloat16().float() if case.half else gradient


@dataclass(frozen=True)
class Drawn:
    """The result of the attack on the update of one draw.

    Attributes:
        exact: 1.0 for each text that is exact, else 0.
        placed: of each text, the share of its tokens that stand in place.
        named: of each text, the share of its distinct tokens that are named.
        others: tokens named that do not occur.
        certified: whether the answer is certified.
        seconds: of the CPU.
    """

    exact: list[float]
    placed: list[float]
    named: list[float]
    others: int
    certified: bool
    seconds: float


def attack_draw(
    case: Case, vocabulary: int, draw: Callable[[Case, torch.Generator], Tensor], seed: int,
    max_seconds: float,
) -> Drawn:  # fmt: skip
    """Draw weights, texts and labels by a seed, and attack their update.

    Args:
        case: how the update comes about.
        vocabulary: V, the tokens there are.
        draw: returns the texts (B, T).
        seed: of everything that is drawn.
        max_seconds: CPU seconds that the attack has.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    classes = vocabulary if case.causal else CLASSES
    model = TextTransformer(
        (case.length,), classes, vocabulary, PADDING, case.causal, case.tied,
        width=case.width, dropout=case.dropout,
    ).eval()  # fmt: skip
    model.tokens.weight.requires_grad_(not case.frozen)
    model.positions.weight.requires_grad_(not case.frozen)
    ids = draw(case, generator)
    labels = torch.randint(CLASSES, (case.texts,), generator=generator)
    truth = Batch(ids, ids if case.causal else labels)
    spec = InputSpec.text(vocabulary, case.length, None if case.causal else CLASSES, PADDING)
    seen = observe(model, case, truth, spec, seed)
    loss = NextToken(PADDING) if case.causal else F.cross_entropy
    job = AttackJob(GradientMap(model, loss), spec, [seen], ThreatModel(), max_seconds=max_seconds)
    with lab.Stopwatch() as watch:
        (found,) = load_preset("text")(job)
    told = {each.name: each for each in Evaluator().evaluate(found, truth, spec).measurements}
    exact, placed, named = (
        [value or 0.0 for value in told[name].values] if name in told else [0.0]
        for name in ("exact_text", "token_accuracy", "named_tokens")
    )
    others = len(set(found.stats.get("tokens", ())) - set(ids.unique().tolist()))
    certified = bool(found.stats.get("certified"))
    return Drawn(exact, placed, named, others, certified, watch.seconds)


def main() -> None:
    """Attack every case."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--text", choices=("words", "zipf"), default="words")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    given = lab.start(parser)
    words = word_ids(given.vocabulary)
    draw: Callable[[Case, torch.Generator], Tensor] = (
        (lambda case, g: draw_words(case, words, g))
        if given.text == "words"
        else (lambda case, g: draw_texts(case, given.vocabulary, g))
    )
    print(
        "| model | B × T | update | exact texts | tokens in place | named | others named ",
        end="",
    )
    print("| certified | wrong | CPU s | most |\n|" + " --- |" * 11)
    for case in (each for name in given.cases for each in CASES[name]):
        drawn = [
            attack_draw(case, given.vocabulary, draw, seed, given.seconds)
            for seed in range(given.seed, given.seed + given.draws)
        ]
        exact, placed, named = (
            [value for each in drawn for value in values(each)]
            for values in (lambda d: d.exact, lambda d: d.placed, lambda d: d.named)
        )
        certified = [each for each in drawn if each.certified]
        wrong = sum(min(each.exact) < 1 for each in certified)
        others = sum(each.others for each in drawn)
        seconds = [each.seconds for each in drawn]
        shares = " | ".join(f"{100 * mean(values):.1f} %" for values in (placed, named))
        print(
            f"| {case} | {sum(exact):.0f} of {len(exact)} | {shares} | {others} "
            f"| {len(certified)} of {given.draws} | {wrong} | {mean(seconds):.1f} "
            f"| {max(seconds):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
