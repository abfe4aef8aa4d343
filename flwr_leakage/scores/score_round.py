"""Score the samples of a round, those most at risk first, within a budget that grows with the
client's training.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import Meter
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.randomness import derive_seed
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.base import Score, merge
from flwr_leakage.scores.compute import ScoreResult, score_client, warned
from flwr_leakage.scores.plan import ScorePlan, rank_samples

RANKING_PRICES = {"first": 0.0, "random": 0.0, "most_at_risk": 2.0, "largest_gradient": 10.0}
"""The cost of ranking one sample by each rule of ``rank_samples``, in training gradients of one
sample. The values are upper limits of measured costs, and count only if a plan has a
``product_price``."""

SETUP_PRICE = 3.0
"""The cost of setting up the Jacobian of one sample, in Jacobian products. It counts only if a plan
has a ``product_price``."""

PATIENCE = 2.0
"""The multiple of the cost of ranking and of scoring one sample that the account must cover before
a round is scored. Waiting avoids overspending, as costs vary, and saves cost, as samples scored
together are cheaper. With a larger value, fewer rounds are scored, each with more samples."""

MARGIN = 1.3
"""The multiple of a group's foreseen cost that the account must cover for the group to be scored.
The foreseen cost is that of the group before, and costs vary. With a smaller value, more samples
are scored, and the budget is exceeded more often."""

NOT_CHOSEN = "not scored: the plan's max_samples are others"

Part = tuple[list[int], dict[str, ScoreResult]]
"""The indices of some samples, ascending, and the results of their scores by the scores' names."""


@dataclass(frozen=True)
class Account:
    """The budget that a client's training has earned and its scores have not spent yet.

    The unit is CPU seconds or, if the plan has a ``product_price``, training gradients of one
    sample.

    Attributes:
        balance: the budget that is left. It is negative after a cost was spent in advance, until
            further training has earned it back.
        ranking: the latest cost of ranking the samples.
        sample: the latest cost of scoring one sample; 0 before the first time.
    """

    balance: float = 0.0
    ranking: float = 0.0
    sample: float = 0.0


def score_round(
    scores: Mapping[str, Score],
    gradient_map: GradientMap,
    exposure: Exposure,
    plan: ScorePlan,
    account: Account,
    *,
    server_round: int,
    train_seconds: float,
    seed: int,
    warnings: Sequence[str] = (),
) -> tuple[list[Measurement], Account]:
    """Return scores of as many samples of a round as the budget earned by training allows.

    Every round adds ``plan.relative_cost`` times the cost of its training to the client's account.
    A scored round ranks all samples, then scores them in that order, in groups, as long as the
    account covers the next group at the cost of the group before plus a ``MARGIN``. If the account
    does not cover ``PATIENCE`` times the cost of ranking and of one sample, no sample is scored,
    and the budget is kept for a later round. The first scored round, without known costs, scores
    one sample in advance. So over any number of rounds

        cost(scores) ≤ relative_cost · cost(training) + cost(ranking and one sample),

    and without the last term as soon as later rounds have earned it back. An exception are the
    ``plan.min_samples`` samples, which a scored round scores at any cost.

    The results are the measurements of all samples, and the account for the next round. A sample
    that was not scored has no number, and the reason in its note.

    Args:
        scores: the scores by name.
        gradient_map: the gradient map of the client's model and loss.
        exposure: the private data of the client's round.
        plan: the limits on samples and cost.
        account: the account as the client's last round left it.
        server_round: the number of the round, from 1.
        train_seconds: the CPU seconds of the round's training.
        seed: the seed of all random draws.
        warnings: reasons why the function that is scored may differ from the one that the client
            trains; they are added to all notes.
    """
    purse = _Purse(plan, account)
    purse.earn(exposure, train_seconds)
    if not scores or not plan.includes(server_round):
        return [], purse.account()
    missing = purse.missing
    if missing > 0 and not plan.min_samples:
        name = "input_gradient_norm" if plan.which == "most_at_risk" else next(iter(scores))
        count = len(exposure.private)
        note = f"not scored: the training of rounds to come must pay {purse.say(missing)} first"
        return [Measurement(name, (None,) * count, "", "", (note,) * count)], purse.account()
    starts = derive_seed(seed, purpose="shared by all scores")
    client = ClientSamples(gradient_map, exposure, starts, Meter(plan.budget))
    purse.start()
    order, ranking = rank_samples(client, plan.which, seed)
    purse.pay_ranking(len(client))
    available, chosen = purse.balance, order[: plan.max_samples]
    parts: list[Part] = []
    done = 0
    while done < len(chosen):
        affordable = purse.affordable(len(chosen) - done)
        size = affordable if done else max(1, plan.min_samples, affordable)
        if size < 1:
            break
        group = sorted(chosen[done : done + size])
        products = client.meter.products
        parts.append((group, score_client(scores, client.select(group), seed)))
        purse.pay_scores(client.meter.products - products, len(group))
        done += len(group)
    if done == len(chosen):
        # All chosen samples were scored. The rest of the budget is dropped, so that a later round
        # does not get the budget of several.
        purse.balance = min(purse.balance, 0.0)
    left_out = dict.fromkeys(order, NOT_CHOSEN)
    spent = f"not scored: the budget of {purse.say(max(available, 0.0))} was spent"
    left_out.update(dict.fromkeys(chosen[done:], f"{spent} on {done} samples before this one"))
    for name in scores:
        results = [(group, found[name]) for group, found in parts]
        shown = next((result for _, result in results if not result.error), results[0][1])
        for model in shown:
            groups = [(group, result[model.name]) for group, result in results]
            ranking.append(merge(groups, left_out, len(order)))
    doubts = (*warnings, *client.doubts)
    told = [warned(m, doubts if m.products else warnings) for m in ranking]
    return told, purse.account()


