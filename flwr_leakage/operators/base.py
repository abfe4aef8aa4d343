"""Define the interface of linear operators: S independent maps with exact products both ways."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.operators.budget import Meter


@dataclass
class Tally:
    """The number of products that an operator, and all that its ``narrow`` returned, have taken."""

    products: int = 0


class LinearOperator(ABC):
    """S independent linear maps A_s ∈ R^{P×N}, applied together.

    Papers write J = A_sᵀ ∈ R^{N×P}, so that a product with their JJᵀ is the method ``gram``. If the
    maps are small, all S products of a call cost about as much as one.

    Args:
        num_blocks: the number S of maps.
        num_inputs: the number N of a map's inputs.
        num_outputs: the number P of a map's outputs.
        like: a tensor whose dtype and device the operator uses.
        meter: the meter that counts the products of all S maps, and stops them when a budget is
            spent.
        rounding: (S,) the norm of a product's rounding error, relative to the operator's norm; 16
            units in the last place by default.
    """

    def __init__(
        self,
        num_blocks: int,
        num_inputs: int,
        num_outputs: int,
        like: Tensor,
        meter: Meter | None = None,
        rounding: Float[Tensor, " S"] | None = None,
    ) -> None:
        if rounding is None:
            unit = 16 * torch.finfo(like.dtype).eps
            rounding = torch.full((num_blocks,), unit, dtype=torch.float64)
        self.rounding = rounding
        self.num_blocks = num_blocks
        self.num_inputs = num_inputs
        self.num_outputs = num_outputs
        self.dtype = like.dtype
        self.device = like.device
        self.meter = Meter() if meter is None else meter
        self.tally = Tally()
        self.samples_a_product = 1
        """Number of products with a single sample's Jacobian that one product of a map costs."""

    @property
    def products(self) -> int:
        """Return the number of products so far, including those of operators that ``narrow`` has
        returned. A product of all S maps counts once here, and S times for the ``meter``.
        """
        return self.tally.products

    @abstractmethod
    def _matvec(self, vectors: Tensor) -> Tensor: ...

    @abstractmethod
    def _rmatvec(self, vectors: Tensor) -> Tensor: ...

    def matvec(self, vectors: Float[Tensor, "S N"]) -> Float[Tensor, "S P"]:
        """Return the product A_s v_s for each map A_s and its row v_s of ``vectors``."""
        self._count(vectors, self.num_inputs)
        return self._matvec(vectors)

    def rmatvec(self, vectors: Float[Tensor, "S P"]) -> Float[Tensor, "S N"]:
        """Return the product A_sᵀ u_s for each map A_s and its row u_s of ``vectors``."""
        self._count(vectors, self.num_outputs)
        return self._rmatvec(vectors)

    def gram(self, vectors: Float[Tensor, "S N"]) -> Float[Tensor, "S N"]:
        """Return A_sᵀ A_s v_s for each map A_s and its row v_s of ``vectors``, by two products.

        Papers write JJᵀv for it.
        """
        return self.rmatvec(self.matvec(vectors))

    def narrow(self, rows: Int[Tensor, " R"]) -> "LinearOperator":
        """Return the operator of some of the S maps, whose products alone the meter counts.

        Args:
            rows: the indices of the maps, ascending.
        """
        return _Rows(self, rows)

    def to_dense(self) -> Float[Tensor, "S P N"]:
        """Return every map A_s as a matrix (P, N), computed by N products."""
        dense = torch.empty(
            self.num_blocks, self.num_outputs, self.num_inputs, dtype=self.dtype, device=self.device
        )
        for column in range(self.num_inputs):
            dense[:, :, column] = self.matvec(self.unit(column))
        return dense

    def unit(self, column: int) -> Float[Tensor, "S N"]:
        """Return the unit vector of input ``column`` for every map, as rows (S, N)."""
        unit = torch.zeros(self.num_blocks, self.num_inputs, dtype=self.dtype, device=self.device)
        unit[:, column] = 1
        return unit

    def _count(self, vectors: Tensor, length: int) -> None:
        if vectors.shape != (self.num_blocks, length):
            raise ValueError(
                f"vectors must have shape ({self.num_blocks}, {length}), got "
                f"{tuple(vectors.shape)}."
            )
        self.meter.spend(self.num_blocks * self.samples_a_product)
        self.tally.products += 1


class _Rows(LinearOperator):
    """The operator of some of the maps of another operator, the whole, which computes all products.

    The whole operator gets zero vectors for the maps that were not chosen, and the results of these
    maps are dropped.
    """

    def __init__(self, operator: LinearOperator, rows: Int[Tensor, " R"]) -> None:
        like = torch.empty(0, dtype=operator.dtype, device=operator.device)
        shape = len(rows), operator.num_inputs, operator.num_outputs
        super().__init__(*shape, like, operator.meter, operator.rounding[rows])
        self.tally = operator.tally
        self._operator = operator
        self._rows = rows

    def _matvec(self, vectors: Tensor) -> Tensor:
        return self._operator._matvec(self._embed(vectors))[self._rows]

    def _rmatvec(self, vectors: Tensor) -> Tensor:
        return self._operator._rmatvec(self._embed(vectors))[self._rows]

    def _embed(self, vectors: Tensor) -> Tensor:
        full = vectors.new_zeros(self._operator.num_blocks, vectors.shape[1])
        full[self._rows] = vectors
        return full

    def narrow(self, rows: Int[Tensor, " R"]) -> LinearOperator:
        return self._operator.narrow(self._rows[rows])


REBUILT_AFTER = 4
"""Number of products with all samples after which a ``DeferredRows`` builds autograd graphs of its
own samples alone. Building these costs about as much as this number of products."""


class DeferredRows(LinearOperator):
    """The operator of some maps of another operator, the whole, built anew after four products.

    The first four (``REBUILT_AFTER``) are computed by the whole operator, with zeros for the maps
    that were not chosen. This is cheaper than a new operator if few products follow.

    Args:
        whole: the whole operator, which is kept until the new one is built.
        build: a function from indices of maps to a new operator of these maps alone.
        rows: the indices of the maps, ascending.
    """

    def __init__(
        self,
        whole: LinearOperator,
        build: Callable[[Int[Tensor, " R"]], LinearOperator],
        rows: Int[Tensor, " R"],
    ) -> None:
        like = torch.empty(0, dtype=whole.dtype, device=whole.device)
        shape = len(rows), whole.num_inputs, whole.num_outputs
        super().__init__(*shape, like, whole.meter, whole.rounding[rows])
        self.tally = whole.tally
        self._build = build
        self._rows = rows
        self._taken = 0
        self._operator: LinearOperator = _Rows(whole, rows)

    def _matvec(self, vectors: Tensor) -> Tensor:
        return self._now()._matvec(vectors)

    def _rmatvec(self, vectors: Tensor) -> Tensor:
        return self._now()._rmatvec(vectors)

    def _now(self) -> LinearOperator:
        if self._taken == REBUILT_AFTER:
            self._operator = self._build(self._rows)
        self._taken += 1
        return self._operator

    def narrow(self, rows: Int[Tensor, " R"]) -> LinearOperator:
        """Return the operator of the maps with the indices ``rows`` alone.

        If these are at most half of this operator's maps, a new operator of them is built after a
        few products. Otherwise each product computes all maps, and selects these.
        """
        if 2 * len(rows) > self.num_blocks:
            return super().narrow(rows)
        build, own = self._build, self._rows
        return DeferredRows(self._operator, lambda r: build(own[r]), rows)
