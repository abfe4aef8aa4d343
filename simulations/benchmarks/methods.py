"""Methods of federated learning as their authors write them, each short and on tiny data.

Each has the structure of a baseline of Flower or of a common library: what is exchanged, what stays
with the client, how the loss and the steps are made. Nothing in it knows of the audit.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as lists
from flwr.serverapp import strategy as records
from torch import Tensor, nn
from torch.nn import functional as F

RATE = 0.1


def images_of(context: Context) -> tuple[Tensor, Tensor]:
    """Four images (B, 1, 8, 8) of 8 bits, or as many as configured, and their labels."""
    count = int(context.run_config.get("images", 4))
    draws = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    levels = torch.randint(0, 256, (count, 1, 8, 8), generator=draws)
    return (levels.float() / 255 - 0.5) / 0.5, torch.arange(count) % 4


class Net(nn.Module):
    """A convolution and two linear layers; BatchNorm between them where asked for."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.bn1 = nn.BatchNorm2d(4) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(4 * 36, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 4)."""
        hidden = F.relu(self.bn1(self.conv1(images))).flatten(1)
        return self.fc2(F.relu(self.fc1(hidden)))


class Split(nn.Module):
    """A body, which is sent, and a head, which is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 4)."""
        return self.head(self.body(images))


class Projecting(nn.Module):
    """Returns features, their projection and logits, as MOON's model does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.project = nn.Linear(16, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features (B, 16), projections (B, 8) and logits (B, 4)."""
        features = self.features(images)
        projected = self.project(features)
        return features, projected, self.last(projected)


class Logits(nn.Module):
    """The logits of a model that returns more, as a server has to give it to an attack."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Projecting()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, 4)."""
        return self.net(images)[2]


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter of its own (LoRA, Hu et al., 2021)."""

    def __init__(self, size: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(size, outputs)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, size) / size**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        """W x + B A x."""
        return self.base(inputs) + inputs @ self.lora_a.T @ self.lora_b.T


def adapted_net() -> nn.Module:
    """Two adapted layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), Adapted(64, 16), nn.ReLU(), Adapted(16, 4))


def arrays_of(net: nn.Module) -> list[Any]:
    """The ``state_dict`` without names, as the older interface sends it."""
    return [value.detach().cpu().numpy().copy() for value in net.state_dict().values()]


def load(net: nn.Module, arrays: list[Any], names: list[str] | None = None) -> None:
    """Load arrays into the entries of these names, by default all."""
    names = list(net.state_dict()) if names is None else names
    state = {name: torch.tensor(each) for name, each in zip(names, arrays, strict=False)}
    net.load_state_dict(state, strict=False)


class Client(NumPyClient):
    """FedAvg by the older interface; the methods say what differs."""

    net: Callable[[], nn.Module] = Net
    batch_size, epochs = 2, 1

    def __init__(self, context: Context) -> None:
        self.context = context
        self.model = self.net()
        self.images, self.labels = images_of(context)

    def get(self) -> list[Any]:
        """What is sent."""
        return arrays_of(self.model)

    def put(self, arrays: list[Any]) -> None:
        """Take what was received."""
        load(self.model, arrays)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The mini-batches of an epoch."""
        pairs = self.images.split(self.batch_size), self.labels.split(self.batch_size)
        return list(zip(*pairs, strict=True))

    def train(self) -> None:
        """The training loop."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.model.train()
        for _ in range(self.epochs):
            for images, labels in self.batches():
                optimizer.zero_grad()
                F.cross_entropy(self.model(images), labels).backward()
                optimizer.step()

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        """Train, and send."""
        self.put(parameters)
        self.train()
        return self.get(), len(self.images), {}


