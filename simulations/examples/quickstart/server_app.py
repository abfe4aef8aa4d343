"""The server's side."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.flower import observe
from simulations.examples.quickstart.client_app import TRUTH
from simulations.examples.quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for a few rounds."""
    num_rounds = int(context.run_config.get("num-server-rounds", 2))
    torch.manual_seed(0)
    model = Net()
    strategy = observe(FedAvg(), model, "leakage", truth=TRUTH)  # was: strategy = FedAvg()
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=num_rounds)
