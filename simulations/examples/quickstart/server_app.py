"""The server's side."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flwr_leakage.flower import observe
from flwr_leakage.report import conclusion

from .client_app import FOLDER, TRUTH
from .task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for a few rounds."""
    num_rounds = int(context.run_config.get("num-server-rounds", 2))
    torch.manual_seed(0)
    model = Net()
    strategy = observe(FedAvg(), model, FOLDER, truth=TRUTH)  # was: strategy = FedAvg()
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=num_rounds)
    print(conclusion(FOLDER))
    torch.save(result.arrays.to_torch_state_dict(), FOLDER / "final_model.pt")
