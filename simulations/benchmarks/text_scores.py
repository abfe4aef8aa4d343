"""Whether scores on embeddings rank texts as attacks on them do, over noise (I²F, figures 4 and 9).

    python -m simulations.benchmarks.text_scores --seed 100 --draws 24 --attack text tag

Each draw is one text of 16 tokens of Python's own help in one step through an untrained
transformer of two layers, with Gaussian noise on the gradient. The attacks are the preset ``text``
and TAG, which those figures used (:func:`~simulations.benchmarks.text_tag.tag`, told the label). A
row has a score and a noise, or all noises together: Spearman's correlation between the score and
the share of tokens in place, ROUGE-1, ROUGE-L, Google BLEU, the nearness of the last features
(minus their squared distance), and the share of tokens named. Intervals of 95 % are by 1,000
bootstrap samples over the draws, each with all of its noises. A score whose larger values mean
safety is negated, so that a score that ranks as the attack does is positive in each row.
"""

from collections.abc import Sequence
from statistics import mean

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.metrics import rouge_l, token_accuracy
from flwr_leakage.models import TextTransformer
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, InputSpec
from flwr_leakage.scores import (
    GradientNorm,
    InfluenceKrylovBound,
    InfluenceLowerBound,
    InversionInfluence,
    LambdaMax,
    score,
)
from simulations.benchmarks import lab
from simulations.benchmarks.text_tag import (
    Embedded,
    by_text,
    google_bleu,
    make_network,
    rouge_1,
    tag,
    whole_texts,
)

SCORES = {
    "gradient norm": GradientNorm(),
    "λmax (LAVP, L2)": LambdaMax(tolerance=0.02),
    "I²F lower bound": InfluenceLowerBound(),
    "I²F Krylov bound": InfluenceKrylovBound(num_steps=8),
    "I²F, damped": InversionInfluence(),
}
Rows = dict[str, np.ndarray]
"""Values (noises, draws) of each score or metric."""


def correlation(left: np.ndarray, right: np.ndarray, draws: np.random.Generator) -> str:
    """Return Spearman's correlation of values (noises, draws) with its interval.

    A dash stands for values that are all alike.
    """
    if len(np.unique(left)) < 2 or len(np.unique(right)) < 2:
        return "–"
    chosen = draws.integers(left.shape[1], size=(1000, left.shape[1]))
    several = _spearman(
        *(np.moveaxis(each[:, chosen], 0, 1).reshape(1000, -1) for each in (left, right))
    )
    low, high = np.nanquantile(several, (0.025, 0.975))
    (found,) = _spearman(left.reshape(1, -1), right.reshape(1, -1))
    return f"{found:.2f} ({low:.2f} to {high:.2f})"


