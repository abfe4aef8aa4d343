"""The same audited app on four engines: are all numbers equal?

``python -m simulations.benchmarks.engines``: the quickstart with two clients, in this process, on
Ray, by ``flwr run`` on a simulation runtime, and by ``flwr run`` on a SuperLink with two
SuperNodes. Compared are digests of the final global arrays (names, shapes, bytes) and of all
records but the costs. ``flwr run`` itself exits with 0 where a run fails; here its status is read
from ``flwr ls``, and the exit code is 1 unless every run completed with equal digests.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flwr_leakage.flower import RayEngine, run_inline
from flwr_leakage.tracking import read_run
from simulations.benchmarks import lab

EXAMPLES = Path(__file__).parents[1] / "examples"
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RUN_CONFIG = {"num-server-rounds": 2}
LIMIT = 900
"""Seconds that a run may take."""
WIDTH = 16
"""Characters of a digest that are shown."""

Environment = dict[str, str]


def environment(folder: Path) -> Environment:
    """Of every process; the run folder is ``folder / "run"``."""
    return {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # Flower starts commands of its own
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "LEAKAGE_FOLDER": str(folder / "run"),
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def here(name: str, folder: Path) -> str:
    """Run the apps in a process of their own, without ``flwr run``; return how it ended."""
    command = [sys.executable, "-m", "simulations.benchmarks.engines", "--one", name]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            command, cwd=folder, env=environment(folder), stdout=log, stderr=log, timeout=LIMIT
        )
    return "completed" if done.returncode == 0 else f"exit code {done.returncode}"


def one(name: str) -> None:
    """Run the apps in this process, as ``LEAKAGE_FOLDER`` says."""
    from simulations.examples.quickstart import client_app, server_app

    engine: Callable[..., None] = run_inline if name == "inline" else RayEngine(num_cpus=2)
    engine(server_app.app, client_app.app, 2, RUN_CONFIG)


@contextlib.contextmanager
def daemon(name: str, arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Flower, in a folder without code, that ends with the block."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [str(BIN / name), *arguments], cwd=folder, env=environment(folder), stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def superlink(folder: Path, *, simulation: bool) -> str:
    """Start a SuperLink, submit the app, and wait for its end; return the run's status."""
    port = free_port()
    (folder / "config.toml").write_text(
        f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    arguments = ["--insecure", "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--disable-runtime-dependency-installation"]
    with contextlib.ExitStack() as stack:
        kind = ["--simulation"] if simulation else []
        link = stack.enter_context(daemon("flower-superlink", [*arguments, *kind], folder))
        wait_for(port, link)
        if not simulation:
            for partition in range(2):
                node = ["--insecure", "--superlink", f"127.0.0.1:{port}"]
                node += ["--port", str(free_port()), "--node-config"]
                node += [f"partition-id={partition} num-partitions=2"]
                stack.enter_context(daemon("flower-supernode", node, folder))
        # An override of the federation is part of the run, and known to a simulation only.
        size = ["--federation-config", "num-supernodes=2"] if simulation else []
        config = " ".join(f"{name}={value}" for name, value in RUN_CONFIG.items())
        told = flwr(
            folder, "run", str(EXAMPLES), "here", "--run-config", config, *size,
        )  # fmt: skip
        return wait_for_end(folder, str(told["run-id"]))


def flwr(folder: Path, *arguments: str) -> dict[str, object]:
    """Run Flower's command, and return what it says."""
    command = [str(BIN / "flwr"), *arguments, "--format", "json"]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=LIMIT
    )
    with contextlib.suppress(ValueError):
        said: dict[str, object] = json.loads(done.stdout[done.stdout.index("{") :])
        return said
    raise RuntimeError(f"{' '.join(command)} said {done.stdout + done.stderr}")


def wait_for_end(folder: Path, run_id: str) -> str:
    """The status of a run once it has ended, such as ``finished:completed``."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        said = flwr(folder, "ls", "here", "--run-id", run_id)
        runs = said.get("runs")
        status = str(runs[0]["status"]) if isinstance(runs, list) and runs else ""
        if status.startswith("finished"):
            return status
        time.sleep(5)
    return f"not finished after {LIMIT} s"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the process listens on the port."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the process ended with exit code {process.returncode}")
        time.sleep(1)
    raise TimeoutError(f"nothing listens on port {port} after {LIMIT} s")


def digests(folder: Path) -> tuple[str, str, int]:
    """Of the final global arrays, of the records but the costs, and the number of these."""
    arrays, records = hashlib.sha256(), hashlib.sha256()
    state = torch.load(folder / "final_model.pt", weights_only=True)
    for name, value in sorted(state.items()):
        arrays.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        arrays.update(value.numpy().tobytes())
    run = read_run(folder)
    rows = sorted(repr(record) for record in run.records if record.kind != "cost")
    rows += [f"{event.level}: {event.message}" for event in run.events]
    records.update("\n".join(rows).encode())
    return arrays.hexdigest()[:WIDTH], records.hexdigest()[:WIDTH], len(rows)


def main() -> None:
    """Print the table."""
    engines: dict[str, Callable[[Path], str]] = {
        "inline": lambda folder: here("inline", folder),
        "ray": lambda folder: here("ray", folder),
        "flwr run, simulation": lambda folder: superlink(folder, simulation=True),
        "SuperLink, 2 SuperNodes": lambda folder: superlink(folder, simulation=False),
    }
    parser = lab.command(__doc__)
    parser.add_argument("--engines", nargs="+", choices=list(engines), default=list(engines))
    parser.add_argument("--one", choices=["inline", "ray"], help="run the apps here")
    arguments = lab.start(parser)
    if arguments.one:
        one(arguments.one)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no daemon is to outlive this command
    lab.print_header("engine", "status", "seconds", "global arrays", "records", "how many")
    found = set()
    for name in arguments.engines:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary)
            start = time.monotonic()
            try:
                status = engines[name](folder)
            except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
                status = f"failed: {error}"
            seconds = time.monotonic() - start
            if not status.endswith("completed"):
                for log in folder.glob("*log"):
                    print(log.read_text()[-3000:], file=sys.stderr)
                lab.print_row(name, status, f"{seconds:.0f}", "–", "–", "–")
                found.add(name)
                continue
            arrays, records, count = digests(folder / "run")
            lab.print_row(name, status, f"{seconds:.0f}", arrays, records, count)
            found.add((arrays, records))
    sys.exit(0 if len(found) == 1 else 1)


if __name__ == "__main__":
    main()
