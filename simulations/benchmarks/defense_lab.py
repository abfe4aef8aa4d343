"""What the defense experiments share: defended training and defended observations.

Clients take one plain SGD step on one mini-batch a round, so that the pseudo-gradient is the
gradient that the papers defend.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from flwr_leakage.data import ImageDataset
from flwr_leakage.defenses import Defense, LocalRound
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.metrics import utility_of
from flwr_leakage.params import Params, add, scale
from flwr_leakage.randomness import Randomness, Reproducible, make_generator
from flwr_leakage.records import (
    Batch,
    Disclosure,
    LocalSchedule,
    Observation,
    ThreatModel,
    Update,
)

STRONG = ThreatModel(labels="known")


def defended_update(
    gradient_map: GradientMap,
    params: Params,
    private: Batch,
    encoded: Batch,
    learning_rate: float,
    defense: Defense,
    randomness: Randomness,
) -> Update:
    """One client's round: one step on all of ``encoded``, then the defense of its update."""
    schedule = LocalSchedule(learning_rate, 1, len(encoded))
    buffers = gradient_map.buffers
    delta = local_update(gradient_map, params, encoded, schedule, buffers)
    raw = Update(delta, {}, schedule, len(encoded))
    local_round = LocalRound(gradient_map, params, buffers, private, encoded)
    return defense.on_update(raw, randomness, local_round)


@dataclass(frozen=True)
class Trained:
    """A defended training run.

    Attributes:
        params: the last ones.
        checkpoints: the parameters before the rounds asked for.
        accuracy: on the test set; NaN without one.
        cpu_seconds: of training, defense included, evaluation excluded.
    """

    params: Params
    checkpoints: dict[int, Params]
    accuracy: float
    cpu_seconds: float


def train(
    gradient_map: GradientMap,
    train_set: ImageDataset,
    test_set: ImageDataset | None,
    defense: Defense,
    *,
    rounds: int,
    clients: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    momentum: float = 0.0,
    checkpoints: Sequence[int] = (),
) -> Trained:
    """FedAvg of one-step clients; every client encodes the samples of its own epoch at once.

    ``momentum`` is the server's (FedAvgM, Hsu et al. 2019): it sees defended updates only.
    """
    params = gradient_map.params
    velocity: Params | None = None
    kept: dict[int, Params] = {}
    start = time.process_time()
    share = len(train_set) // clients
    order = torch.randperm(len(train_set), generator=make_generator(seed, purpose="partition"))
    encoded: list[Batch] = []
    steps_in_epoch = share // batch_size
    for server_round in range(rounds):
        if server_round in checkpoints:
            kept[server_round] = params
        if server_round % steps_in_epoch == 0:
            encoded = []
            for client in range(clients):
                generator = make_generator(
                    seed, server_round=server_round, client_id=client, purpose="epoch"
                )
                own = order[client * share : (client + 1) * share]
                private = train_set.batch(own[torch.randperm(share, generator=generator)])
                draws = Reproducible(generator)
                encoded.append(defense.on_batch(private, train_set.spec.num_classes, draws))
        first = (server_round % steps_in_epoch) * batch_size
        total: Params | None = None
        for client in range(clients):
            batch = encoded[client][first : first + batch_size]
            draws = Reproducible.from_seed(
                seed, server_round=server_round, client_id=client, purpose="defense"
            )
            released = defended_update(
                gradient_map, params, batch, batch, learning_rate, defense, draws
            )
            total = released.delta if total is None else add(total, released.delta)
        assert total is not None
        mean = scale(total, 1 / clients)
        velocity = mean if velocity is None else add(scale(velocity, momentum), mean)
        params = add(params, velocity)
    if rounds in checkpoints:
        kept[rounds] = params
    seconds = time.process_time() - start
    reached = math.nan if test_set is None else accuracy(gradient_map, params, test_set)
    return Trained(params, kept, reached, seconds)


def accuracy(gradient_map: GradientMap, params: Params, test_set: ImageDataset) -> float:
    """Share of the test set that is classified right."""
    batches = (test_set.batch(chunk) for chunk in torch.arange(len(test_set)).split(256))
    return utility_of(partial(gradient_map.logits, params), batches).accuracy


def observe(
    gradient_map: GradientMap,
    params: Params,
    private: Batch,
    encoded: Batch,
    batch_size: int,
    learning_rate: float,
    defense: Defense,
    seed: int,
) -> list[Observation]:
    """The server's view of clients that hold one batch each; labels are disclosed."""
    observations = []
    for client, first in enumerate(range(0, len(encoded), batch_size)):
        window = slice(first, first + batch_size)
        draws = Reproducible.from_seed(seed, client_id=client, purpose="observed defense")
        update = defended_update(
            gradient_map,
            params,
            private[window],
            encoded[window],
            learning_rate,
            defense,
            draws,
        )
        observations.append(
            Observation(
                1,
                client,
                params,
                gradient_map.buffers,
                update,
                Disclosure(targets=encoded[window].targets),
            )
        )
    return observations