def _spearman(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of each pair of rows, NaN where one is constant."""
    one, other = (rankdata(each, axis=1) for each in (left, right))
    one, other = (each - each.mean(1, keepdims=True) for each in (one, other))
    size = np.sqrt((one**2).sum(1) * (other**2).sum(1))
    return np.divide((one * other).sum(1), size, out=np.full(len(one), np.nan), where=size > 0)


def features(model: TextTransformer, ids: Tensor) -> Tensor:
    """Return what the last layer takes of texts."""
    taken: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return taken[0]


def recovered(
    found: Tensor, named: set[int], truth: Tensor, model: TextTransformer
) -> dict[str, float]:
    """Return what ids (1, T) tell of the true ones, larger meaning more."""
    away = (features(model, found) - features(model, truth)).square().mean()
    own = set(truth[0].tolist())
    return {
        "in place": float(token_accuracy(truth, found)),
        "ROUGE-1": rouge_1(found[0], truth[0]),
        "ROUGE-L": float(rouge_l(truth, found)),
        "Google BLEU": google_bleu(found[0], truth[0]),
        "features": -float(away),
        "named": len(own & named) / len(own),
    }


def attacked(
    kind: str,
    models: Sequence[nn.Module],
    gradients: Sequence[Params],
    labels: Tensor,
    spec: InputSpec,
    given: lab.argparse.Namespace,
) -> list[tuple[Tensor, set[int]]]:
    """Return the ids (1, T) found in each update, zeros for none, and the tokens named."""
    wrapped = [Embedded(model) for model in models]
    if kind == "tag":
        named = [name for name, _ in wrapped[0].named_parameters()]
        start = torch.Generator().manual_seed(given.seed)
        several = [dict(zip(named, each.values(), strict=True)) for each in gradients]
        found = tag(wrapped, several, labels, spec.shape[0], given.iterations, start)
        return [(ids[None], set(ids.tolist())) for ids in found]
    answers = []
    for model, gradient in zip(models, gradients, strict=True):
        told = by_text(model, gradient, spec)
        ids = torch.zeros(1, *spec.shape, dtype=torch.int64)
        answers.append(
            (ids if told.batch is None else told.batch.inputs, set(told.stats.get("tokens", ())))
        )
    return answers


def main() -> None:
    """Score and attack every draw at every noise."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=24)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--noises", type=float, nargs="*", default=[3e-4, 1e-3, 3e-3, 1e-2])
    parser.add_argument("--attack", nargs="*", default=["text"], choices=("text", "tag"))
    parser.add_argument("--iterations", type=int, default=1000, help="of tag")
    given = lab.start(parser)
    texts, spec = whole_texts()
    draws = np.random.default_rng(given.seed)
    with lab.Stopwatch() as watch:
        models, batches = [], []
        for seed in range(given.seed, given.seed + given.draws):
            torch.manual_seed(seed)
            models.append(make_network("own", spec, given.width))
            batches.append(texts.batch([int(torch.randint(len(texts), ()))]))
        scores = _scores(models, batches, given)
        labels = torch.cat([batch.targets for batch in batches])
        for kind in given.attack:
            told: dict[str, list[list[float]]] = {}
            for noise in given.noises:
                gradients = [
                    _noisy(model, batch, noise, given.seed + index)
                    for index, (model, batch) in enumerate(zip(models, batches, strict=True))
                ]
                found = attacked(kind, models, gradients, labels, spec, given)
                rows = [
                    recovered(*answer, batch.inputs, model)
                    for answer, batch, model in zip(found, batches, models, strict=True)
                ]
                for name in rows[0]:
                    told.setdefault(name, []).append([row[name] for row in rows])
            reached = {name: np.array(values) for name, values in told.items()}
            print(f"\nAttack: {kind}\n\n| noise | score |", " | ".join(reached), "|")
            print("|" + " --- |" * (2 + len(reached)))
            for at, noise in enumerate(given.noises):
                _print(f"{noise:g}", scores, reached, slice(at, at + 1), draws)
                means = " | ".join(f"{mean(values[at]):.3g}" for values in reached.values())
                print(f"| {noise:g} | the attack itself | {means} |", flush=True)
            _print("all", scores, reached, slice(None), draws)
    print(f"\n{watch.seconds:.0f} CPU s, n = {given.draws}.")


def _scores(
    models: Sequence[nn.Module], batches: Sequence[Batch], given: lab.argparse.Namespace
) -> Rows:
    """Return the scores at each noise: I²F is linear in it, and the others do not see it."""
    values: dict[str, list[float]] = {name: [] for name in SCORES}
    for index, (model, batch) in enumerate(zip(models, batches, strict=True)):
        seed = given.seed + index
        found = score(model, batch.inputs, batch.targets, SCORES, noise_std=1.0, seed=seed)
        for name, row in values.items():
            sign = -1 if found[name].direction == "larger is safer" else 1
            row.append(sign * float(found[name].values[0] or 0.0))
    scale = np.array(given.noises)[:, None]
    return {
        name: np.array(row) * (scale if name.startswith("I²F") else np.ones_like(scale))
        for name, row in values.items()
    }


def _noisy(model: nn.Module, batch: Batch, noise: float, seed: int) -> Params:
    names = [name for name, _ in model.named_parameters()]
    loss = F.cross_entropy(model(batch.inputs), batch.targets)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + noise * torch.randn(value.shape, generator=generator)
        for name, value in zip(
            names, torch.autograd.grad(loss, list(model.parameters())), strict=True
        )
    }


def _print(noise: str, scores: Rows, reached: Rows, at: slice, draws: np.random.Generator) -> None:
    for name, values in scores.items():
        cells = [correlation(values[at], each[at], draws) for each in reached.values()]
        print(f"| {noise} | {name} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
