"""Count the work of a run, such as steps, scores and attacks, from its experiment."""

import math
from dataclasses import dataclass

from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.audit.turns import least
from flwr_leakage.flower.dp_check import asked_clients
from flwr_leakage.scores.score_round import SETUP_PRICE
from flwr_leakage.simulation.experiment import Experiment

LINE = 260
"""The typical number of bytes of a line in ``records.jsonl``, as seen in runs."""

REPORT = 200_000
"""The typical number of bytes of a report without its images and records, as seen in runs."""


@dataclass(frozen=True)
class Work:
    """The work of a run, on average over the random draws of clients.

    Attributes:
        clients: the number of clients in the federation.
        rounds: the number of rounds of training.
        trainings: the number of local trainings, over all clients and rounds.
        steps: the number of steps of all trainings.
        replays: the number of trainings that are repeated to check the update.
        replay_steps: the number of steps of all replays.
        batch_size: the number of samples in a step of the largest client.
        ranked: the number of samples that are ranked to choose which ones are scored, over all
            rounds.
        scored: the number of samples that are scored, over all rounds.
        score_share: the cost of the scores as a share of the training's, if the plan limits it by
            measured seconds; ``None`` otherwise.
        updates: the number of sent updates that are attacked.
        targets: the number of attacked updates, including those under each defense of ``what_if``.
        self_attacks: the largest number of attacks of clients on their own updates.
        target_seconds: the CPU seconds that an attack on a sent update may take; ``None`` for no
            limit.
        attack_seconds: the CPU seconds that all attacks together may take, including clients'
            attacks on their own updates; ``None`` for no limit.
        tested: the number of test samples on which the global model is evaluated, over all rounds.
        disk: the bytes of the run folder.
    """

    clients: int
    rounds: int
    trainings: int
    steps: int
    replays: int
    replay_steps: int
    batch_size: int
    ranked: int
    scored: int
    score_share: float | None
    updates: int
    targets: int
    self_attacks: int
    target_seconds: float | None
    attack_seconds: float | None
    tested: int
    disk: float


def count_work(experiment: Experiment, products: int) -> Work:
    """Return the work of a run, such as its numbers of steps, scored samples and attacks.

    ``products`` is the number of products with the Jacobian that the scores of one sample take. The
    number of samples that may be scored depends on it.
    """
    settings, sizes = experiment.settings, experiment.sizes
    rounds = settings.num_rounds
    share = _share_that_trains(experiment)
    schedules = [experiment.schedule.for_client(size) for size in sizes]
    steps = sum(schedule.num_steps for schedule in schedules) * rounds * share
    replays = [share * count for count in _replays(experiment)]
    again = sum(n * each.num_steps for n, each in zip(replays, schedules, strict=True))
    ranked, scored, score_share = _scores(experiment, products, share)
    updates, images = _attacked(experiment)
    asked = len(experiment.what_ifs)
    times = 1 + asked
    limit = _limit(experiment)
    what_if_limit = least(limit, settings.server.what_if_max_seconds)
    self_attacks, self_limit = _self_attacks(experiment, share)
    limits = [(updates, limit), (updates * asked, what_if_limit), (self_attacks, self_limit)]
    attacks = 0.0
    for count, each in limits:
        if count:
            attacks += math.inf if each is None else count * each
    tests = settings.server.test_samples or len(experiment.data.test)
    lines = ranked + scored * 3 * len(experiment.scores) + 6 * settings.num_clients * rounds
    lines += images * times * 8
    parameters = sum(p.numel() for p in experiment.network.state_dict().values())
    every = settings.server.weights_every
    saved = 1 if every is None else math.ceil(rounds / every)
    kept = updates * parameters * 8 if settings.server.attack_later else 0
    pixels = images * (1 + times) * math.prod(experiment.spec.shape)
    return Work(
        clients=settings.num_clients,
        rounds=rounds,
        trainings=round(settings.num_clients * rounds * share),
        steps=round(steps),
        replays=round(sum(replays)),
        replay_steps=round(again),
        batch_size=schedules[sizes.index(max(sizes))].batch_size,
        ranked=ranked,
        scored=scored,
        score_share=score_share,
        updates=updates,
        targets=updates * times,
        self_attacks=self_attacks,
        target_seconds=limit,
        attack_seconds=attacks if attacks < math.inf else None,
        tested=min(tests, len(experiment.data.test)) * (rounds + 1),
        disk=lines * LINE + saved * parameters * 4 + min(kept, settings.server.kept_bytes)
        + pixels * (1 + 4 / 3) + REPORT,
    )  # fmt: skip


def _share_that_trains(experiment: Experiment) -> float:
    """Return the share of clients, in (0, 1], that the strategy asks to train in a round."""
    clients = experiment.settings.num_clients
    return asked_clients(experiment.strategy(), clients) / clients