class FedProx(Client):
    """The proximal term is computed before the model is called (``baselines/fedprox``)."""

    def train(self) -> None:
        """The loop of the baseline."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, weight_decay=0.001)
        global_params = [val.detach().clone() for val in self.model.parameters()]
        self.model.train()
        for images, labels in self.batches():
            optimizer.zero_grad()
            proximal_term = 0.0
            for local, center in zip(self.model.parameters(), global_params, strict=True):
                proximal_term += torch.square((local - center).norm(2))
            loss = F.cross_entropy(self.model(images), labels) + 0.5 * proximal_term
            loss.backward()
            optimizer.step()


class FedBN(Client):
    """BatchNorm stays with the client (``baselines/fedbn``)."""

    net = partial(Net, batch_norm=True)

    def get(self) -> list[Any]:
        """All but BatchNorm, which is kept."""
        state = self.model.state_dict()
        own = {k: Array(v.numpy().copy()) for k, v in state.items() if "bn" in k}
        self.context.state["local_batch_norm"] = ArrayRecord(own)
        return [v.numpy().copy() for k, v in state.items() if "bn" not in k]

    def put(self, arrays: list[Any]) -> None:
        """What was received, and the client's own."""
        load(self.model, arrays, [k for k in self.model.state_dict() if "bn" not in k])
        if "local_batch_norm" in self.context.state:
            own = self.context.state["local_batch_norm"].to_torch_state_dict()
            self.model.load_state_dict(own, strict=False)


class FedPer(Client):
    """The head stays with the client (``baselines/fedper``)."""

    net = Split

    def get(self) -> list[Any]:
        """The body; the head is kept."""
        self.context.state["head"] = ArrayRecord(self.model.head.state_dict())
        return arrays_of(self.model.body)

    def put(self, arrays: list[Any]) -> None:
        """The body, and the client's own head."""
        load(self.model, arrays)
        if "head" in self.context.state:
            head = self.context.state["head"].to_torch_state_dict()
            self.model.head.load_state_dict(head)


class PFedPara(FedPer):
    """The head is trained and kept, and the server's is sent back (``baselines/fedpara``)."""

    def get(self) -> list[Any]:
        """The body, and the head that was received."""
        return [*super().get(), *self.received]

    def put(self, arrays: list[Any]) -> None:
        """What was received, and the client's own head."""
        self.received = arrays[-2:]
        super().put(arrays)


class CountingSGD(torch.optim.Optimizer):
    """SGD that counts its steps, as ``ProxSGD`` of ``baselines/fednova`` does."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"lr": rate})
        self.rate, self.count = rate, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move along the gradient, by a rate that shrinks."""
        self.count += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=self.rate / self.count)


class OwnOptimizer(Client):
    """Trains by an optimizer of its own class."""

    def train(self) -> None:
        """The usual loop."""
        optimizer = CountingSGD(self.model.parameters(), RATE)
        for images, labels in self.batches():
            optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            optimizer.step()


