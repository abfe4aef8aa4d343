"""Attack the kept observations of a run on several machines, and merge the results.

Each machine has a copy of the run folder, or reaches the same one, and attacks its share of the
targets. A share (shard) is a folder of files with the results of finished targets. The name of a
file is a digest of everything that its result depends on, code and versions included, so that a
file of another run is never taken.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flwr_leakage.attacks.base import ProgressCallback, failure
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.parallel import Parallel, finished_name, read_finished
from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.audit.later import FINISHED, KEPT, KeptRun, attack_kept, walk
from flwr_leakage.audit.progress import Progress, SilentProgress
from flwr_leakage.audit.truth import UNREADABLE
from flwr_leakage.records import Reconstruction
from flwr_leakage.tracking import CompositeTracker
from flwr_leakage.tracking.jsonl import make_private_folder, write_private
from flwr_leakage.untrusted import MAX_JSON_BYTES, MAX_TENSORS_BYTES, inside, parse_json, read_file

SHARDS = "shards"
"""The name of the folder, in the folder ``kept`` of a run, in which the folders of shares lie."""

MANIFEST = "shard.json"
"""The name of the file, in the folder of a share, that tells which share it is. The file is written
once all of the share's targets are attacked.
"""

FORMAT = "flwr-leakage shard, version 1"
"""The value of ``format`` in the file ``shard.json`` of a share. A file with another value is
refused.
"""


@dataclass(frozen=True)
class Shard:
    """One of several shares into which the targets of a run are divided.

    Attributes:
        index: the number of this share, from 1.
        of: the number of all shares.
    """

    index: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.of:
            raise ValueError(
                f"a shard must be one of 1/{self.of} … {self.of}/{self.of}, got {self}."
            )

    @staticmethod
    def parse(text: str) -> "Shard":
        """Return the share that a text such as ``3/16`` names.

        Raises:
            ValueError: the text names no share.
        """
        found = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text)
        if found is None:
            raise ValueError(f"a shard must be given as i/n, such as 3/16, got {text!r}.")
        return Shard(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def owner(self, server_round: int, number: int) -> "Shard":
        """Return the share to which a round's chunk of targets belongs.

        Chunk ``number``, from 0, of round r belongs to share (r + number) mod n + 1 of n. A chunk
        holds the targets that are attacked together. In a round, the numbers of chunks of two
        shares differ by at most one, and each round begins with another share.
        """
        return Shard((server_round + number) % self.of + 1, self.of)


def attack_shard(
    run: KeptRun, shard: Shard, folder: Path | None = None, workers: int | RayTasks = 1
) -> int:
    """Attack one share of a run's kept observations, and return its number of chunks of targets.

    The process may be killed at any moment and the function called again; ``merge_shards`` records
    the results later.

    Args:
        run: the run with the folder ``kept``, which is only read.
        shard: the share that this machine attacks.
        folder: the folder for the results; by default ``kept/shards/i-of-n`` in the run's folder.
        workers: the number of attacking processes, or the resources of a task on a Ray cluster.

    Raises:
        ValueError: there is no attack, nothing was kept, a file cannot be read, a client's
            normalisation is not known, or the attack's code cannot be identified, by which results
            are told apart.
    """
    name = f"{shard.index}-of-{shard.of}"
    place = folder or inside(run.folder, f"{KEPT}/{SHARDS}/{name}")
    share = _Share(run.chunk, shard, workers, str(place / FINISHED))
    for part in (place.parent, place):
        make_private_folder(part)
    (place / MANIFEST).unlink(missing_ok=True)
    share.see(run)
    told = f'{{"format": "{FORMAT}", "index": {shard.index}, "of": {shard.of}}}\n'
    write_private(place / MANIFEST, told.encode())
    return len(share.chunks)


def merge_shards(run: KeptRun, shards: Sequence[Path] = ()) -> int:
    """Record the results of all shares, and return the number of rounds that this completed.

    The records are those that ``attack_kept`` would have made on one machine. Nothing is attacked,
    and a second call records nothing twice. ``shards`` are the folders of all shares, by default
    those in ``kept/shards`` of the run's folder.

    Raises:
        ValueError: a share is missing, is not finished, lacks targets, or belongs to another run,
            division, attack or version; or one of the reasons of ``attack_kept``.
    """
    places = _places(run, shards)
    found = {shard: place / FINISHED for shard, place in places.items()}
    share = _Share(run.chunk, next(iter(found)))
    share.see(run)
    lacking: Counter[Shard] = Counter()
    wanted: Counter[Shard] = Counter()
    copies: list[tuple[Path, Path]] = []
    for chunk in share.chunks:
        own, theirs = run.finished / chunk.name, found[chunk.shard] / chunk.name
        wanted[chunk.shard] += 1
        if read_finished(own, chunk.count) is not None:
            continue
        if read_finished(theirs, chunk.count) is None:
            lacking[chunk.shard] += 1
        copies.append((theirs, own))
    for shard, count in sorted(lacking.items(), key=lambda pair: pair[0].index):
        hint = (
            "it is of another run, or was attacked with other settings, or by another version of "
            "this package, Python, torch or the model's code"
            if count == wanted[shard]
            else f"call it again: attack-kept --shard {shard}"
        )
        raise ValueError(f"shard {shard} lacks {count} of its {wanted[shard]} targets: {hint}.")
    for part in (run.finished.parent, run.finished):
        make_private_folder(part)
    for theirs, own in copies:
        write_private(own, read_file(theirs, MAX_TENSORS_BYTES))
    return attack_kept(run)


def _places(run: KeptRun, shards: Sequence[Path]) -> dict[Shard, Path]:
    """Return the folder of each share, after checking that all shares of one division are there.

    ``shards`` are the given folders; without any, those in the run's ``kept/shards`` are used.
    """
    usual = inside(run.folder, f"{KEPT}/{SHARDS}")
    given = list(shards) or [path for path in sorted(usual.glob("*-of-*")) if not path.is_symlink()]
    if not given:
        raise ValueError(
            f"expected shards in {usual}, got none: attack-kept --shard i/n makes them."
        )
    places: dict[Shard, Path] = {}
    for place in given:
        shard = _read_manifest(place)
        if shard in places:
            raise ValueError(f"shard {shard} must be given once, got {places[shard]} and {place}.")
        places[shard] = place
    divisions = sorted({shard.of for shard in places})
    if len(divisions) > 1:
        raise ValueError(f"shards must be of one division, got some of {divisions} shards.")
    (of,) = divisions
    missing = [str(each) for i in range(of) if (each := Shard(i + 1, of)) not in places]
    if missing:
        shown = ", ".join(missing[:5]) + (", …" if len(missing) > 5 else "")
        raise ValueError(f"all {of} shards must be there, got {len(places)}; missing: {shown}.")
    return places


def _read_manifest(place: Path) -> Shard:
    try:
        told = parse_json(read_file(place / MANIFEST, MAX_JSON_BYTES))
        if told["format"] != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}, got {str(told['format'])[:100]!r}.")
        index, of = told["index"], told["of"]
        if type(index) is not int or type(of) is not int or of >= 10**6:
            raise ValueError("index and of must be integers.")
        return Shard(index, of)
    except FileNotFoundError as error:
        raise ValueError(f"{place} has no {MANIFEST}: it is no shard, or has not ended.") from error
    except UNREADABLE as error:
        raise ValueError(f"{place / MANIFEST} cannot be read: {error}") from error


@dataclass(frozen=True)
class _Chunk:
    """A chunk of targets that are attacked together.

    Attributes:
        shard: the share to which the chunk belongs.
        name: the name of the file with its results.
        count: the number of its targets.
    """

    shard: Shard
    name: str
    count: int


@dataclass
class _Share:
    """A stand-in for an attack that attacks the targets of one share, or only lists all chunks.

    Attributes:
        chunk: the number of targets that are attacked together.
        shard: the share whose targets are attacked. Without a folder, only the number of all shares
            is used.
        workers: the number of attacking processes, or the resources of a task on a Ray cluster.
        folder: the folder of the results; ``None`` attacks nothing.
        chunks: the chunks found so far: those of the share, or without a folder those of all
            shares.
    """

    chunk: int
    shard: Shard
    workers: int | RayTasks = 1
    folder: str | None = None
    chunks: list[_Chunk] = field(default_factory=list)

    def see(self, run: KeptRun) -> None:
        """Go through the kept rounds of a run, and collect their chunks of targets in ``chunks``.

        With a folder, the chunks of this share are attacked.
        """
        audit, disclosed = run.audit(CompositeTracker([]))
        assert audit.attack is not None
        audit.evaluator, audit.progress = None, _StatusOnly(audit.progress)
        self._parallel = Parallel(audit.attack, self.workers, self.chunk, self.folder)
        self._problem: Exception | None = None
        self._number = 0  # number of the next chunk in its round
        for _ in walk(run, audit, disclosed, self):
            if self._problem is not None:
                raise ValueError(
                    f"nothing tells finished targets from others: {self._problem}"
                ) from self._problem
            self._number = 0

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Attack the targets of a job that belong to the share; the answers of other targets are
        failures.
        """
        answers = [failure("another shard's") for _ in job.observations]
        mine: list[int] = []
        for indices in self._parallel.chunks(job):
            server_round, number = job.observations[indices[0]].server_round, self._number
            self._number += 1
            owner = self.shard.owner(server_round, number)
            if self.folder is not None and owner != self.shard:
                continue
            try:
                name = finished_name(self._parallel.attack, job.take(indices))
            except Exception as error:  # pickling or the model may raise any error
                self._problem = error
                return answers
            self.chunks.append(_Chunk(owner, name, len(indices)))
            mine += indices
        if self.folder is not None and mine:
            found = self._parallel(job.take(mine), progress)
            for index, answer in zip(mine, found, strict=True):
                answers[index] = answer
        return answers


@dataclass
class _StatusOnly(SilentProgress):
    """A display that shows the status and no lines, as ``merge_shards`` will show the lines."""

    progress: Progress

    def status(self, text: str) -> None:
        """Show a text as the current status, which the next status replaces."""
        self.progress.status(text)

    def close(self) -> None:
        """Remove the status."""
        self.progress.close()
