"""Close a run's records and write its report even after SIGKILL or an abort of Ray."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WATCHER = """
import sys
if not sys.stdin.buffer.read():  # until the other end closes, in order or not
    from pathlib import Path
    from flwr_leakage.simulation.summary import close_broken_run
    close_broken_run(Path(sys.argv[1]), "it was not ended in order")
"""


@contextmanager
def closed_afterwards(run_dir: Path) -> Iterator[None]:
    """Let a second process close the run's records if this process dies within a ``with`` block.

    The second process imports nothing until this one dies, and is not reached by signals to this
    one's process group. If the block is left normally, it ends at once.
    """
    command = [sys.executable, "-c", _WATCHER, str(run_dir.resolve())]
    # No other child process inherits the pipe, so that it closes when this process ends.
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    try:
        yield
        watcher.stdin.write(b"done")
    finally:
        watcher.stdin.close()
    watcher.wait()
