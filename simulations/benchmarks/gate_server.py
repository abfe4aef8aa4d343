"""A server that chooses the weights it sends, so that gates pass and updates tell the images.

Its crafts carry the images unchanged to a linear layer, of which it reads the ratio of the weight's
and the bias' gradient. In the MLP the first layer has units that switch on at rising brightness, so
that the difference of two of them is of few digits (Fowl et al. 2022); in the ConvNet the
convolutions copy the image, and the logits do not depend on it, so that each class' row is of the
digits of that class. Then

- ``trap``: nothing else; ``shrunk`` and ``enlarged``: what is behind the trap, or the copy, is
  scaled down or up; ``saturated``: the softmax is certain of one class;
- ``optimised``: scale, logits and output weights move by Adam, on the server's own digits, until
  the gate passes them;
- ``hidden``: one unit has weights of zero, so that its change is exact, and all the others have
  weights so large that the rounding of what is sent swallows their change.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.models import MLP
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, InputSpec
from simulations.benchmarks import lab

SPEC = InputSpec((1, 14, 14), 10, (0.1307,), (0.3081,))
UNITS = 64
CRAFTS = ("honest", "trap", "shrunk", "enlarged", "saturated", "optimised", "hidden")


def make_network(name: str) -> nn.Module:
    """The MLP or the ConvNet, both with ReLU, at torch's own initial weights."""
    torch.manual_seed(0)
    if name == "MLP":
        return MLP(SPEC.shape, 10, (UNITS,))
    return lab.ConvNet(SPEC.shape, 10, 8, (1, 1), (1, 1), (), use_batch_norm=False)


def read_digits(file: str, root: lab.Path, first: int, count: int) -> Batch:
    """Normalised digits of 14×14 pixels."""
    found = lab.read_images(root / file, first, count)
    return Batch(SPEC.normalize(F.avg_pool2d(found.inputs, 2)), found.targets)


