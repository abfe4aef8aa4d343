"""The client's side."""

import os
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_leakage.flower import audit

from .task import Net, load_data, test, train

FOLDER = Path(os.environ.get("LEAKAGE_FOLDER", "leakage"))
"""Of the run's records. Where clients are processes of their own it has to be an absolute path."""
TRUTH = FOLDER / "truth"
"""Where the digits are left for the evaluator: this is a simulation."""

app = audit(ClientApp(), truth=TRUTH)  # was: app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    """Train the received model on this client's digits."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader = load_data(int(context.node_config["partition-id"]), num_examples=1, batch_size=1)
    loss = train(model, loader, epochs=1, learning_rate=0.1)
    metrics = MetricRecord({"train-loss": loss, "num-examples": len(loader.dataset)})
    arrays = ArrayRecord(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Test the received model on this client's digits."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loader = load_data(int(context.node_config["partition-id"]), num_examples=1, batch_size=1)
    metrics = MetricRecord({"accuracy": test(model, loader), "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
