"""Whose record was it? Attribution from the sums that Flower's SecAgg+ shows a server.

    python -m simulations.benchmarks.membership_sums --root FOLDER --seeds 10

prints Markdown tables. Twenty clients of 8 or 32 records train Flower's quickstart network, ten of
them in each round. Flower's ``secaggplus_mod`` and ``SecAggPlusWorkflow`` run over twenty nodes,
with masks, shares and quantisation; the server has the mean of ten models and the list of who was
asked. ``max_weight`` is a setting of the workflow: a client of n samples multiplies its model by
n / max_weight before it is rounded, so that a larger one rounds more coarsely.

Below the table the first federation's rounds are summed again with simulated rounding, and the
log-residuals of all records held against the real ones: by how much they differ, and by how much
those of two simulations do.
"""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from scipy import stats
from torch import Tensor

from flwr_leakage.attacks.problem import pose
from flwr_leakage.flower import run_inline
from flwr_leakage.flower.inline_grid import FIRST_NODE_ID
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.members import attribute
from flwr_leakage.members.layers import agreements, find_spans, leftovers
from flwr_leakage.members.verdict import FIT_DAMPING
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, LocalSchedule, Observation, ThreatModel, Update
from simulations.benchmarks import lab
from simulations.benchmarks.membership_setup import Case, Images, Sources, joined, make

CLIENTS, ASKED = 20, 10
"""Clients of the federation, and how many of them a round asks."""

STRANGERS = 1000
"""Records that no client holds: one half is tested, and the other half is the null."""

STATISTICS = ("residual", "outer product")

CLIP, LEVELS = 8.0, 2**22
"""Flower's defaults of SecAgg+: numbers in [−8, 8] become one of so many integers."""


