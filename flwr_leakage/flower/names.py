"""Find the client id of a Flower node.

The server knows a reply's node id. The partition id, which a client names in the note beside its
update, is only a claim.
"""

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from flwr_leakage.measurements import MAX_CLIENT


@dataclass
class ClientNames:
    """A table of the client ids that nodes claim, as far as the claims do not contradict each
    other.

    A claim only decides under which client id results are recorded, and with which client's samples
    they are compared. It never decides whose update is aggregated. A node without an undisputed
    claim has its node id as client id.

    Attributes:
        mentioned: the ids of nodes about which an event was recorded before their client id was
            known.
    """

    mentioned: set[int] = field(default_factory=set)
    _client_of: dict[int, int] = field(default_factory=dict)

    def of(self, node_id: int) -> int:
        """Return the client id of a node, or its node id if it has no undisputed claim."""
        return self._client_of.get(node_id, node_id)

    def told(self, node_id: int) -> str:
        """Return words for a node: ``node 7``, or ``node 7 (client 2)`` if its client id is
        known.
        """
        known = self.of(node_id)
        return f"node {node_id}" if known == node_id else f"node {node_id} (client {known})"

    @property
    def known(self) -> Set[int]:
        """Return the ids of the nodes whose claim is undisputed."""
        return self._client_of.keys()

    def learn(self, claims: Mapping[int, int]) -> dict[int, str]:
        """Learn the client ids that nodes claim, and return why claims are not believed.

        ``claims`` are client ids by node id; the result are the reasons by node id. The first node
        that claims an id keeps it. If several nodes first claim an id in the same round, none of
        them gets it, as nothing tells which is right.
        """
        holders = {client: node for node, client in self._client_of.items()}
        firsts = Counter(claim for node, claim in claims.items() if node not in self._client_of)
        disputed = {}
        for node, claim in claims.items():
            known, holder = self._client_of.get(node), holders.get(claim)
            if known is not None and known != claim:
                disputed[node] = f"it is client {known}, and now says it is client {claim}"
            elif holder is not None and holder != node:
                is_gone = holder not in claims
                why = ", which is silent now: a SuperNode that is restarted has another node id"
                said = f"it says it is client {claim}, as node {holder} did before"
                disputed[node] = said + why * is_gone
            elif claim > MAX_CLIENT and claim != node:
                disputed[node] = f"it says it is client {claim}, which may be another node's id"
            elif known is None and firsts[claim] > 1:
                disputed[node] = f"it says it is client {claim}, and so do others"
            elif claim != node and (claim in claims or claim in self._client_of):
                disputed[node] = f"it says it is client {claim}, which is another node's id"
            else:
                self._client_of[node] = claim
        return disputed
