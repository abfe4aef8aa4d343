"""The server's side: Flower's SecAgg+ workflow, and an observer of what it unmasks."""

import torch
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp

from flwr_leakage.flower import observe_legacy
from simulations.examples.secagg.client_app import TRUTH
from simulations.examples.secagg.task import network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for a round."""
    torch.manual_seed(0)
    model = network()
    first = ndarrays_to_parameters([value.numpy() for value in model.state_dict().values()])
    strategy = FedAvg(fraction_evaluate=0.0, initial_parameters=first, min_available_clients=3)
    # Weights are told as a share of max_weight, and quantized: a client here has one sample.
    secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=1.0)
    strategy = observe_legacy(strategy, model, "leakage-secagg", attack="exact_batch", truth=TRUTH)
    legacy = LegacyContext(context, ServerConfig(num_rounds=1), strategy)
    DefaultWorkflow(fit_workflow=secure)(grid, legacy)
