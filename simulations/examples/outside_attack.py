"""An attack from outside on ``simulations.challenge``: gradient matching (Geiping et al. 2020).

python -m simulations.examples.outside_attack BENCH ENTRIES/outside
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity, cross_entropy

from simulations.benchmarks.portfolio_cases import NETWORKS

bench, entry = map(Path, sys.argv[1:])
entry.mkdir(parents=True)
for path in sorted((bench / "updates").glob("*.safetensors")):
    told, tensors = json.loads(safe_open(path, "pt").metadata()["told"]), load_file(path)
    model = NETWORKS[told["network"]](tuple(told["shape"])).eval()
    parts = [name.partition(".") for name in tensors if not name.startswith("change.")]
    model.load_state_dict({name: tensors[f"{part}.{name}"] for part, _, name in parts})
    names, params = zip(*model.named_parameters(), strict=True)
    seen = torch.cat([-tensors[f"change.{name}"].flatten() for name in names])
    count, order = told["num_examples"], tensors[f"change.{names[-1]}"].argsort(descending=True)
    labels = order[torch.arange(count) % len(order)]  # the last bias rises most for classes present
    inputs = (0.1 * torch.randn(count, *told["shape"])).requires_grad_()
    optimizer = torch.optim.Adam([inputs], 0.1)
    for _ in range(200):
        loss = cross_entropy(model(inputs), labels)
        gradient = torch.autograd.grad(loss, params, create_graph=True)
        found = torch.cat([each.flatten() for each in gradient])
        rough = inputs.diff(dim=2).abs().mean() + inputs.diff(dim=3).abs().mean()
        optimizer.zero_grad()
        (1 - cosine_similarity(found, seen, dim=0) + 0.02 * rough).backward()
        optimizer.step()
    mean, std = (torch.tensor(told[name])[:, None, None] for name in ("mean", "std"))
    images = (inputs.detach() * std + mean).clamp(0, 1)
    np.savez(entry / f"{path.stem}.npz", images=images, labels=labels)
