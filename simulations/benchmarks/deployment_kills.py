"""A real deployment whose parts are killed and started again: what is left of run and record?

    python -m simulations.benchmarks.deployment_kills

The quickstart on a SuperLink with a database and two SuperNodes, which it knows by their keys
(``--enable-supernode-auth``, under TLS). When the first of three rounds is in the record, one part
gets SIGKILL, a SuperNode with its ClientApps, and is started again: a SuperNode, a ClientApp, the
ServerApp or the SuperLink. A run that the part ended is submitted once more. Told are the runs'
statuses, the rounds in the record, lines that cannot be read, and the report's size.
"""

import contextlib
import datetime
import ipaddress
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flwr_leakage.report import write_report
from flwr_leakage.tracking import read_run
from flwr_leakage.tracking.jsonl import RECORDS_FILE
from simulations.benchmarks import lab
from simulations.benchmarks.engines import (
    EXAMPLES,
    LIMIT,
    daemon,
    flwr,
    free_port,
    wait_for,
    wait_for_end,
)

Process = subprocess.Popen[bytes]
TLS = {
    "--ssl-ca-certfile": "cert.pem", "--ssl-certfile": "cert.pem", "--ssl-keyfile": "cert.key"
}  # fmt: skip


def write_keys(path: Path) -> None:
    """Write a SuperNode's private key, and its public key beside it."""
    key = ec.generate_private_key(ec.SECP384R1())
    openssh = serialization.PrivateFormat.OpenSSH
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, openssh, serialization.NoEncryption())
    )
    public = key.public_key()
    path.with_suffix(".pub").write_bytes(
        public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def write_certificate(folder: Path) -> None:
    """Write a certificate of this machine, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    (folder / "cert.key").write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))


class Federation:
    """A SuperLink and two SuperNodes with keys, below a folder.

    Args:
        folder: of logs, keys, the link's database and the run.
        stack: ends the processes.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self._stack, self._port = folder, stack, free_port()
        write_certificate(folder)
        (folder / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self._port}"\n'
            f'root-certificates = "{folder / "cert.pem"}"\n'
        )
        self.parts: dict[str, Process] = {}
        self.start("SuperLink")
        for number in range(2):
            write_keys(folder / f"key{number}")
            flwr(folder, "supernode", "register", str(folder / f"key{number}.pub"), "here")
            self.start(f"SuperNode {number}")

    def start(self, name: str) -> None:
        """Start a part, also once more."""
        kind, _, number = name.partition(" ")
        if kind == "SuperLink":
            arguments = ["--host", "127.0.0.1", "--port", str(self._port)]
            for option, file in TLS.items():
                arguments += [option, str(self.folder / file)]
            arguments += ["--disable-runtime-dependency-installation", "--enable-supernode-auth"]
            arguments += ["--database", str(self.folder / "state.db")]
            self._start(name, "flower-superlink", arguments)
            wait_for(self._port, self.parts[name])
            return
        arguments = ["--root-certificates", str(self.folder / "cert.pem")]
        arguments += ["--superlink", f"127.0.0.1:{self._port}"]
        arguments += ["--auth-supernode-private-key", str(self.folder / f"key{number}")]
        arguments += ["--port", str(free_port()), "--node-config"]
        arguments += [f"partition-id={number} num-partitions=2"]
        self._start(name, "flower-supernode", arguments)

    def _start(self, name: str, command: str, arguments: list[str]) -> None:
        self.parts[name] = self._stack.enter_context(daemon(command, arguments, self.folder))

    def start_until_taken(self, name: str) -> None:
        """Start a part once more, as a supervisor does, until it stays.

        A SuperLink takes a SuperNode's key for online until its heartbeat fails, and refuses
        another process with that key as long.
        """
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            self.start(name)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.parts[name].wait(30)
                continue
            return
        raise TimeoutError(f"{name} does not stay started")

    def submit(self) -> str:
        """Submit the run, and return its number."""
        told = flwr(
            self.folder, "run", str(EXAMPLES), "here", "--run-config", "num-server-rounds=3"
        )
        return str(told["run-id"])

    def kill(self, name: str) -> None:
        """End a part with its session, or an app that it started, once there is one."""
        part, _, app = name.partition("/")
        process = self.parts[part].pid
        end = time.monotonic() + LIMIT
        while not (found := [pid for pid in below(process) if not app or app in command(pid)]):
            if time.monotonic() > end:
                raise TimeoutError(f"{part} started no {app}")
            time.sleep(0.05)
        for pid in found:
            if app or os.getsid(pid) == process:  # a SuperLink's ServerApp has its own
                os.kill(pid, signal.SIGKILL)


def below(process: int) -> list[int]:
    """A process, and all that it and those started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(folder.name)] = int(fields[1])
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def command(process: int) -> str:
    """The command of a process; empty where it ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


def rounds_of(run: Path) -> int:
    """The last round in a record, so far."""
    if not (run / RECORDS_FILE).exists():
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return max((record.server_round for record in read_run(run).records), default=0)


def wait_for_round(number: int, run: Path) -> None:
    """Wait until a round is in the record."""
    end = time.monotonic() + LIMIT
    while rounds_of(run) < number:
        if time.monotonic() > end:
            raise TimeoutError(f"round {number} is not in the record after {LIMIT} s")
        time.sleep(0.2)


KILLED: dict[str, tuple[str, str]] = {
    "nothing": ("", ""),
    "a SuperNode": ("SuperNode 1", "SuperNode 1"),
    "a ClientApp": ("SuperNode 1/flwr-clientapp", ""),
    "the ServerApp": ("SuperLink/flwr-serverapp", ""),
    "the SuperLink": ("SuperLink", "SuperLink"),
}
"""Each part, or app that a part started, that is killed, and the part that is started again."""


def run_once(name: str, folder: Path, stack: contextlib.ExitStack) -> list[object]:
    """A line of the table."""
    killed, again = KILLED[name]
    began = time.monotonic()
    federation, run = Federation(folder, stack), folder / "run"
    number = federation.submit()
    if killed:
        wait_for_round(1, run)
        federation.kill(killed)
        if again:
            federation.start_until_taken(again)
    status = wait_for_end(folder, number)
    left = rounds_of(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torn = len(read_run(run).problems)
        report = write_report(run).stat().st_size // 1000
    second = "–"
    if not status.endswith("completed"):
        run.rename(folder / "first")
        second = wait_for_end(folder, federation.submit())
    return [name, status, left, torn, f"{report} kB", second, f"{time.monotonic() - began:.0f}"]


def main() -> None:
    """Print the table."""
    parser = lab.command(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(KILLED), default=list(KILLED))
    arguments = lab.start(parser)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no daemon is to outlive this command
    lab.print_header("killed", "status", "rounds", "torn", "report", "submitted again", "seconds")
    for name in arguments.only:
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary,
            contextlib.ExitStack() as stack,
        ):
            folder = Path(temporary)
            attempt: Callable[[], list[object]] = partial(run_once, name, folder, stack)
            try:
                lab.print_row(*attempt())
            except (RuntimeError, TimeoutError, subprocess.TimeoutExpired) as error:
                lab.print_row(name, f"failed: {error}"[:300], *"–––––")
                for log in folder.glob("*log"):
                    print(log.read_text()[-2000:], file=sys.stderr)


if __name__ == "__main__":
    main()
