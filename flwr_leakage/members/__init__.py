"""Test whether given records were among the samples behind an update (membership inference), for
each record, client and round.
"""

from flwr_leakage.members.one_run import one_run_epsilon
from flwr_leakage.members.own_records import OwnRecords
from flwr_leakage.members.participation import Attribution, attribute
from flwr_leakage.members.verdict import Evidence, Membership, Records, examine_observation

__all__ = [
    "Attribution",
    "Evidence",
    "Membership",
    "OwnRecords",
    "Records",
    "attribute",
    "examine_observation",
    "one_run_epsilon",
]
