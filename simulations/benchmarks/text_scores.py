"""Whether scores on embeddings rank texts as the attack on tokens does, over noise.

    python -m simulations.benchmarks.text_scores --seed 100 --draws 40

Each draw is one text of Python's own help in one step through an untrained two-layer transformer of
its own, with Gaussian noise on the gradient. A row has a score and a noise, or all of them
together: Spearman's correlation between the score and the share of tokens in place, exact texts,
ROUGE-L, and the share of tokens named, with 95 % intervals by 1,000 bootstrap samples over the
draws. A score whose larger values mean safety is negated, so that a score that ranks as the attack
does is positive in each row. The attack is the preset ``text``.
"""

from statistics import mean

import numpy as np
import torch
from scipy.stats import spearmanr
from torch.nn import functional as F

from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.data import python_docs
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.metrics import Evaluator
from flwr_leakage.models import TextTransformer
from flwr_leakage.records import LocalSchedule, Observation, ThreatModel, Update
from flwr_leakage.scores import (
    GradientNorm,
    InfluenceKrylovBound,
    InfluenceLowerBound,
    InversionInfluence,
    LambdaMax,
    score,
)
from simulations.benchmarks import lab

NOISES = (3e-4, 1e-3, 3e-3, 1e-2)
METRICS = ("token_accuracy", "exact_text", "rouge_l", "named_tokens")
SCORES = {
    "gradient norm": GradientNorm(),
    "λmax (LAVP, L2)": LambdaMax(tolerance=0.02),
    "I²F lower bound": InfluenceLowerBound(),
    "I²F Krylov bound": InfluenceKrylovBound(num_steps=8),
    "I²F, damped": InversionInfluence(),
}


def correlation(left: np.ndarray, right: np.ndarray, draws: np.random.Generator) -> str:
    """Return Spearman's correlation with its interval; a dash where one is constant."""
    if len(set(left)) < 2 or len(set(right)) < 2:
        return "–"
    several = []
    for _ in range(1000):
        chosen = draws.integers(len(left), size=len(left))
        if len(set(left[chosen])) > 1 and len(set(right[chosen])) > 1:
            several.append(spearmanr(left[chosen], right[chosen]).statistic)
    low, high = np.quantile(several, (0.025, 0.975))
    return f"{spearmanr(left, right).statistic:.2f} ({low:.2f} to {high:.2f})"


def rows(
    noise: str,
    told: dict[str, list[float]],
    reached: dict[str, list[float]],
    draws: np.random.Generator,
) -> None:
    """Print a row for each score."""
    for name, values in told.items():
        cells = [correlation(np.array(values), np.array(each), draws) for each in reached.values()]
        print(f"| {noise} | {name} |", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Score and attack every draw at every noise."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--width", type=int, default=32)
    given = lab.start(parser)
    texts, _ = python_docs()
    spec, attack, evaluator = texts.spec, load_preset("text"), Evaluator()
    draws = np.random.default_rng(given.seed)
    print("| noise | score | tokens in place | exact | ROUGE-L | named |\n|" + " --- |" * 6)
    pooled: list[dict[str, list[float]]] = []
    with lab.Stopwatch() as watch:
        for noise in NOISES:
            told: dict[str, list[float]] = {name: [] for name in SCORES}
            reached: dict[str, list[float]] = {name: [] for name in METRICS}
            for seed in range(given.seed, given.seed + given.draws):
                torch.manual_seed(seed)
                model = TextTransformer(
                    spec.shape, spec.num_classes, spec.vocabulary, spec.padding, width=given.width
                ).eval()
                batch = texts.batch([int(torch.randint(len(texts), ()))])
                found = score(
                    model, batch.inputs, batch.targets, SCORES, noise_std=noise, seed=seed
                )
                for name, values in told.items():
                    safer = found[name].direction == "larger is safer"
                    values.append((-1 if safer else 1) * float(found[name].values[0] or 0.0))
                gradient = torch.autograd.grad(
                    F.cross_entropy(model(batch.inputs), batch.targets), list(model.parameters())
                )
                names = [name for name, _ in model.named_parameters()]
                delta = {
                    name: -(value + noise * torch.randn_like(value))
                    for name, value in zip(names, gradient, strict=True)
                }
                params = GradientMap(model).params
                seen = Observation(1, 0, params, {}, Update(delta, {}, LocalSchedule(1.0, 1, 1), 1))
                job = AttackJob(GradientMap(model), spec, [seen], ThreatModel(), max_seconds=10)
                (answer,) = attack(job)
                measured = {m.name: m for m in evaluator.evaluate(answer, batch, spec).measurements}
                for name, values in reached.items():
                    found_values = measured[name].values if name in measured else (0.0,)
                    values.append(float(found_values[0] or 0.0))
            pooled.append({**told, **reached})
            rows(f"{noise:g}", told, reached, draws)
            means = " | ".join(f"{100 * mean(values):.0f} %" for values in reached.values())
            print(f"| {noise:g} | the attack itself | {means} |", flush=True)
        every = {name: [value for each in pooled for value in each[name]] for name in pooled[0]}
        rows("all", {n: every[n] for n in SCORES}, {n: every[n] for n in METRICS}, draws)
    print(f"\n{watch.seconds:.0f} CPU s, n = {given.draws}.")


if __name__ == "__main__":
    main()
