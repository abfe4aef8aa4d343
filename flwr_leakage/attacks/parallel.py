"""Any attack over worker processes, with finished targets kept on disk."""

import hashlib
import math
import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flwr_leakage.attacks.base import Attack, AttackProgress, ProgressCallback, failure
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, InputSpec, Observation, Reconstruction, ThreatModel

Results = list[Reconstruction]


@dataclass(frozen=True)
class Parallel:
    """Attack targets in chunks, each in one of several processes of one thread.

    Chunks and their random draws depend on the targets alone, so results are the same for any
    number of workers. With a folder, every finished chunk is kept in a file named after a digest
    of all that the result depends on; a call that was interrupted and is made again goes on where
    it stopped. Workers are started afresh (``spawn``), so a script that uses them needs
    ``if __name__ == "__main__":``.

    Attributes:
        attack: the attack of each chunk.
        workers: processes, ≥ 1; 1 stays in this one.
        chunk: targets attacked together, ≥ 1.
        folder: where finished chunks are kept, or ``None``.
    """

    attack: Attack
    workers: int = 1
    chunk: int = 16
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def __call__(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        observations: Sequence[Observation],
        threat: ThreatModel,
        generator: torch.Generator,
        progress: ProgressCallback | None = None,
    ) -> Results:
        """Attack all observations; see :class:`flwr_leakage.attacks.base.Attack`.

        Raises:
            ValueError: several workers, and a model, loss or attack that cannot be pickled.
            KeyboardInterrupt: as it came; finished chunks are in the folder.
        """
        seed = int(torch.randint(2**31, (), generator=generator))
        jobs = [
            _Job(
                self.attack,
                gradient_map,
                spec,
                observations[begin : begin + self.chunk],
                threat,
                seed,
            )
            for begin in range(0, len(observations), self.chunk)
        ]
        files = [Path(self.folder) / f"{_digest(job)}.pt" if self.folder else None for job in jobs]
        results = [_load(file) for file in files]
        missing = [i for i, found in enumerate(results) if found is None]
        done = sum(len(found) for found in results if found is not None)
        run = self._in_processes if self.workers > 1 and len(missing) > 1 else self._in_turn
        for index, found in run(jobs, missing, done, len(observations), progress):
            results[index] = found
            _save(found, files[index])
        return [result for found in results if found is not None for result in found]

    def _in_turn(
        self,
        jobs: "list[_Job]",
        missing: list[int],
        done: int,
        total: int,
        progress: ProgressCallback | None,
    ) -> Iterator[tuple[int, Results]]:
        for index in missing:
            yield index, jobs[index](_shifted(progress, done, total))
            done += len(jobs[index].observations)

    def _in_processes(
        self,
        jobs: "list[_Job]",
        missing: list[int],
        done: int,
        total: int,
        progress: ProgressCallback | None,
    ) -> Iterator[tuple[int, Results]]:
        broken = []
        pool = _pool(min(self.workers, len(missing)))
        try:
            futures: dict[Future[bytes], int] = {
                pool.submit(_work, jobs[index].to_bytes()): index for index in missing
            }
            for future in as_completed(futures):
                index = futures[future]
                try:
                    found: Results = pickle.loads(future.result())
                except BrokenProcessPool:
                    broken.append(index)
                    continue
                yield index, found
                done += len(found)
                if progress is not None:
                    objectives = [r.objective for r in found if math.isfinite(r.objective)]
                    mean = sum(objectives) / len(objectives) if objectives else math.nan
                    progress(AttackProgress(done, total, done, total, mean))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        # One that dies takes the pool with it: alone, each shows whether it was to blame.
        for index in broken:
            with _pool(1) as alone:
                try:
                    yield index, pickle.loads(alone.submit(_work, jobs[index].to_bytes()).result())
                except BrokenProcessPool:
                    reason = "the worker process died, most likely as it ran out of memory."
                    yield index, [failure(reason) for _ in jobs[index].observations]


@dataclass(frozen=True)
class _Job:
    """One chunk: all that its result depends on."""

    attack: Attack
    gradient_map: GradientMap
    spec: InputSpec
    observations: Sequence[Observation]
    threat: ThreatModel
    seed: int

    def __call__(self, progress: ProgressCallback | None = None) -> Results:
        generator = torch.Generator().manual_seed(self.seed)
        try:
            return self.attack(
                self.gradient_map, self.spec, self.observations, self.threat, generator, progress
            )
        except Exception as error:  # whatever a chunk does, the others go on
            return [failure(f"{type(error).__name__}: {error}") for _ in self.observations]

    def to_bytes(self) -> bytes:
        # Not through the pool's own queue, which hands tensors on as open files.
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"workers > 1 need a model, a loss and an attack that can be pickled: {error}"
            ) from error


def _work(job: bytes) -> bytes:
    return pickle.dumps(pickle.loads(job)())


def _pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,))


def _shifted(
    progress: ProgressCallback | None, done: int, total: int
) -> Callable[[AttackProgress], None] | None:
    if progress is None:
        return None

    def tell(p: AttackProgress) -> None:
        progress(AttackProgress(done + p.done, total, p.iteration, p.iterations, p.objective))

    return tell


def _save(results: Results, file: Path | None) -> None:
    """Write results as plain tensors and numbers, for their owner only; whole, or not at all."""
    if file is None:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    plain = [
        {
            "inputs": r.batch.inputs if r.batch else None,
            "targets": r.batch.targets if r.batch else None,
            "objective": r.objective,
            "stats": r.stats,
            "error": r.error,
        }
        for r in results
    ]
    partial = file.with_suffix(".partial")
    partial.touch(mode=0o600)
    torch.save(plain, partial)
    partial.replace(file)


def _load(file: Path | None) -> Results | None:
    if file is None or not file.exists():
        return None
    return [
        Reconstruction(
            None if entry["inputs"] is None else Batch(entry["inputs"], entry["targets"]),
            entry["objective"],
            entry["stats"],
            entry["error"],
        )
        for entry in torch.load(file, weights_only=True)
    ]


def _digest(job: _Job) -> str:
    """SHA-256 of a job: settings by name and value, tensors by their bytes."""
    state = hashlib.sha256()
    for part in _flatten(job):
        state.update(part if isinstance(part, bytes) else part.encode())
        state.update(b"\0")
    return state.hexdigest()


def _flatten(value: Any) -> Iterator[str | bytes]:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().reshape(-1).contiguous()
        yield f"{value.dtype} {tuple(value.shape)}"
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, GradientMap):
        yield f"{value.model} {value.batch_norm}"
        yield from _flatten([value.loss, value.model.state_dict()])
    elif isinstance(value, nn.Module):
        yield str(value)
        yield from _flatten(value.state_dict())
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__
        for field in fields(value):
            yield field.name
            yield from _flatten(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield repr(key)
            yield from _flatten(entry)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} entries"
        for entry in value:
            yield from _flatten(entry)
    elif callable(value) and hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        yield repr(value)
