"""ε of DP-SGD beside Opacus and dp-accounting, and what an attacker shows of it in a game.

``python -m simulations.benchmarks.epsilon_table --seed 100 --trials 4000`` prints two tables. It
needs ``pip install opacus dp-accounting``; the second asks for an older attrs than other packages
do, so that an environment of its own is best.

**The first** has a row for each local training and sampling, with this project's ε for both
adjacencies, each beside what others compute. Opacus knows add-or-remove only. dp-accounting
composes privacy loss distributions (PLD) and rounds them up: of the bounds it is the tightest.

**The second** is a distinguishing game. Two clients differ in one record, and a test at a threshold
on the update alone names one of them. With d the chance that it names the first where it is the
first, and f where it is the second, ε ≥ ln((d − δ)/f). The threshold is chosen on half of the
trials; d and f are the limits of Clopper and Pearson (1934) on the other half, at 95 % together.
What is shown must lie below what is stated. How far below says little: few trials show no large ε.
The last column is ε of the steps that hold the record, each moved by C: what was stated once.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from flwr_leakage.defenses import DPSGD, LocalRound, gaussian_epsilon
from flwr_leakage.defenses.accounting import ADJACENCIES, Adjacency
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import ravel
from flwr_leakage.randomness import Reproducible
from flwr_leakage.records import Batch, LocalSchedule, Update
from flwr_leakage.schedules import EpochSchedule
from simulations.benchmarks import lab


@dataclass(frozen=True)
class Setting:
    """A client's training: n samples, batches, epochs a round, rounds, and DP-SGD."""

    num_examples: int
    batch_size: int
    num_epochs: int
    num_rounds: int
    noise_multiplier: float
    delta: float

    @property
    def schedule(self) -> LocalSchedule:
        """The local training of a round."""
        epochs = EpochSchedule(0.1, self.num_epochs, self.batch_size)
        return epochs.for_client(self.num_examples)

    def epsilon(self, sampling: Any, adjacency: Adjacency) -> float:
        """ε of this project."""
        defense = DPSGD(1.0, self.noise_multiplier, self.delta, sampling)
        found = defense.epsilon(self.schedule, self.num_examples, self.num_rounds, adjacency)
        assert found is not None
        return found


SETTINGS = [
    Setting(1000, 10, 1, 1, 1.0, 1e-5),
    Setting(1000, 10, 1, 10, 1.0, 1e-5),
    Setting(1000, 10, 5, 20, 1.5, 1e-5),
    Setting(500, 50, 1, 5, 0.8, 1e-5),
    Setting(500, 50, 2, 50, 2.0, 1e-5),
    Setting(40, 20, 1, 10, 2.0, 1e-3),
    Setting(40, 20, 5, 10, 4.0, 1e-3),
    Setting(60_000, 600, 1, 15, 1.1, 1e-6),
    Setting(60_000, 60, 1, 1, 0.6, 1e-6),
    Setting(100, 1, 1, 1, 0.5, 1e-4),
    Setting(100, 100, 10, 1, 5.0, 1e-4),
    Setting(10_000, 200, 2, 50, 4.0, 1e-7),
]


def others(setting: Setting, rate: float, steps: int, adjacency: Adjacency) -> list[float | None]:
    """ε by Opacus' Rényi accountant, by its PRV accountant and by dp-accounting's PLD."""
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant
    from opacus.accountants import PRVAccountant, RDPAccountant

    one = dp.GaussianDpEvent(setting.noise_multiplier)
    if rate < 1:
        one = dp.PoissonSampledDpEvent(rate, one)
    elif adjacency == "replace-one":  # dp-accounting has Gaussian steps for a sensitivity of 1
        one = dp.GaussianDpEvent(setting.noise_multiplier / 2)
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    if adjacency == "replace-one" and rate < 1:
        relation = dp.NeighboringRelation.REPLACE_ONE
    pld = PLDAccountant(relation).compose(dp.SelfComposedDpEvent(one, steps))
    tight = float(pld.get_epsilon(setting.delta))
    if adjacency == "replace-one":
        return [None, None, tight]
    found = []
    for accountant in (RDPAccountant(), PRVAccountant()):
        accountant.history = [(setting.noise_multiplier, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(float(accountant.get_epsilon(setting.delta)))
    return [*found, tight]


def accountants(settings: Sequence[Setting]) -> Iterator[list[object]]:
    """The rows of the first table."""
    for setting in settings:
        steps = setting.schedule.num_steps * setting.num_rounds
        rate = min(1.0, setting.batch_size / setting.num_examples)
        touched = setting.num_epochs * setting.num_rounds
        for sampling, chance, counted in (("poisson", rate, steps), ("in_order", 1.0, touched)):
            cells: list[str] = []
            for adjacency in ADJACENCIES:
                own = setting.epsilon(sampling, adjacency)
                known = others(setting, chance, counted, adjacency) if math.isfinite(own) else None
                cells += [_written(own), *map(_written, known or [None] * 3)]
            yield [
                setting.num_examples,
                setting.batch_size,
                f"{setting.num_epochs} × {setting.num_rounds}",
                f"{setting.noise_multiplier:g}",
                f"{setting.delta:g}",
                sampling,
                *(cells[i] for i in (0, 3, 4, 5, 6, 7)),
            ]


def _written(epsilon: float | None) -> str:
    if epsilon is None:
        return "–"
    return f"{epsilon:.3f}" if math.isfinite(epsilon) else "none"


# The game


def signed_records(signs: Sequence[float]) -> Batch:
    """Records whose clipped gradients are ±C (1, −1)/√2, whatever small weights there are."""
    return Batch(torch.tensor(signs).double().reshape(-1, 1, 1, 1), torch.zeros(len(signs)).long())


def play(defense: DPSGD, schedule: LocalSchedule, batch: Batch, trials: int, seed: int) -> Tensor:
    """The released weights along (1, −1)/√2 in units of the noise of all steps, for each trial."""
    gradient_map = GradientMap(nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False)).double())
    params = {k: torch.zeros_like(v) for k, v in gradient_map.params.items()}
    around = LocalRound(gradient_map, params, {}, batch, batch)
    update = Update(params, {}, schedule, len(batch))
    draws = Reproducible.from_seed(seed)
    found = [ravel(defense.on_update(update, draws, around).delta) for _ in range(trials)]
    along = torch.stack(found) @ torch.tensor([1.0, -1.0]).double() / math.sqrt(2)
    divisor = min(schedule.batch_size, len(batch))
    return along * divisor / (defense.noise_multiplier * defense.max_norm * schedule.num_steps**0.5)


