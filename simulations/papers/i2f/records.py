"""One row for each attacked gradient: what I²F said, and what the attack reached."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flwr_leakage.metrics import Lpips, ssim
from flwr_leakage.randomness import make_generator, normal_rows
from flwr_leakage.records import Batch, InputSpec
from simulations.papers.findings import Row
from simulations.papers.i2f.attack import attack_gradients, attack_of, inputs_of
from simulations.papers.i2f.influence import Influence


def gaussian(
    influence: Influence, variances: Sequence[float], seed: int, first: int
) -> dict[str, Tensor]:
    """δ by variance: one draw of normal noise a sample, scaled.

    Args:
        influence: of S samples.
        variances: of each entry of δ, as the paper states noise.
        seed: of the draw.
        first: the place of the first sample, so that a sample keeps its noise in other selections.
    """
    shape = influence.gradients.shape
    draws = [make_generator(seed, client_id=first + i, purpose="noise") for i in range(shape[0])]
    unit = normal_rows(shape, draws).to(influence.gradients)
    return {f"{variance:g}": variance**0.5 * unit for variance in variances}


def attack_rows(
    network: nn.Module,
    batch: Batch,
    spec: InputSpec,
    influence: Influence,
    deltas: Mapping[str, Tensor],
    attack: str,
    iterations: int,
    seed: int,
    first: int,
    dampings: Sequence[float] = (),
    undamped: bool = False,
    lpips: Lpips | None = None,
) -> list[Row]:
    """Attack every sample under every perturbation, in one vectorised attack.

    Norms are of model inputs: ``i_lb`` and its kin are ‖x̂ − x‖, ``rmse`` is ‖x̂ − x‖/√N.

    Args:
        network: in eval mode.
        batch: S samples.
        spec: of the inputs.
        influence: of the network and the batch.
        deltas: by name, (S, P).
        attack: ``DGL`` or ``GS``.
        iterations: of the attack.
        seed: of the attack's starts; a column of the rows.
        first: the place of the first sample in the test set.
        dampings: absolute ε of I²F.
        undamped: whether to compute the undamped I²F.
        lpips: a column of its own where it is at hand.
    """
    gradients = [(influence.gradients + delta).float() for delta in deltas.values()]
    found = attack_gradients(
        attack_of(attack, iterations), network, spec, gradients, batch.targets, seed
    )
    rows: list[Row] = []
    pixels = spec.denormalize(batch.inputs)
    for (name, delta), version in zip(deltas.items(), found, strict=True):
        told = influence(delta, dampings, undamped)
        inputs = inputs_of(version, batch)
        errors = (inputs - batch.inputs).square().flatten(1).mean(1).sqrt()
        finite = inputs.isfinite().flatten(1).all(1)
        # The scores are of whole batches: what is missing is stood in for, and then left out.
        seen = spec.denormalize(inputs).nan_to_num(0.0).clamp(0, 1)
        columns: dict[str, Tensor] = {
            "lambda_max": influence.largest,
            "i_nom": told.nominal,
            "i_lb": told.lower_bound,
            **{f"i_{e:g}": told.damped[:, place] for place, e in enumerate(dampings)},
            **({"i_undamped": told.undamped} if undamped else {}),
            "rmse": errors,
            "ssim": ssim(seen, pixels).where(finite, torch.nan),
            **(
                {}
                if lpips is None
                else {"lpips": lpips.distance(seen, pixels).where(finite, torch.nan)}
            ),
        }
        for sample, reconstruction in enumerate(version):
            values = {key: _number(value[sample]) for key, value in columns.items()}
            rows.append(
                {
                    "attack": attack,
                    "perturbation": name,
                    "image": first + sample,
                    "label": int(batch.targets[sample]),
                    "seed": seed,
                    "root": batch.inputs[0].numel() ** 0.5,
                    **values,
                    "initial": reconstruction.stats.get("initial_objective"),
                    "objective": reconstruction.objective,
                }
            )
    return rows


def _number(value: Tensor) -> float | None:
    number = float(value)
    return number if torch.isfinite(value) else None
