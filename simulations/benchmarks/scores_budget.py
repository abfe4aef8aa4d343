"""What the default plan's scores cost beside a client's training, and whom they reach.

    python -m simulations.benchmarks.scores --section budget --cifar cifar10_test.npz

One client in a federation of its own: each round trains one epoch in batches of 32 on the same
samples, through ``LeakageMod``, and the next round starts from what it returned. CPU seconds are
those that the mod measures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from scipy.stats import spearmanr
from torch import nn

from flwr_leakage.audit.note import ClientNote
from flwr_leakage.flower import ClientAudit, InlineGrid, LeakageMod, encode
from flwr_leakage.flower.wire import RECORD_KEY, unpack_note
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.models import LeNet, ResNet8, initialize
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, Exposure, LocalSchedule, Update
from flwr_leakage.scores import InputGradientNorm, default_scores
from flwr_leakage.scores.compute import compute_scores
from flwr_leakage.scores.plan import ScorePlan
from simulations.benchmarks import lab
from simulations.benchmarks.scores_setup import load_cifar

NETWORKS = ("LeNet", "ReLU ConvNet", "ResNet-8")
COUNTS = (32, 200, 1000)
PLANS = {"measured": ScorePlan(send=True), "counted": ScorePlan(product_price=20.0, send=True)}
SEED, FIRST, ROUNDS, BATCH_SIZE = 100, 100, 40, 32
DEAR = {"λmax": "lambda_max", "Krylov": "unit_noise_influence_bound_rmse"}
"""What is compared: a large λmax, a small bound of the I²F."""


def make_network(name: str, seed: int) -> nn.Module:
    """As it stands before the first round."""
    torch.manual_seed(seed)
    if name == "LeNet":
        network = LeNet(lab.SHAPE, lab.CLASSES, num_convolutions=3)
        return initialize(network, "uniform", lab.generator(seed))
    return lab.small_convnet() if name == "ReLU ConvNet" else ResNet8(lab.SHAPE, lab.CLASSES)


@dataclass
class Client:
    """One client's rounds.

    Attributes:
        network: a name of ``NETWORKS``; BatchNorm layers train by batch statistics.
        data: its samples.
        seed: of the network's weights.
        notes: what it told of each round.
        states: the parameters and buffers that each round started from.
    """

    network: str
    data: Batch
    seed: int = SEED
    notes: list[ClientNote] = field(default_factory=list)
    states: list[Params] = field(default_factory=list)

    def gradient_map(self) -> GradientMap:
        """Of the network before the first round."""
        return GradientMap(make_network(self.network, self.seed), batch_norm="batch")

    @property
    def schedule(self) -> LocalSchedule:
        """One epoch."""
        return LocalSchedule(0.01, -(-len(self.data) // BATCH_SIZE), BATCH_SIZE)

    def run(self, plan: ScorePlan, rounds: int) -> None:
        """Train and score."""
        spec = lab.CIFAR10
        audit = ClientAudit(
            self.gradient_map(), spec, self.schedule, scores=default_scores(), score_plan=plan,
            share="times",
        )  # fmt: skip
        model = make_network(self.network, self.seed).train()
        app = ClientApp()

        @app.train(mods=[LeakageMod(audit)])
        def train(message: Message, context: object) -> Message:
            model.load_state_dict(message.content["arrays"].to_torch_state_dict())
            optimizer = torch.optim.SGD(model.parameters(), self.schedule.learning_rate)
            windows = self.schedule.slices(len(self.data))
            batches = (encode(self.data.inputs[w], self.data.targets[w]) for w in windows)
            lab.train(model, optimizer, (Batch(*encoded) for encoded in batches))
            content = {
                "arrays": ArrayRecord(model.state_dict()),
                "metrics": MetricRecord({"num-examples": len(self.data)}),
            }
            return Message(RecordDict(content), reply_to=message)

        grid = InlineGrid(app, 1)
        (node,) = grid.get_node_ids()
        arrays = ArrayRecord(model.state_dict())
        for server_round in range(1, rounds + 1):
            self.states.append(arrays.to_torch_state_dict())
            config = ConfigRecord({"server-round": server_round})
            content = RecordDict({"arrays": arrays, "config": config})
            (reply,) = grid.send_and_receive([Message(content, node, MessageType.TRAIN)])
            assert not reply.has_error(), reply.error
            arrays = next(iter(reply.content.array_records.values()))
            self.notes.append(unpack_note(reply.content[RECORD_KEY]))

    def exposure(self, server_round: int) -> Exposure:
        """Of an undefended round, without its update, which its scores do not need."""
        gradient_map, state = self.gradient_map(), self.states[server_round]
        params = {name: state[name] for name in gradient_map.params}
        buffers = {name: state[name] for name in gradient_map.buffers}
        zero = {name: torch.zeros_like(value) for name, value in params.items()}
        update = Update(zero, buffers, self.schedule, len(self.data))
        return Exposure(params, buffers, self.data, self.data, update, update)


def scored(note: ClientNote) -> list[int]:
    """The samples whose dear scores a round has."""
    values = next((m.values for m in note.measurements if m.name == DEAR["Krylov"]), ())
    return [place for place, value in enumerate(values) if value is not None]


def reach(client: Client, rounds: Sequence[int]) -> list[str]:
    """Full scoring of the last round in which the plan scored: its cost, and whom the plan missed.

    Returns:
        What scoring all samples costs, in trainings; and for each of ``DEAR`` the share of the
        tenth most at risk among as many that the ranking puts first, and the rank correlation.
    """
    exposure = client.exposure(rounds[-1])
    gradient_map = client.gradient_map()
    with lab.Stopwatch() as clock:
        found = compute_scores(default_scores(), gradient_map, exposure)
    full = clock.seconds / (client.notes[rounds[-1]].train_cpu_seconds or float("nan"))
    cheap = compute_scores([InputGradientNorm()], gradient_map, exposure)["InputGradientNorm"]
    ranking = torch.tensor(cheap.values)
    top = max(1, len(client.data) // 10)
    first = set(ranking.argsort(descending=True)[:top].tolist())
    taken = scored(client.notes[rounds[-1]])
    cells = [f"{full:.0f}×"]
    for sign, (name, key) in zip((1, -1), DEAR.items(), strict=True):
        measured = {m.name: m for result in found.values() for m in result}[key]
        known = [i for i, value in enumerate(measured.values) if value is not None]
        risk = torch.tensor([sign * float(measured.values[i] or 0) for i in known])
        worst = {known[i] for i in risk.argsort(descending=True)[:top].tolist()}
        order = spearmanr(risk, ranking[known])[0]
        cells.append(
            f"{name}: {len(worst & set(taken))} of {top}, ranking {len(worst & first)} of {top}, "
            f"ρ = {order:.2f}"
        )
    return cells


def section_budget(cifar: str | None, only: str | None) -> None:
    """Every network and number of samples; ``only``: as ``LeNet 200 measured``."""
    data = lab.normalize(load_cifar(cifar), lab.CIFAR10)
    lab.print_header(
        *("network", "samples", "plan", "training, CPU s", "scores, CPU s", "ratio"),
        *("scored", "in rounds", "dearest round, CPU s", "all samples", "worst 10 % reached", ""),
    )
    for name in NETWORKS:
        for count in COUNTS:
            for kind, plan in PLANS.items():
                if only and not f"{name} {count} {kind}".startswith(only):
                    continue
                client = Client(name, data[FIRST : FIRST + count])
                client.run(plan, ROUNDS)
                rounds = [i for i, note in enumerate(client.notes) if scored(note)]
                trained = sum(note.train_cpu_seconds or 0.0 for note in client.notes)
                spent = [note.score_cpu_seconds or 0.0 for note in client.notes]
                dear = count <= 200 and kind == "measured"
                lab.print_row(
                    *(name, count, kind, f"{trained:.2f}", f"{sum(spent):.2f}"),
                    f"{sum(spent) / trained:.2f}",
                    sum(len(scored(note)) for note in client.notes),
                    f"{len(rounds)} of {ROUNDS}",
                    f"{max(spent):.2f}",
                    *(reach(client, rounds) if dear else ["–"] * 3),
                )