def _replays(experiment: Experiment) -> list[int]:
    """Return, for each client, the number of rounds whose training it replays.

    Each client is assumed to train in all rounds. It replays the rounds in which its update may be
    attacked. It also replays the first round in which it scores or attacks its update, unless it
    replayed an earlier one. A client replays none if it does not store all samples of a round.
    """
    plan, own = experiment.score_plan, experiment.self_attack
    rounds = range(1, experiment.settings.num_rounds + 1)
    measured = [
        each
        for each in rounds
        if (experiment.scores and plan.includes(each))
        or (own is not None and own.includes(each))
        or experiment.gate is not None
    ]
    counts = []
    for client, size in enumerate(experiment.sizes):
        schedule = experiment.schedule.for_client(size)
        mini_batches = math.ceil(experiment.settings.client.max_samples / schedule.batch_size)
        # A training of which not all samples are stored cannot be replayed.
        if schedule.num_samples_used(size) > mini_batches * schedule.batch_size:
            counts.append(0)
            continue
        attacked = [each for each in rounds if experiment.may_be_attacked(client, each)]
        once = bool(measured) and (not attacked or attacked[0] > measured[0])
        counts.append(len(attacked) + once)
    return counts


def _scores(experiment: Experiment, products: int, share: float) -> tuple[int, int, float | None]:
    """Return the numbers of samples that are ranked and that are scored, and the scores' cost.

    Samples are ranked to choose which ones are scored. Both numbers are over all rounds. The cost
    is a share of the training's if the plan limits it by measured seconds; otherwise it is
    ``None``. ``products`` is the number of products with the Jacobian that the scores of one sample
    take, and ``share`` the share of clients that train in a round.
    """
    plan, settings = experiment.score_plan, experiment.settings
    if not experiment.scores:
        return 0, 0, None
    rounds = sum(plan.includes(each) for each in range(1, settings.num_rounds + 1)) * share
    kept = [min(size, settings.client.max_samples) for size in experiment.sizes]
    chosen = [min(size, plan.max_samples or size) for size in kept]
    ranks = plan.which in ("most_at_risk", "largest_gradient")
    ranked = round(sum(kept) * rounds) if ranks else 0
    if plan.relative_cost is None:
        return ranked, round(sum(chosen) * rounds), None
    least = sum(min(plan.min_samples, size) for size in chosen) * rounds
    if plan.product_price is None:
        return ranked, round(max(least, len(kept))), plan.relative_cost
    price = plan.product_price * (products + SETUP_PRICE)
    paid = 0.0
    for size, most in zip(experiment.sizes, chosen, strict=True):
        schedule = experiment.schedule.for_client(size)
        gradients = sum(step.stop - step.start for step in schedule.slices(size))
        earned = plan.relative_cost * gradients * settings.num_rounds * share
        mine = min(plan.min_samples, most) * rounds + (earned - 2.0 * size * rounds) / price
        paid += min(max(mine, min(plan.min_samples, most) * rounds), most * rounds)
    return ranked, round(paid), None


def _attacked(experiment: Experiment) -> tuple[int, int]:
    """Return the number of attacked updates over all rounds, and the number of their samples."""
    if experiment.attack is None:
        return 0, 0
    selection, settings = experiment.selection, experiment.settings
    share = _share_that_trains(experiment)
    updates = images = 0.0
    for server_round in range(1, settings.num_rounds + 1):
        sizes = [
            size
            for client, size in enumerate(experiment.sizes)
            if selection.includes(server_round, client) and size <= (selection.max_examples or size)
        ]
        sizes = sizes[: selection.max_clients]
        updates += share * len(sizes) if experiment.threat.view == "single" else bool(sizes)
        images += share * sum(sizes)
    return round(updates), round(images)


def _limit(experiment: Experiment) -> float | None:
    """Return the CPU seconds that the server's attack on one update may take; ``None`` for no
    limit.

    The result is the smaller one of the server's limit and the attack's own.
    """
    attack = experiment.attack
    inner = attack.attack if isinstance(attack, Parallel) else attack
    own = getattr(inner, "max_seconds", None)
    return least(experiment.settings.server.attack_max_seconds, own)


def _self_attacks(experiment: Experiment, share: float) -> tuple[int, float | None]:
    """Return the largest number of clients' attacks on their own updates, and the CPU seconds of
    each.

    The number is over all rounds and clients. The seconds are ``None`` if an attack has no limit.
    ``share`` is the share of clients that train in a round.
    """
    own = experiment.self_attack
    if own is None:
        return 0, None
    rounds = sum(own.includes(each) for each in range(1, experiment.settings.num_rounds + 1))
    sizes = [s for s in experiment.sizes if s <= (own.max_samples or s)]
    tries = 1 + (len(experiment.gate.stronger) if experiment.gate else 0)
    limit = least(own.max_seconds, getattr(own.attack, "max_seconds", None))
    return round(len(sizes) * rounds * tries * share), limit
