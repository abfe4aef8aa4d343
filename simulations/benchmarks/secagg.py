"""SecAgg+ as the example runs it: how far is the unmasked mean from the clients' true mean?

``python -m simulations.benchmarks.secagg --first 100 --seeds 20``: three clients with a digit each,
one step of SGD on two linear layers, ``exact_batch`` on what the server is shown; weights and
digits are drawn anew for each seed. ``deviation`` is max |unmasked − mean| over the model, and
relative to the mean update's largest entry. With ``--drop`` a fourth client fails after the keys
are shared.
"""

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_PARAMS_RECORD
from flwr.serverapp import Grid, ServerApp
from torch.nn import functional as F

from flwr_leakage.data import embedded_mnist
from flwr_leakage.flower import audit, observe_legacy, run_inline
from flwr_leakage.tracking import read_run
from simulations.benchmarks import lab
from simulations.examples.secagg.task import LEARNING_RATE, network

SHARES, THRESHOLD = 3, 2
FAILURE = "this client was switched off"


def trained(seed: int, partition: int, arrays: NDArrays) -> NDArrays:
    """The example's training, on a digit of this seed."""
    model = network()
    state = zip(model.state_dict(), arrays, strict=True)
    model.load_state_dict({name: torch.tensor(value) for name, value in state})
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    digits, _ = embedded_mnist()
    batch = digits.batch([4 * seed + partition])
    F.cross_entropy(model(batch.inputs), batch.targets).backward()
    optimizer.step()
    return [value.numpy() for value in model.state_dict().values()]


class SeededClient(NumPyClient):
    """A client of a seed; partition 3, where there is one, fails."""

    def __init__(self, seed: int, partition: int) -> None:
        self.seed, self.partition = seed, partition

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train, or fail once the keys are shared."""
        if self.partition == SHARES:
            raise RuntimeError(FAILURE)
        return trained(self.seed, self.partition, parameters), 1, {"partition-id": self.partition}


def run(seed: int, num_clients: int, folder: Path) -> tuple[float, float]:
    """One round; the deviation and its share of the largest entry of the mean update."""

    def client_fn(context: Context) -> Client:
        return SeededClient(seed, int(context.node_config["partition-id"])).to_client()

    client: Callable[..., ClientApp] = ClientApp
    truth = folder / "truth"
    client_app = audit(client(client_fn=client_fn, mods=[secaggplus_mod]), truth=truth)
    torch.manual_seed(seed)
    model = network()
    first = [value.numpy().copy() for value in model.state_dict().values()]
    found: list[NDArrays] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_evaluate=0.0, initial_parameters=ndarrays_to_parameters(first),
            min_fit_clients=num_clients, min_available_clients=num_clients,
        )  # fmt: skip
        secure = SecAggPlusWorkflow(SHARES, THRESHOLD, max_weight=1.0)
        with observe_legacy(
            strategy, model, folder / "run", attack="exact_batch", truth=truth
        ) as observed:
            legacy = LegacyContext(context, ServerConfig(num_rounds=1), observed)
            DefaultWorkflow(fit_workflow=secure)(grid, legacy)
        found.append(legacy.state.array_records[MAIN_PARAMS_RECORD].to_numpy_ndarrays())

    run_inline(app, client_app, num_clients)
    each = [trained(seed, partition, first) for partition in range(SHARES)]
    means = [sum(layer) / SHARES for layer in zip(*each, strict=True)]
    gaps = [abs(mine - mean).max() for mine, mean in zip(found[0], means, strict=True)]
    steps = [abs(mean - old).max() for mean, old in zip(means, first, strict=True)]
    return float(max(gaps)), float(max(gaps) / max(steps))


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--first", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--drop", action="store_true")
    arguments = lab.start(parser)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    lab.print_header("seed", "deviation", "of the largest step", "PSNR, dB", "what the audit says")
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            gap, share = run(seed, SHARES + arguments.drop, Path(folder))
            data = read_run(Path(folder) / "run")
        psnr = sorted(r.value for r in data.records if r.name == "psnr" and r.value is not None)
        said = "; ".join(event.message for event in data.events)
        shown = ", ".join(f"{value:.1f}" for value in psnr)
        lab.print_row(seed, f"{gap:.1e}", f"{share:.1e}", shown or "–", said or "–")


if __name__ == "__main__":
    main()
