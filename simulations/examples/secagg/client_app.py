"""The client's side: a ``NumPyClient`` behind Flower's SecAgg+ mod."""

import warnings

import torch
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar
from torch.nn import functional as F

from flwr_leakage.flower import audit
from simulations.examples.secagg.task import LEARNING_RATE, digit, network

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flwr.client.mod import secaggplus_mod

TRUTH = "leakage-secagg/truth"
"""Where the digits are left for the evaluator: this is a simulation."""


class DigitClient(NumPyClient):
    """Takes one step of SGD on one digit.

    Args:
        partition: whose digit.
    """

    def __init__(self, partition: int) -> None:
        self.partition = partition

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train the received model; the partition id is told for the evaluator's sake."""
        model = network()
        names = model.state_dict().keys()
        arrays = zip(names, parameters, strict=True)
        model.load_state_dict({name: torch.tensor(value) for name, value in arrays})
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        images, labels = digit(self.partition)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        trained = [value.numpy() for value in model.state_dict().values()]
        return trained, len(images), {"partition-id": self.partition}


def client_fn(context: Context) -> Client:
    """The client of a node."""
    return DigitClient(int(context.node_config["partition-id"])).to_client()


app = audit(
    ClientApp(client_fn=client_fn, mods=[secaggplus_mod]),
    truth=TRUTH,
    share=["training", "replay"],  # a simulation; else a client under a mask tells neither
)