class _Purse:
    """A client's scoring budget during a round, with the clock or counter of its spending."""

    def __init__(self, plan: ScorePlan, account: Account) -> None:
        self.plan = plan
        self.balance = account.balance
        self.ranking = account.ranking
        self.price = account.sample
        self._began = 0.0

    def account(self) -> Account:
        return Account(self.balance, self.ranking, self.price)

    @property
    def missing(self) -> float:
        """Return how much the budget lacks for a round to be scored, in the unit of
        :class:`Account`. The number is 0 or negative if the budget covers ``PATIENCE`` times the
        latest costs of ranking and of one sample.
        """
        if self.plan.relative_cost is None:
            return 0.0
        return PATIENCE * (self.ranking + self.price) - self.balance

    def earn(self, exposure: Exposure, train_seconds: float) -> None:
        """Add the plan's ``relative_cost`` times the cost of a round's training to the budget."""
        if self.plan.product_price is not None:
            schedule, count = exposure.raw.schedule, exposure.raw.num_examples
            cost = float(sum(step.stop - step.start for step in schedule.slices(count)))
        else:
            cost = train_seconds
        self.balance += cost * (self.plan.relative_cost or 0.0)

    def start(self) -> None:
        self._began = time.process_time()

    def affordable(self, count: int) -> int:
        """Return how many of ``count`` samples the budget covers, at the latest cost per sample
        times ``MARGIN``.
        """
        if self.plan.relative_cost is None:
            return count
        if not self.price or self.balance <= 0:
            return 0
        return min(count, int(self.balance / (MARGIN * self.price)))

    def pay_ranking(self, count: int) -> None:
        self.ranking = self._pay(RANKING_PRICES[self.plan.which] * count)

    def pay_scores(self, products: int, count: int) -> None:
        counted = (self.plan.product_price or 0.0) * (products + SETUP_PRICE * count)
        self.price = self._pay(counted) / count

    def _pay(self, counted: float) -> float:
        """Subtract the cost since the last call from the scoring budget, and return the cost. It is
        ``counted`` if the plan has a ``product_price``, else the measured CPU seconds.
        """
        now = time.process_time()
        cost = now - self._began if self.plan.product_price is None else counted
        self._began = now
        if self.plan.relative_cost is not None:
            self.balance -= cost
        return cost

    def say(self, amount: float) -> str:
        if self.plan.product_price is None:
            return f"{amount:.2g} CPU seconds"
        return f"{amount:.0f} training gradients"