def shown_epsilon(first: Tensor, second: Tensor, threshold: float, delta: float) -> float:
    """The ε that a test at a threshold shows, with confidence 95 %; 0 where it shows none."""
    hits, alarms = (int((values > threshold).sum()) for values in (first, second))
    detected = stats.beta.ppf(0.025, hits, len(first) - hits + 1) if hits else 0.0
    false = stats.beta.ppf(0.975, alarms + 1, len(second) - alarms) if alarms < len(second) else 1.0
    return max(0.0, math.log((detected - delta) / false)) if detected > delta else 0.0


def best_threshold(first: Tensor, second: Tensor, delta: float) -> float:
    """The threshold that shows most, on trials that are not used again."""
    candidates = (
        torch.cat([first, second]).double().quantile(torch.linspace(0, 1, 200).double()).tolist()
    )
    return max(candidates, key=lambda each: shown_epsilon(first, second, each, delta))


@dataclass(frozen=True)
class Game:
    """Two clients that differ in one record."""

    name: str
    first: Sequence[float]
    second: Sequence[float]
    schedule: LocalSchedule
    defense: DPSGD
    adjacency: Adjacency

    def shown(self, trials: int, seed: int) -> float:
        """ε that the update alone shows."""
        records = (self.first, self.second)
        played = [
            play(self.defense, self.schedule, signed_records(signs), trials, seed + index)
            for index, signs in enumerate(records)
        ]
        half, delta = trials // 2, self.defense.delta or 0.0
        sign = float((played[0][:half].mean() - played[1][:half].mean()).sign())
        first, second = (sign * values for values in played)
        threshold = best_threshold(first[:half], second[:half], delta)
        return shown_epsilon(first[half:], second[half:], threshold, delta)


# Learning rate 1 and weight decay 2 turn the weights' sign in every step, w ← −w − g: gradients of
# alternating signs add up.
_TURNING = LocalSchedule(1.0, 6, 1, weight_decay=2.0)
_ONE, _WHOLE = LocalSchedule(1.0, 1, 3), LocalSchedule(1.0, 4, 1)
_DPSGD = DPSGD(1e-6, 1.0, 1e-5)
_POISSON = replace(_DPSGD, sampling="poisson")

GAMES = [
    Game(
        "first of 7 alternating records removed, 6 batches of 1",
        [1, -1, 1, -1, 1, -1, 1],
        [-1, 1, -1, 1, -1, 1],
        _TURNING,
        replace(_DPSGD, noise_multiplier=2.0),
        "add-or-remove",
    ),
    Game("one batch of 3", [1, 1, -1], [-1, 1, -1], _ONE, _DPSGD, "replace-one"),
    Game("4 batches of 1", [1, 1, 1, 1], [-1, 1, 1, 1], _WHOLE, _DPSGD, "replace-one"),
    Game("4 batches, q = 1/4", [1, 1, 1, 1], [-1, 1, 1, 1], _WHOLE, _POISSON, "replace-one"),
    Game("4 batches, q = 1/4", [1, 0, 0, 0], [0, 0, 0, 0], _WHOLE, _POISSON, "add-or-remove"),
    Game("one batch, q = 1", [1, 0, 0], [0, 0, 0], _ONE, _POISSON, "add-or-remove"),
]


def games(trials: int, seed: int) -> Iterator[list[object]]:
    """The rows of the second table."""
    for game in GAMES:
        defense, count = game.defense, len(game.first)
        stated = defense.epsilon(game.schedule, count, 1, game.adjacency)
        touches = sum(window.start == 0 for window in game.schedule.slices(count))
        before = gaussian_epsilon(touches**0.5 / defense.noise_multiplier, defense.delta or 0.0)
        yield [
            game.name,
            defense.sampling,
            game.adjacency,
            f"{defense.noise_multiplier:g}",
            f"{game.shown(trials, seed):.2f}",
            _written(stated),
            f"{before:.2f}" if defense.sampling == "in_order" else "–",
        ]


def main() -> None:
    """Print both tables."""
    parser = lab.command(__doc__)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--trials", type=int, default=4000, help="of each client of a game")
    arguments = lab.start(parser)
    columns = ["n", "batch", "epochs × rounds", "σ", "δ", "sampling", "replace-one", "PLD"]
    columns += ["add-or-remove", "Opacus RDP", "Opacus PRV", "PLD"]
    print(lab.markdown(columns, accountants(SETTINGS)), "\n")
    names = ["pair", "sampling", "adjacency", "σ", "shown, 95 %", "stated", "of C, without shift"]
    print(lab.markdown(names, games(arguments.trials, arguments.seed)))


if __name__ == "__main__":
    main()
