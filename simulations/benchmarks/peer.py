"""breaching 0.1.2 on the observations of this project."""

import time

import torch
from torch import Tensor, nn

import flwr_leakage._torchvision  # noqa: F401  # breaching imports torchvision
from flwr_leakage.records import InputSpec, Observation


def run_breaching(
    name: str,
    network: nn.Module,
    spec: InputSpec,
    observations: list[Observation],
    iterations: int,
) -> tuple[list[Tensor | None], list[float]]:
    """Reconstructions and CPU seconds of a configuration of breaching, one target at a time.

    Labels are inferred by the configuration's own default; ``iterations`` of 0 leaves its number
    of steps. Its total variation takes images of three channels, and is left out for others.
    """
    import breaching
    from omegaconf import OmegaConf, open_dict

    config = breaching.get_attack_config(name)
    if iterations:
        config.optim.max_iterations = iterations
    config.optim.callback = 10**9
    if spec.shape[0] != 3:  # its kernel has three channels
        with open_dict(config):
            config.regularization.pop("total_variation", None)
    device = next(network.parameters()).device
    setup = {"device": device, "dtype": torch.float32}
    metadata = OmegaConf.create(
        {
            "shape": list(spec.shape),
            "classes": spec.num_classes,
            "mean": list(spec.mean),
            "std": list(spec.std),
            "normalize": True,
            "modality": "vision",
            "task": "classification",
        }
    )
    found: list[Tensor | None] = []
    seconds = []
    for observation in observations:
        torch.manual_seed(0)
        attacker = breaching.attacks.prepare_attack(
            network, torch.nn.CrossEntropyLoss(), config, setup
        )
        payload = {
            "parameters": list(observation.params.values()),
            "buffers": [
                observation.buffers.get(buffer, value) for buffer, value in network.named_buffers()
            ],
            "metadata": metadata,
        }
        shared = {
            "gradients": list(observation.update.pseudo_gradient().values()),
            "buffers": None,
            "metadata": {
                "num_data_points": observation.update.num_examples,
                "labels": None,
                "local_hyperparams": None,
            },
        }
        began = time.process_time()
        result, _ = attacker.reconstruct([payload], [shared], {}, dryrun=False)
        seconds.append(time.process_time() - began)
        found.append(spec.clamp(result["data"].detach()))
    return found, seconds