class FedRep(FedPer):
    """Head and body are trained in turns (``baselines/fedrep``)."""

    def train(self) -> None:
        """First the head, then the body, with one optimizer."""
        named = list(self.model.named_parameters())
        groups = [
            {"params": [v for k, v in named if "weight" in k], "weight_decay": 1e-4},
            {"params": [v for k, v in named if "bias" in k], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.5)
        for turn in ("head", "body"):
            self.model.head.requires_grad_(turn == "head")
            self.model.body.requires_grad_(turn == "body")
            for images, labels in self.batches():
                loss = F.cross_entropy(self.model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


class CorrectedSGD(torch.optim.SGD):
    """SGD with control variates."""

    def step_custom(self, server_cv: list[Tensor], client_cv: list[Tensor]) -> None:
        """Take a step, and move by −η (c − c_i)."""
        self.step()
        for group in self.param_groups:
            for par, s_cv, c_cv in zip(group["params"], server_cv, client_cv, strict=True):
                par.data.add_(s_cv - c_cv, alpha=-group["lr"])


class CorrectedGradients(torch.optim.SGD):
    """SGD with momentum, to whose gradients control variates are added, as in FL4Health."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)

    def step_custom(self, server_cv: list[Tensor], client_cv: list[Tensor]) -> None:
        """Take a step along g + c − c_i."""
        for par, s_cv, c_cv in zip(
            self.param_groups[0]["params"], server_cv, client_cv, strict=True
        ):
            par.grad.add_(s_cv - c_cv)
        self.step()


class Scaffold(Client):
    """Weights and control variates in one list; updates are sent (``baselines/niid_bench``)."""

    begins = staticmethod(torch.zeros_like)
    optimizer: Any = CorrectedSGD

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        """Train with c − c_i, and send y − x and the change of c_i."""
        half = len(parameters) // 2
        server_cv = [torch.tensor(each) for each in parameters[half:]]
        parameters = parameters[:half]
        self.put(parameters)
        client_cv = [self.begins(param).detach() for param in self.model.parameters()]
        if "client_cv" in self.context.state:
            client_cv = list(self.context.state["client_cv"].to_torch_state_dict().values())
        optimizer = self.optimizer(self.model.parameters(), lr=RATE)
        for images, labels in self.batches():
            optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            optimizer.step_custom(server_cv, client_cv)
        steps = len(self.batches())
        update = [new - old for new, old in zip(self.get(), parameters, strict=True)]
        renewed = [
            c_i - c - torch.tensor(each) / (RATE * steps)
            for c_i, c, each in zip(client_cv, server_cv, update, strict=True)
        ]
        change = [(n - o).numpy() for n, o in zip(renewed, client_cv, strict=True)]
        kept = {str(place): each for place, each in enumerate(renewed)}
        self.context.state["client_cv"] = ArrayRecord(kept)
        return update + change, len(self.images), {}


class ScaffoldFromParameters(Scaffold):
    """Its control variates begin with the parameters, as those of ``baselines/niid_bench`` do."""

    begins = staticmethod(torch.clone)


class ScaffoldOfGradients(Scaffold):
    """Its control variates enter the gradients."""

    optimizer = CorrectedGradients


class FedNova(Client):
    """The normalised update is sent (``baselines/niid_bench``)."""

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        """Train with momentum, and send (x − y)/‖a‖₁ of the parameters."""
        self.put(parameters)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        before = [param.detach().clone() for param in self.model.parameters()]
        steps = 0
        for images, labels in self.batches():
            optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            optimizer.step()
            steps += 1
        a_i = (steps - 0.9 * (1 - 0.9**steps) / 0.1) / 0.1
        pairs = zip(before, self.model.parameters(), strict=True)
        g_i = [torch.div(old - new.detach(), a_i).numpy() for old, new in pairs]
        return g_i, len(self.images), {"a_i": a_i}


class Moon(Client):
    """Two further models are in the loss (``baselines/moon``)."""

    net = Projecting

    def train(self) -> None:
        """Cross-entropy, and a contrast of this model's projections to the other models'."""
        global_net, previous = copy.deepcopy(self.model), copy.deepcopy(self.model)
        if "previous" in self.context.state:
            previous.load_state_dict(self.context.state["previous"].to_torch_state_dict())
        previous.requires_grad_(False)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        cos = nn.CosineSimilarity(dim=-1)
        criterion = nn.CrossEntropyLoss()
        for images, labels in self.batches():
            optimizer.zero_grad()
            _, pro1, out = self.model(images)
            _, pro2, _ = global_net(images)
            logits = cos(pro1, pro2).reshape(-1, 1)
            _, pro3, _ = previous(images)
            logits = torch.cat((logits, cos(pro1, pro3).reshape(-1, 1)), dim=1)
            logits /= 0.5
            loss = criterion(out, labels) + criterion(logits, torch.zeros(len(images)).long())
            loss.backward()
            optimizer.step()
        self.context.state["previous"] = ArrayRecord(self.model.state_dict())


class Compressed(Client):
    """A flat vector of compressed gradients is sent (as ``baselines/dasha``)."""

    def get(self) -> list[Any]:
        """Every second entry of the update, doubled."""
        vector = nn.utils.parameters_to_vector(self.model.parameters()).detach().numpy()
        kept = np.arange(len(vector)) % 2 == 0
        return [(2 * kept * (vector - self.start)).astype(np.float32)]

    def put(self, arrays: list[Any]) -> None:
        """The flat parameters."""
        self.start = arrays[0]
        nn.utils.vector_to_parameters(torch.tensor(arrays[0]), self.model.parameters())


class Ditto(Client):
    """A model of the client's own is trained after the shared one (Li et al., 2021)."""

    def train(self) -> None:
        """The shared model, then the client's own near it, with an optimizer of its own."""
        super().train()
        own = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
        for images, labels in self.batches():
            optimizer.zero_grad()
            F.cross_entropy(own(images), labels).backward()
            optimizer.step()


class Forest(NumPyClient):
    """What is no model of torch: arrays of another kind, as of scikit-learn."""

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        """One step of a linear model of numpy."""
        weights, bias = parameters
        return [weights + 0.1, bias - 0.1], 4, {}


def list_app(client: type[NumPyClient]) -> Callable[[], ClientApp]:
    """A client of the older interface."""

    def make() -> ClientApp:
        def client_fn(context: Context) -> Any:
            made = client() if client is Forest else client(context)  # type: ignore[call-arg]
            return made.to_client()

        return ClientApp(client_fn=client_fn)

    return make


Train = Callable[[nn.Module, Tensor, Tensor, Context], None]


def record_app(
    net: Callable[[], nn.Module],
    train: Train,
    sends: Callable[[str], bool] = lambda name: True,
) -> Callable[[], ClientApp]:
    """A client of the newer interface, which sends named arrays.

    Args:
        net: makes the model.
        train: trains it.
        sends: whether an entry of the ``state_dict`` is sent; the others are kept.
    """

    def make() -> ClientApp:
        app = ClientApp()

        @app.train()
        def fit(message: Message, context: Context) -> Message:
            model = net()
            if "own" in context.state:
                own = context.state["own"].to_torch_state_dict()
                model.load_state_dict(own, strict=False)
            model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
            model.train()
            images, labels = images_of(context)
            train(model, images, labels, context)
            state = model.state_dict()
            kept = {name: value for name, value in state.items() if not sends(name)}
            if kept:
                context.state["own"] = ArrayRecord(kept)
            sent = ArrayRecord({name: value for name, value in state.items() if sends(name)})
            metrics = MetricRecord({"num-examples": len(images)})
            return Message(RecordDict({"arrays": sent, "metrics": metrics}), reply_to=message)

        return app

    return make


def plain(model: nn.Module, images: Tensor, labels: Tensor, context: Context) -> None:
    """One step of SGD."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


def feddyn(model: nn.Module, images: Tensor, labels: Tensor, context: Context) -> None:
    """A linear and a proximal term before the call; the linear one is kept (Acar et al., 2021)."""
    start = [p.detach().clone() for p in model.parameters()]
    kept = [torch.zeros_like(p) for p in start]
    if "dual" in context.state:
        kept = list(context.state["dual"].to_torch_state_dict().values())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for inputs, targets in zip(images.split(2), labels.split(2), strict=True):
        optimizer.zero_grad()
        linear = sum((h * p).sum() for h, p in zip(kept, model.parameters(), strict=True))
        near = sum(((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True))
        loss = F.cross_entropy(model(inputs), targets) - linear + 0.05 * near
        loss.backward()
        optimizer.step()
    pairs = zip(kept, model.parameters(), start, strict=True)
    dual = {str(i): h - 0.1 * (p.detach() - s) for i, (h, p, s) in enumerate(pairs)}
    context.state["dual"] = ArrayRecord(dual)


def lightning(model: nn.Module, images: Tensor, labels: Tensor, context: Context) -> None:
    """A step with a closure that holds forward, zero_grad and backward, as Lightning makes it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def closure() -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)


def fastai(model: nn.Module, images: Tensor, labels: Tensor, context: Context) -> None:
    """Steps by functions of the library's own, without an optimizer of torch."""
    F.cross_entropy(model(images), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=-RATE)


def monai(model: nn.Module, images: Tensor, labels: Tensor, context: Context) -> None:
    """An engine's iteration: a dictionary of a batch, a scaler, mixed precision."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    batch = {"image": images, "label": labels}
    optimizer.zero_grad(set_to_none=True)
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.CrossEntropyLoss()(model(batch["image"]), batch["label"]).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


class ScaffoldStrategy(lists.FedAvg):
    """Sends the model and the server's control variates; gets updates of both."""

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Append c."""
        model = parameters_to_ndarrays(parameters)
        self.model = model
        self.variates = getattr(self, "variates", [np.zeros_like(each) for each in model])
        both = ndarrays_to_parameters(model + self.variates)
        return super().configure_fit(server_round, both, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Add the mean update to x, and the mean change to c."""
        found, metrics = super().aggregate_fit(server_round, results, failures)
        mean = parameters_to_ndarrays(found)
        half = len(self.model)
        self.variates = [c + d for c, d in zip(self.variates, mean[half:], strict=True)]
        new = [x + d for x, d in zip(self.model, mean[:half], strict=True)]
        return ndarrays_to_parameters(new), metrics


class NovaStrategy(lists.FedAvg):
    """Subtracts τ times the mean normalised update."""

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Remember x."""
        self.model = parameters_to_ndarrays(parameters)
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """As the baseline does for parameters."""
        found, metrics = super().aggregate_fit(server_round, results, failures)
        tau = sum(fit.metrics["a_i"] for _, fit in results) / len(results)
        mean = parameters_to_ndarrays(found)
        new = [x - tau * d for x, d in zip(self.model, mean, strict=True)]
        return ndarrays_to_parameters(new), metrics


class UpdateStrategy(NovaStrategy):
    """Adds the mean update."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Add."""
        found, metrics = lists.FedAvg.aggregate_fit(self, server_round, results, failures)
        mean = parameters_to_ndarrays(found)
        new = [x + d for x, d in zip(self.model, mean, strict=True)]
        return ndarrays_to_parameters(new), metrics


@dataclass(frozen=True)
class Method:
    """An app.

    Attributes:
        client: makes the ``ClientApp``.
        net: makes the model that the server is given.
        first: makes the arrays of the first round from that model, a list or by name.
        strategy: makes the strategy, from the first arrays.
    """

    client: Callable[[], ClientApp]
    net: Callable[[], nn.Module] = Net
    first: Callable[[nn.Module], Any] = arrays_of
    strategy: Any = lists.FedAvg

    @property
    def uses_lists(self) -> bool:
        """Whether it is an app of ``flwr.server``."""
        return issubclass(self.strategy, lists.Strategy)


def state_of(net: nn.Module) -> dict[str, Tensor]:
    """The whole ``state_dict``."""
    return net.state_dict()


def without_bn(net: nn.Module) -> list[Any]:
    """All but BatchNorm."""
    return [value.numpy().copy() for name, value in net.state_dict().items() if "bn" not in name]


def adapters(net: nn.Module) -> dict[str, Tensor]:
    """The adapters alone."""
    return {name: value for name, value in net.state_dict().items() if "lora" in name}


def flat(net: nn.Module) -> list[Any]:
    """One vector."""
    return [nn.utils.parameters_to_vector(net.parameters()).detach().numpy().copy()]


def named(net: Callable[[], nn.Module], train: Train, strategy: Any = records.FedAvg) -> Method:
    """An app of the newer interface that sends its whole model."""
    return Method(record_app(net, train), net, state_of, strategy)


METHODS: dict[str, Method] = {
    "FedAvg, lists": Method(list_app(Client)),
    "FedProx": Method(list_app(FedProx)),
    "FedBN": Method(list_app(FedBN), partial(Net, batch_norm=True), without_bn),
    "FedPer": Method(list_app(FedPer), Split, lambda net: arrays_of(net.body)),
    "FedRep": Method(list_app(FedRep), Split),
    "pFedPara": Method(list_app(PFedPara), Split),
    "an optimizer of its own": Method(list_app(OwnOptimizer)),
    "SCAFFOLD": Method(list_app(Scaffold), strategy=ScaffoldStrategy),
    "SCAFFOLD, from its parameters": Method(
        list_app(ScaffoldFromParameters), strategy=ScaffoldStrategy
    ),
    "SCAFFOLD, of gradients": Method(
        list_app(ScaffoldOfGradients), strategy=ScaffoldStrategy
    ),
    "FedNova": Method(list_app(FedNova), strategy=NovaStrategy),
    "MOON": Method(list_app(Moon), Logits),
    "FedDyn": named(Net, feddyn),
    "FedAvgM": named(Net, plain, records.FedAvgM),
    "LoRA adapters": Method(
        record_app(adapted_net, plain, lambda name: "lora" in name), adapted_net, adapters,
        records.FedAvg,
    ),
    "FedPer, named": Method(
        record_app(Split, plain, lambda name: name.startswith("body")), Split, state_of,
        records.FedAvg,
    ),
    "FedBN, named": Method(
        record_app(partial(Net, batch_norm=True), plain, lambda name: "bn" not in name),
        partial(Net, batch_norm=True), state_of, records.FedAvg,
    ),
    "a Lightning loop": named(Net, lightning),
    "a MONAI loop": named(Net, monai),
    "a fastai loop": named(Net, fastai),
    "Ditto": Method(list_app(Ditto)),
    "DASHA-like compression": Method(list_app(Compressed), first=flat, strategy=UpdateStrategy),
    "scikit-learn": Method(
        list_app(Forest), first=lambda net: [np.ones((4, 64), np.float32), np.ones(4, np.float32)]
    ),
}  # fmt: skip
"""By name; the first rounds' arrays are those of the seeded model."""
