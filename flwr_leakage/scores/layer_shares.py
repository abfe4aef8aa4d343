"""Which layer leaks: the share of every layer in JJᵀ."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Exposure, Measurement
from flwr_leakage.scores.samples import (
    DEFAULT_MEMORY_BYTES,
    Point,
    Precision,
    measurement,
    sample_problems,
)


def layer_slices(params: dict[str, Tensor]) -> dict[str, list[slice]]:
    """Where the entries of each layer lie in the flat gradient: weight and bias together."""
    slices: dict[str, list[slice]] = {}
    start = 0
    for name, value in params.items():
        layer = name.rpartition(".")[0] or name
        slices.setdefault(layer, []).append(slice(start, start + value.numel()))
        start += value.numel()
    return slices


@dataclass(frozen=True)
class LayerShares:
    """‖J_l‖_F²/‖J‖_F² and ‖J_lᵀv₁‖²/λmax of every layer l, J_l its columns in J.

    JJᵀ = Σ_l J_lJ_lᵀ is a sum over layers, so both shares add up to one over the layers: the
    first of all that the update tells about the input, the second along v₁, the input direction
    that it tells most about. The first is estimated from random signs (Hutchinson 1990).

    Attributes:
        num_probes: random signs, one product each.
        tolerance: of λmax.
        max_steps: products of JJᵀ at most.
        point: see ``sample_problems``.
        precision: see ``sample_problems``.
        memory_bytes: see ``sample_problems``.
    """

    num_probes: int = 20
    tolerance: float = 1e-2
    max_steps: int = 60
    point: Point = "defended"
    precision: Precision = "float32"
    memory_bytes: int = DEFAULT_MEMORY_BYTES

    def __post_init__(self) -> None:
        if self.num_probes < 1:
            raise ValueError(f"num_probes must be at least 1, got {self.num_probes}.")

    def __call__(
        self, gradient_map: GradientMap, exposure: Exposure, generator: torch.Generator
    ) -> list[Measurement]:
        """``layer_share/…`` and ``layer_top_share/…`` for each layer."""
        slices = layer_slices(exposure.params)
        columns: dict[str, list[float | None]] = {}
        notes: list[str] = []
        products = 0
        for problem in sample_problems(
            gradient_map, exposure, self.point, self.precision, self.memory_bytes
        ):
            operator = problem.operator
            before = operator.products
            total = {layer: torch.zeros(len(problem.notes)).double() for layer in slices}
            for _ in range(self.num_probes):
                shape = (operator.num_blocks, operator.num_inputs)
                signs = 2 * torch.randint(0, 2, shape, generator=generator) - 1
                for layer, part in _parts(operator.matvec(signs.to(problem.gradients)), slices):
                    total[layer] += part
            pairs = problem.largest(generator, self.tolerance, self.max_steps)
            top = dict(_parts(operator.matvec(pairs.vectors), slices))
            for kind, parts in (("layer_share", total), ("layer_top_share", top)):
                whole = torch.stack(list(parts.values())).sum(0)
                for layer, part in parts.items():
                    column = columns.setdefault(f"{kind}/{layer}", [])
                    for sample, sound in enumerate(problem.sound):
                        usable = sound and float(whole[sample]) > 0
                        column.append(float(part[sample] / whole[sample]) if usable else None)
            flat = whole == 0
            notes += [
                note or ("J = 0: no layer tells about the input" if zero else "")
                for note, zero in zip(problem.notes, flat.tolist(), strict=True)
            ]
            products += (operator.products - before) * len(problem.notes)
        return [
            measurement(name, values, list(notes), "1", "larger leaks more", products * (i == 0))
            for i, (name, values) in enumerate(columns.items())
        ]


def _parts(image: Tensor, slices: dict[str, list[slice]]) -> list[tuple[str, Tensor]]:
    return [
        (layer, torch.stack([(image[:, s].double() ** 2).sum(1) for s in where]).sum(0))
        for layer, where in slices.items()
    ]