@dataclass(frozen=True)
class Server:
    """What the server knows: the network, the honest weights, and digits of its own."""

    model: nn.Module
    public: Batch

    @property
    def linear(self) -> str:
        """The layer that the images are read from."""
        return "features.0" if isinstance(self.model, MLP) else "fc"

    def trap(self, scale: Tensor, out: Tensor, bias: Tensor) -> Params:
        """Weights that carry images to ``linear``; differentiable in what is free in them.

        Args:
            scale: of what is before or behind the trap.
            out: (10,) weights behind every unit of the MLP's trap.
            bias: (10,) of the logits.
        """
        made = {name: torch.zeros_like(v) for name, v in self.model.state_dict().items()}
        if isinstance(self.model, MLP):
            bright = self.public.inputs.flatten(1).mean(1)
            limits = torch.quantile(bright, torch.arange(UNITS) / UNITS)
            inner = 1 / torch.as_tensor(scale).clamp_min(1.0)  # else the softmax saturates
            made["features.0.weight"] += 1 / self.public.inputs[0].numel()
            made["features.0.weight"] = made["features.0.weight"] * inner
            made["features.0.bias"] = -limits * inner
            made["fc.weight"] = made["fc.weight"] + (scale * out)[:, None]
        else:
            first, centre = made["features.0.weight"].clone(), (0, 0, 1, 1)
            first[centre] = 1.0
            made["features.0.weight"] = first * scale
            made["features.0.bias"] = F.one_hot(torch.tensor(0), 8) * scale  # ReLU lets all pass
            made["features.2.weight"][centre] = 1.0
        return {**made, "fc.bias": bias}

    def hidden(self) -> Params:
        """Weights under which the change of all rows but one is lost by rounding."""
        scale = torch.tensor(1e-6)
        made = self.trap(scale, torch.zeros(10), torch.full((10,), 12.0))
        made = {name: value.clone() for name, value in made.items()}
        weight = made[f"{self.linear}.weight"]
        signs = torch.where(torch.arange(weight.shape[1]) % 2 == 0, 1.0, -1.0)
        if isinstance(self.model, MLP):
            turns = torch.where(torch.arange(UNITS) % 2 == 0, 256.0, -256.0)
            weight[:] = turns[:, None] * signs
            made["features.0.bias"][:] = 0.0
            made["fc.weight"][:] = 1e-5 * torch.linspace(-1, 1, 10)[:, None]
            made["fc.weight"][:, 0] *= 1e-7
            made["features.0.bias"][0] = 1e-12
            made["fc.bias"][:] = 0.0
        else:
            weight[:] = 16.0 * signs
            made["fc.bias"][0] = 0.0
        weight[0] = 0.0
        return made

    def crafts(self, honest: Params) -> dict[str, Params]:
        """All weights but the optimised ones, which depend on the gate."""
        out, even = torch.linspace(-1, 1, 10), torch.zeros(10)
        scales = {"trap": 1.0, "shrunk": 1e-2, "enlarged": 1e3}
        made = {name: self.trap(torch.tensor(s), out, even) for name, s in scales.items()}
        certain = 30.0 * F.one_hot(torch.tensor(0), 10)
        saturated = self.trap(torch.tensor(1.0), out, certain)
        return {"honest": honest, **made, "saturated": saturated, "hidden": self.hidden()}

    def optimised(self, passes: Callable[[Params], bool], wanted: str, steps: int = 100) -> Params:
        """The trap whose free numbers descend until a gate passes the server's own digits."""
        free = [torch.zeros(()), torch.linspace(-1, 1, 10), torch.zeros(10)]
        for each in free:
            each.requires_grad_()
        optimizer = torch.optim.Adam(free, 0.1)
        few, draws = self.public[:4], lab.generator()
        params: Params = {}
        for step in range(steps + 1):
            params = self.trap(free[0].exp(), *free[1:])
            fixed = {name: value.detach() for name, value in params.items()}
            if step % 20 == 0 and passes(fixed):
                return fixed
            optimizer.zero_grad()
            _strength(self.model, params, few, wanted, draws).backward()
            optimizer.step()
        return {name: value.detach() for name, value in params.items()}

    def read(self, params: Params, change: Params) -> Tensor:
        """Candidates (M, C, H, W) within the range of pixels: rows, and differences of rows."""
        weight, bias = (change[f"{self.linear}.{kind}"].double() for kind in ("weight", "bias"))
        last = bias.argmax()
        taken = [(weight, bias), (weight[1:] - weight[:-1], bias[1:] - bias[:-1]),
                 (weight - weight[last], bias - bias[last])]  # fmt: skip
        weight, bias = (torch.cat(parts) for parts in zip(*taken, strict=True))
        ratios = (weight / bias[:, None])[bias.abs() > 0]
        if not isinstance(self.model, MLP):
            ratios = self._uncopied(params, ratios)
        pixels = SPEC.denormalize(ratios.reshape(-1, *SPEC.shape))
        inside = (pixels.amin((1, 2, 3)) > -0.02) & (pixels.amax((1, 2, 3)) < 1.02)
        return pixels[inside].float()

    def _uncopied(self, params: Params, features: Tensor) -> Tensor:
        """The images of features, taking what is before the linear layer for affine."""
        layers = {k.removeprefix("features."): v.double() for k, v in params.items() if "fea" in k}
        size = self.public.inputs[0].numel()
        probes = torch.cat([torch.zeros(1, size), torch.eye(size)]).double()
        body = self.model.get_submodule("features")
        seen = torch.func.functional_call(body, layers, (probes.reshape(-1, *SPEC.shape),))
        seen = seen.flatten(1)
        return (features - seen[0]) @ torch.linalg.pinv(seen[1:] - seen[0])


def _strength(
    model: nn.Module, params: Params, batch: Batch, wanted: str, draws: torch.Generator
) -> Tensor:
    """What descends of log ‖g‖² and log ‖J‖², sums over samples, J by one random probe each."""
    norm = jacobian = torch.zeros(())
    params = {k: v if v.requires_grad else v.clone().requires_grad_() for k, v in params.items()}
    for place in range(len(batch)):
        x = batch.inputs[place : place + 1].clone().requires_grad_()
        logits = torch.func.functional_call(model, params, (x,))
        loss = F.cross_entropy(logits, batch.targets[place : place + 1])
        gradient = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        norm = norm + torch.stack([g.square().sum() for g in gradient]).sum().log()
        probes = [(g * torch.randn(g.shape, generator=draws)).sum() for g in gradient]
        (row,) = torch.autograd.grad(torch.stack(probes).sum(), x, create_graph=True)
        jacobian = jacobian + (row.square().sum() + 1e-30).log()
    return {
        "small gradient": norm,
        "small Jacobian": jacobian,
        "large Jacobian": -jacobian,
        "large angle": norm - jacobian,
    }[wanted]
