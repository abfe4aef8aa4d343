"""The ReLUs of a layer while their masks are sought, and the equations of the proven ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link, features_of
from flwr_leakage.attacks.exact.known import Known
from flwr_leakage.attacks.exact.layer_equations import Level
from flwr_leakage.attacks.exact.mask_equations import MaskEquations
from flwr_leakage.attacks.exact.masks import MaskEvidence, MaskSearch, proven_channels
from flwr_leakage.attacks.exact.weight_equations import Whitened


@dataclass(frozen=True)
class Hidden:
    """The ReLUs of one layer, whose masks are sought.

    Attributes:
        before: the layers before that layer.
        link: the layer.
        behind: the outputs and equations of the next layer.
        evidence: the gradients that decide about the masks; ``None`` if the layer has no bias.
        known: the facts about the layer's outputs (C, P) that proven masks give.
        search: the settings of the search for masks.
        negligible: share of the largest singular value of the layer's own equations, in [0, 1).
            Equations with smaller ones are left out.
        noise: share of the largest singular value of these equations, ≥ 0. Equations with smaller
            ones lose weight; see :meth:`Whitened.faded`.
    """

    before: Sequence[Link]
    link: Link
    behind: Level
    evidence: MaskEvidence | None
    known: Known
    search: MaskSearch
    negligible: float = 1e-6
    noise: float = 1e-4

    @classmethod
    def begin(
        cls,
        before: Sequence[Link],
        link: Link,
        behind: Level,
        search: MaskSearch,
        is_sought: bool = True,
        **tolerances: float,
    ) -> "Hidden":
        """Return the ReLUs of a layer with the masks that are proven without a candidate.

        Args:
            before: see the attributes.
            link: see the attributes.
            behind: see the attributes.
            search: see the attributes.
            is_sought: whether the next layer's equations are enough to prove masks.
            tolerances: ``negligible`` and ``noise``.
        """
        errors = behind.input_errors.reshape(link.num_channels, -1) * link.scale[:, None]
        evidence, known = None, Known.nothing(errors)
        if is_sought and link.bias_gradient is not None:
            equations = behind.equations.of_channels(link.num_channels)
            weight = link.weight_gradient.flatten(1)
            evidence = MaskEvidence(equations, errors, link.bias_gradient, weight)
            known = search.begin(evidence)
        return cls(before, link, behind, evidence, known, search, **tolerances)

    @property
    def num_channels(self) -> int:
        """Number of channels, each with one mask."""
        return len(self.known.values)

    @property
    def num_proven(self) -> int:
        """Number of channels whose mask is proven."""
        return int(proven_channels(self.known.mask).sum())

    @property
    def is_proven(self) -> bool:
        """Return whether all masks are proven."""
        return self.num_proven == self.num_channels

    @property
    def is_settled(self) -> bool:
        """Return whether no further mask can be proven."""
        return self.evidence is None or self.is_proven

    @property
    def is_doubtful(self) -> bool:
        """Return whether there is evidence that could prove masks, but none is proven."""
        return self.evidence is not None and not self.num_proven

    @cached_property
    def equations(self) -> MaskEquations:
        """The equations that the proven masks, and the layer behind them, give for the input."""
        return MaskEquations.of(self.before, self.link, self.known, self._own(), self.behind)

    def _own(self) -> Whitened | None:
        """Return the equations from the weight gradient of the channels with proven masks.

        These are mostly fewer than the unknowns. It is ``None`` if there are none.
        """
        if self.evidence is None or not self.num_proven:
            return None
        errors = torch.where(self.known.mask.on, self.evidence.errors, 0.0)
        matrix, right = self.link.equations(
            errors.reshape(1, *self.link.output_shape), proven_channels(self.known.mask)
        )
        stated = Whitened.by_gram(matrix, right, self.negligible)
        return stated.faded(self.noise) if stated.num_equations else None

    def refine(self, inputs: Tensor) -> "Hidden":
        """Return the same ReLUs with the masks that a candidate input (1, *shape) proves."""
        if self.evidence is None or self.is_proven:
            return self
        features = features_of(self.before, inputs)
        z = self.link.preactivation(features).reshape(self.known.values.shape)
        known = self.search.refine(self.evidence, self.known, z, self.link.patches(features))
        found = replace(self, known=known)
        # Only proven masks enter the equations: without a new proof, nothing has changed.
        return self if found.num_proven == self.num_proven else found
