"""Was this record in the update? A test of membership by record, client and round."""

from flwr_leakage.members.layers import LayerSpan, find_spans, leftovers
from flwr_leakage.members.observed import Records, examine_observation
from flwr_leakage.members.one_run import one_run_epsilon
from flwr_leakage.members.own_records import OwnRecords
from flwr_leakage.members.p_values import (
    benjamini_hochberg,
    fisher,
    holm,
    rank_p_values,
    tail_p_values,
)
from flwr_leakage.members.participation import (
    Attribution,
    attribute,
    participation_contrasts,
)
from flwr_leakage.members.rehearsal import Rehearsal, rehearse
from flwr_leakage.members.row_space import RowSpace
from flwr_leakage.members.statistics import (
    against_others,
    gradient_cosine,
    gradient_difference,
    gradient_norms,
    gradient_products,
    losses,
)
from flwr_leakage.members.verdict import STATISTICS, Evidence, Membership, examine

__all__ = [
    "STATISTICS",
    "Attribution",
    "Evidence",
    "LayerSpan",
    "Membership",
    "OwnRecords",
    "Records",
    "Rehearsal",
    "RowSpace",
    "against_others",
    "attribute",
    "benjamini_hochberg",
    "examine",
    "examine_observation",
    "find_spans",
    "fisher",
    "gradient_cosine",
    "gradient_difference",
    "gradient_norms",
    "gradient_products",
    "holm",
    "leftovers",
    "losses",
    "one_run_epsilon",
    "participation_contrasts",
    "rank_p_values",
    "rehearse",
    "tail_p_values",
]