@dataclass(frozen=True)
class Federation:
    """A federation of one seed.

    Attributes:
        images: where records come from.
        each: records of a client.
        seed: of the weights, the records and who is asked.
        max_weight: of SecAgg+, at least ``each``, which rounds most finely.
    """

    images: Images
    each: int
    seed: int
    max_weight: float

    @property
    def schedule(self) -> LocalSchedule:
        """Steps of 8 samples at a rate of 0.1."""
        return LocalSchedule(0.1, max(1, self.each // 8), 8)

    @property
    def owner(self) -> Tensor:
        """The client of each record that is held, client by client."""
        return torch.arange(CLIENTS).repeat_interleave(self.each)

    @property
    def ratio(self) -> float:
        """What a client multiplies its model by before it is rounded."""
        return self.each / self.max_weight

    @property
    def noise_std(self) -> float:
        """σ of the rounding on the pseudo-gradient; for one client its variance is step² / 6."""
        step = 2 * CLIP / LEVELS / self.ratio
        return step * (1 / 6 / ASKED) ** 0.5 / self.schedule.learning_rate

    @property
    def records(self) -> tuple[Batch, Batch]:
        """Those that the clients hold, and strangers."""
        draws, held = lab.generator(self.seed), self.each * CLIENTS
        order = torch.randperm(len(self.images.records), generator=draws)
        chosen = self.images.records[order[: held + STRANGERS]]
        return chosen[:held], chosen[held:]

    def gradient_map(self, params: Params | None = None) -> GradientMap:
        """The network of the seed, with these parameters in place of its own."""
        network, _ = make(Case(), self.images, self.seed)
        if params is not None:
            network.load_state_dict(params)
        return GradientMap(network)

    def trained(self, params: Params, client: int) -> Params:
        """What a client makes of parameters."""
        held, _ = self.records
        seen = lab.observe(self.gradient_map(params), held[self.owner == client], self.schedule)
        return {name: value + seen.update.delta[name] for name, value in params.items()}

    def statistics(self, params: Params, mean: Params) -> Tensor:
        """Two statistics (2, R) of held records and strangers in the first linear layer.

        They are log r, and minus the fit of the outer product, which takes the labels.
        """
        held, strangers = self.records
        delta = {name: mean[name] - value for name, value in params.items()}
        update = Update(delta, {}, self.schedule, self.each * ASKED)
        members = (self.each,) * ASKED
        seen = Observation(1, -1, params, {}, update, members=members)
        gradient_map = self.gradient_map(params)
        problem = pose(gradient_map, self.images.spec, seen, ThreatModel(view="aggregate"))
        spans = [s for s in find_spans(problem, self.noise_std)[0] if s.name == "fc1.weight"]
        records = joined(held, strangers)
        logs = leftovers(problem, [spans], records.inputs, torch.zeros(1))[0][0, :, 0, 0]
        fits = agreements(problem, [spans], records, torch.tensor([FIT_DAMPING]))[0, :, 0, 0]
        return torch.stack([logs, -fits])

    def rounded_mean(self, models: list[Params], draws: torch.Generator) -> Params:
        """The mean of models, each rounded as Flower's ``quantize`` does, in single precision."""
        scale, total = LEVELS / (2 * CLIP), {}
        for name in models[0]:
            integers = torch.zeros_like(models[0][name], dtype=torch.float64)
            for model in models:
                exact = ((model[name] * self.ratio).clamp(-CLIP, CLIP) + CLIP) * scale
                up = exact.ceil()
                drawn = torch.rand(exact.shape, generator=draws)
                integers += up - (drawn < up - exact).float()
            value = integers / scale - len(models) * CLIP
            total[name] = (value / (len(models) * self.ratio)).float()
        return total


@dataclass(frozen=True)
class Round:
    """What the server has of a round: the parameters sent, the mean model, and who was asked."""

    params: Params
    mean: Params
    asked: tuple[int, ...]


def secured(made: Federation, rounds: int) -> list[Round]:
    """Rounds of Flower's own SecAgg+ workflow: what its strategy is shown, and whom it asked."""
    start = made.gradient_map().params
    names, first = list(start), [value.detach().numpy() for value in start.values()]

    def as_params(arrays: list[Any]) -> Params:
        return {n: torch.tensor(a, dtype=torch.float32) for n, a in zip(names, arrays, strict=True)}

    class Member(NumPyClient):
        def __init__(self, partition: int) -> None:
            self.partition = partition

        def fit(self, parameters: Any, config: Any) -> Any:
            model = made.trained(as_params(parameters), self.partition)
            return [value.numpy() for value in model.values()], made.each, {}

    def client_fn(context: Context) -> Client:
        return Member(int(context.node_config["partition-id"])).to_client()

    found: list[Round] = []

    class Watching(FedAvg):
        def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
            chosen = super().configure_fit(server_round, parameters, client_manager)
            self.asked = tuple(int(proxy.cid) - FIRST_NODE_ID for proxy, _ in chosen)
            self.sent = as_params(parameters_to_ndarrays(parameters))
            return chosen

        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            if failures or len(results) != ASKED:
                raise RuntimeError(f"expected {ASKED} answers, got {len(results)}: {failures}")
            mean = as_params(parameters_to_ndarrays(results[0][1].parameters))
            found.append(Round(self.sent, mean, self.asked))
            return super().aggregate_fit(server_round, results, failures)

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Watching(
            fraction_fit=ASKED / CLIENTS, fraction_evaluate=0.0, min_fit_clients=ASKED,
            min_available_clients=CLIENTS, initial_parameters=ndarrays_to_parameters(first),
        )  # fmt: skip
        secure = SecAggPlusWorkflow(ASKED, ASKED - 3, max_weight=made.max_weight)
        legacy = LegacyContext(context, ServerConfig(num_rounds=rounds), strategy)
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)

    random.seed(made.seed)  # Flower's client manager draws whom it asks from the global generator
    client: Callable[..., ClientApp] = ClientApp
    run_inline(server, client(client_fn=client_fn, mods=[secaggplus_mod]), CLIENTS)
    return found


@dataclass
class Tally:
    """What attribution said, over the federations of a row."""

    right: int = 0
    clear: int = 0
    clear_right: int = 0
    sure: int = 0
    below_all: int = 0
    records: int = 0
    of_nobody: list[Tensor] = field(default_factory=list)

    def add(self, made: Federation, values: Tensor, took_part: Tensor) -> None:
        """Count one federation: a statistic (T, R) and who took part (T, K)."""
        count = len(made.owner)
        middle = count + STRANGERS // 2
        named = attribute(values[:, :count], values[:, count:], took_part)
        nobody = attribute(values[:, count:middle], values[:, middle:], took_part)
        is_right, is_clear = named.clients == made.owner, named.margins >= 3
        self.right += int(is_right.sum())
        self.clear += int(is_clear.sum())
        self.clear_right += int((is_right & is_clear).sum())
        self.sure += int((named.p_values <= 0.01).sum())
        self.below_all += int((named.p_values * (1 + STRANGERS) < 1.5).sum())
        self.records += count
        self.of_nobody.append(nobody.p_values)

    def cells(self) -> list[str]:
        """Of the table."""
        nobody = torch.cat(self.of_nobody)
        false = int((nobody <= 0.01).sum())
        return [
            f"{self.right} of {self.records}", f"{self.clear_right} of {self.clear}",
            f"{self.below_all} of {self.records}", f"{self.sure} of {self.records}",
            f"{false} of {len(nobody)}", uniform(nobody),
        ]  # fmt: skip


def uniform(p_values: Tensor) -> str:
    """Quantiles of p-values at 1, 5, 25, 50, 75 and 95 %, which are these shares if uniform."""
    shares = torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    return " ".join(f"{value:.3f}" for value in p_values.double().quantile(shares).tolist())


def print_sums(
    images: Images, each: int, first: int, seeds: int, rounds: int, max_weight: float
) -> None:
    """Rows of attribution after 12 rounds, and after all of them."""
    began, after = time.process_time(), sorted({min(12, rounds), rounds})
    tallies = {(name, number): Tally() for name in STATISTICS for number in after}
    gaps: list[Tensor] = []
    apart = 0.0
    for seed in range(first, first + seeds):
        made = Federation(images, each, seed, max_weight)
        done = secured(made, rounds)
        found = torch.stack([made.statistics(one.params, one.mean) for one in done], 1)
        took_part = torch.stack(
            [torch.isin(torch.arange(CLIENTS), torch.tensor(one.asked)) for one in done]
        )
        for (name, number), tally in tallies.items():
            values = found[STATISTICS.index(name)]
            tally.add(made, values[:number], took_part[:number])
        if seed == first:
            start, draws = time.process_time(), lab.generator(1000)
            gaps = [compare(made, one, log, draws) for one, log in zip(done, found[0], strict=True)]
            apart = time.process_time() - start
    seconds = (time.process_time() - began - apart) / seeds / rounds
    for (name, number), tally in tallies.items():
        lab.print_row(
            name,
            each,
            f"{max_weight:g}",
            number,
            seeds,
            *tally.cells(),
            f"{seconds * number:.0f}",
        )
    mean = torch.stack(gaps).mean(0).tolist()
    lowest = float(torch.stack(gaps)[:, 3::4].min())
    for name, numbers in (("of clients asked", mean[:4]), ("others", mean[4:])):
        print(
            f"  log-residuals of records {name}: real − simulated {numbers[0]:+.4f} on average, "
            f"{numbers[1]:.4f} root mean square; two simulations {numbers[2]:.4f}",
            flush=True,
        )
    print(f"  smallest Kolmogorov-Smirnov p of {2 * rounds}, real against simulated: {lowest:.2f}")


def compare(made: Federation, done: Round, real: Tensor, draws: torch.Generator) -> Tensor:
    """How far the protocol's log-residuals are from those of simulated rounding of the same models.

    Of records of clients that were asked, and of all others: the mean difference, its root mean
    square, that of two simulations, and the p-value of a two-sample Kolmogorov-Smirnov test.
    """
    models = [made.trained(done.params, client) for client in done.asked]
    first, second = (
        made.statistics(done.params, made.rounded_mean(models, draws))[0] for _ in range(2)
    )
    inside = torch.isin(made.owner, torch.tensor(done.asked))
    inside = torch.cat([inside, torch.zeros(STRANGERS, dtype=torch.bool)])
    numbers = []
    for chosen in (inside, ~inside):
        gap, other = (real - first)[chosen], (second - first)[chosen]
        same = stats.ks_2samp(real[chosen].numpy(), first[chosen].numpy()).pvalue
        numbers += [gap.mean(), gap.square().mean().sqrt(), other.square().mean().sqrt(), same]
    return torch.tensor(numbers)


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the npz files")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="seed, of those that follow")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--each", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--max-weight", type=float, help="of SecAgg+; a client's records if absent")
    arguments = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    images = Sources(arguments.root)("quickstart")
    lab.print_header(
        "statistic", "records a client", "max_weight", "rounds", "federations", "right client",
        "right where the margin ≥ 3", "below all 1,000 strangers", "records at p ≤ 0.01",
        "strangers at p ≤ 0.01", "strangers' p at 1, 5, 25, 50, 75, 95 %", "CPU s",
    )  # fmt: skip
    for each in arguments.each:
        weight = arguments.max_weight or each
        print_sums(images, each, arguments.first, arguments.seeds, arguments.rounds, weight)


if __name__ == "__main__":
    main()
