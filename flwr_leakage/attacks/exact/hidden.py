"""The ReLUs of a layer while their masks are sought, and the equations of the proven ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from flwr_leakage.attacks.exact.chain import Link, features_of
from flwr_leakage.attacks.exact.layer_equations import Knowledge
from flwr_leakage.attacks.exact.mask_equations import MaskEquations
from flwr_leakage.attacks.exact.mask_values import Masks
from flwr_leakage.attacks.exact.masks import Evidence, MaskSearch
from flwr_leakage.attacks.exact.weight_equations import Whitened


@dataclass(frozen=True)
class OwnEquations:
    """The rule that turns the weight gradient of a layer with proven masks into equations.

    Only channels with a proven mask give equations, so that these are mostly fewer than the
    unknowns.

    Attributes:
        negligible: singular values below this share of the largest are left out, in [0, 1).
        noise: equations whose singular value is below this share of the largest lose weight, ≥ 0;
            see :meth:`Whitened.faded`.
    """

    negligible: float = 1e-6
    noise: float = 1e-4

    def __call__(self, link: Link, errors: Tensor, masks: Masks) -> Whitened | None:
        """Return the equations about the layer's input, or None if there are none.

        Args:
            link: the layer.
            errors: ∂L/∂(W ∗ a) (C, P) of its outputs, as if all ReLUs were active.
            masks: the masks of its ReLUs.
        """
        if not masks.num_proven:
            return None
        exact = (errors * masks.active).reshape(1, *link.output_shape)
        stated = Whitened.by_gram(*link.equations(exact, masks.certain), self.negligible)
        return stated.faded(self.noise) if stated.num_equations else None


@dataclass(frozen=True)
class Hidden:
    """The ReLUs of one layer, whose masks are sought.

    Attributes:
        before: the layers before that layer.
        link: the layer.
        behind: the outputs and equations of the next layer.
        evidence: the gradients that decide about the masks; ``None`` if the layer has no bias.
        masks: the current estimate of the masks.
        search: the settings of the search for masks.
        own: the rule for equations from the layer's own weight gradient.
    """

    before: Sequence[Link]
    link: Link
    behind: Knowledge
    evidence: Evidence | None
    masks: Masks
    search: MaskSearch
    own: OwnEquations

    @classmethod
    def begin(
        cls,
        before: Sequence[Link],
        link: Link,
        behind: Knowledge,
        search: MaskSearch,
        own: OwnEquations,
    ) -> "Hidden":
        """Return the ReLUs of a layer with the masks that are proven without a candidate.

        The arguments are the attributes of the same name.
        """
        if link.bias_gradient is None:
            return cls.unknown(before, link, behind, search, own)
        errors = behind.input_errors.reshape(link.num_channels, -1) * link.scale[:, None]
        evidence = Evidence(
            behind.equations.of_channels(link.num_channels),
            errors,
            link.bias_gradient,
            link.weight_gradient.flatten(1),
        )
        return cls(before, link, behind, evidence, search.begin(evidence), search, own)

    @classmethod
    def unknown(
        cls,
        before: Sequence[Link],
        link: Link,
        behind: Knowledge,
        search: MaskSearch,
        own: OwnEquations,
    ) -> "Hidden":
        """Return the ReLUs of a layer whose masks cannot be proven."""
        masks = Masks.unknown(link.num_channels, link.output_shape.numel() // link.num_channels)
        return cls(before, link, behind, None, masks, search, own)

    @property
    def num_proven(self) -> int:
        """Number of channels whose mask is proven."""
        return self.masks.num_proven

    @property
    def is_proven(self) -> bool:
        """Whether all masks are proven."""
        return bool(self.masks.certain.all())

    @property
    def is_settled(self) -> bool:
        """Whether no further mask can be proven."""
        return self.evidence is None or self.is_proven

    @property
    def is_doubtful(self) -> bool:
        """Whether there is evidence that could prove masks, but none is proven."""
        return self.evidence is not None and not self.num_proven

    @cached_property
    def equations(self) -> MaskEquations:
        """The equations that the proven masks, and the layer behind them, give for the input."""
        own = None
        if self.evidence is not None:
            own = self.own(self.link, self.evidence.errors, self.masks)
        return MaskEquations.of(self.before, self.link, self.masks, own, self.behind)

    def refine(self, inputs: Tensor) -> "Hidden":
        """Return the same ReLUs with the masks that a candidate input (1, *shape) proves."""
        if self.evidence is None or self.is_proven:
            return self
        features = features_of(self.before, inputs)
        z = self.link.preactivation(features).reshape(self.masks.active.shape)
        masks = self.search.refine(self.evidence, self.masks, z, self.link.patches(features))
        # Only proven masks enter the equations: without a new proof, nothing has changed.
        return self if masks.num_proven == self.num_proven else replace(self, masks=masks)
