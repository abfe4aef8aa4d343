"""Share the samples that clients of a simulation captured with the server's evaluator, by a folder.

Clients and server of a simulation share a file system. The samples travel in no message: a client
on a real node writes them to its own disk, and nobody else reads them.
"""

from dataclasses import dataclass
from pathlib import Path

from flwr_leakage.audit import Truth
from flwr_leakage.tracking.jsonl import write_private


@dataclass(frozen=True)
class TruthFolder:
    """A folder with the samples that each client used in its latest round, created if it is
    missing.

    An evaluator on the server reads the samples from it, to measure how good an attack was.
    """

    path: Path

    def write(self, server_round: int, client_id: int, truth: Truth) -> None:
        """Write the samples that a client used in a round, and delete those of earlier rounds.

        Only the user who runs the client can read the file.
        """
        # The import is inside the method, as it needs packages of the extra ``server``.
        from flwr_leakage.audit.kept import truth_to_bytes

        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in self.path.glob(f"round-*-client-{client_id}.truth"):
            old.unlink()
        write_private(self._file(server_round, client_id), truth_to_bytes(truth))

    def __call__(self, server_round: int, client_id: int, num_examples: int) -> Truth:
        """Return the samples that a client trained on in a round; ``num_examples`` is not used.

        Raises:
            ValueError: the client wrote nothing in this round.
        """
        from flwr_leakage.audit.kept import read_truth

        path = self._file(server_round, client_id)
        if not path.exists():
            raise ValueError(f"client {client_id} left no samples of round {server_round}.")
        return read_truth(path)

    def _file(self, server_round: int, client_id: int) -> Path:
        return self.path / f"round-{server_round}-client-{client_id}.truth"
