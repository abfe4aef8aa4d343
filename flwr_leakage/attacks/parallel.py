"""Run any attack in worker processes or on a Ray cluster, and keep finished results in files.

Files are named by a digest of everything that a result depends on, so that a call that was
interrupted can continue.
"""

import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from flwr_leakage.attacks.base import Attack, AttackProgress, ProgressCallback, failure
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.records import Batch, InputSpec, Part, Reconstruction
from flwr_leakage.untrusted import open_tensors


def digest(attack: Attack, job: AttackJob) -> str:
    """Return the hexadecimal SHA-256 of everything that an attack's result on a job depends on.

    It covers the versions of Python and torch, the source files of this package, and the pickled
    attack and job: names of classes and functions, settings and tensors. Of other installed
    packages whose classes or functions are in them, it covers the version. If code of no installed
    package takes part, such as a user's model or loss, it covers all loaded source files of such
    code, and the gradient at two random inputs. The gradient shows changes that are in no file,
    such as the value of a global variable.

    Raises:
        Exception: the attack or the job cannot be pickled, a user's code is in no file, or the
            model fails at random inputs; the message names the cause.
    """
    modules: set[str] = set()
    parts = [f"{platform.python_version()} {torch.__version__}".encode()]
    parts.append(_pickled((attack, job), modules))
    own = {name for name in modules if not _version(name)}
    parts += [_version(name).encode() for name in sorted(modules - own)]
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    if own:
        loaded = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
        if missing := [name for name in sorted(own) if not loaded.get(name)]:
            raise ValueError(f"the code of {', '.join(missing)} is in no file")
        files += sorted(
            {Path(file) for name, file in loaded.items() if file and not _version(name)}
        )
        parts.append(_pickled(_gradient_at_random(job), modules))
    parts += [path.read_bytes() for path in files]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _pickled(value: object, modules: set[str]) -> bytes:
    """Return bytes that identify an object, and are the same in every process.

    The object is pickled, but with a hash of each tensor's values, and with each set's entries in
    the order of their bytes. The names of all its classes' and functions' modules go to
    ``modules``.
    """

    class Writer(pickle.Pickler):
        def persistent_id(self, part: Any) -> object:
            if isinstance(part, type | FunctionType | BuiltinFunctionType):
                modules.add(part.__module__ or "builtins")
            if isinstance(part, set | frozenset):
                return sorted(_pickled(entry, modules) for entry in part)
            if isinstance(part, Tensor):
                flat = part.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                data = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
                return f"{type(part)} {part.dtype} {part.shape} {part.requires_grad} {data}"
            return None

    written = io.BytesIO()
    writer = Writer(written)
    writer.fast = True  # without references to earlier objects, equal objects give equal bytes
    writer.dump(value)
    return written.getvalue()


def _gradient_at_random(job: AttackJob) -> dict[str, Tensor]:
    """Return the gradient of the loss, by parameter name, at two fixed random inputs and labels."""
    seen = job.observations[0]
    device = next(iter(seen.params.values())).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        targets = torch.randint(job.spec.num_classes, (2,))
        batch = Batch(torch.rand(2, *job.spec.shape), targets).to(device)
        return job.gradient_map(seen.params, batch, seen.buffers)


def _version(module: str) -> str:
    """Return the name and version of a module's installed package, or "" if it is not installed.

    For modules of Python itself and of this package, it is the name alone.
    """
    root = module.partition(".")[0]
    if root in (*sys.stdlib_module_names, "flwr_leakage"):
        return root
    package = sys.modules.get(root)
    places = Path(getattr(package, "__file__", None) or "").parts
    # A package in another folder does not count as installed, as its code may have been edited
    # under the same version.
    installed = {"site-packages", "dist-packages"} & {*places}
    return f"{root} {vars(package).get('__version__')}" if package and installed else ""


Results = list[Reconstruction]

_TENSOR = "_tensor_"
"""The key under which a file of results names a tensor in the place of its numbers."""

RETRIED = "retried"
"""The key, in the stats of a result, of the reasons why the task that computed it was tried again.
The key is absent if the task was run once."""


@dataclass(frozen=True)
class Parallel:
    """An attack that splits the observations of a job into chunks, and attacks these in parallel.

    Each chunk runs in one of several processes of one thread, or as a Ray task. Chunks and their
    random draws depend on the observations alone, so that results are the same for any number of
    workers. With a folder, every finished chunk is kept in a file. Its name is a digest of
    everything that the result depends on, including code (:func:`digest`). So if an interrupted
    call is made again, it continues. If the digest cannot be computed, a warning says so, and
    nothing is kept. Workers are new processes (``forkserver``), so that a script that uses them
    needs ``if __name__ == "__main__":``.

    Attributes:
        attack: the attack that is run on each chunk.
        workers: number of processes, ≥ 1; with 1 the attack runs in this process. ``RayTasks``
            instead sends each chunk to a Ray cluster, with the same results. If a worker or node of
            the cluster dies, its chunk is tried again, and ``stats["retried"]`` of the chunk's
            results says so.
        chunk: number of observations that are attacked together, ≥ 1.
        folder: the folder for finished chunks, or ``None`` to keep none.
    """

    attack: Attack
    workers: int | RayTasks = 1
    chunk: int = 16
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "chunk"):
            value = getattr(self, name)
            if not isinstance(value, RayTasks) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")

    def __call__(self, job: AttackJob, progress: ProgressCallback | None = None) -> Results:
        """Return one reconstruction of the private samples for each observed update of a job.

        Raises:
            ValueError: there are several workers, and the model, loss or attack cannot be pickled;
                or Ray has no place for a task, see ``RayTasks``.
            KeyboardInterrupt: the user interrupted the call; finished chunks are in the folder.
        """
        chunks = [_Chunk(self.attack, job.take(indices)) for indices in self.chunks(job)]
        files = self._files(chunks)
        results = [
            read_finished(file, len(chunk.job.observations))
            for file, chunk in zip(files, chunks, strict=True)
        ]
        missing = [i for i, found in enumerate(results) if found is None]
        done = sum(len(found) for found in results if found is not None)
        total = len(job.observations)
        if isinstance(self.workers, RayTasks):
            run = self._on_ray(chunks, missing)
        elif self.workers > 1 and len(missing) > 1:
            run = self._in_processes(chunks, missing)
        else:
            run, progress = self._in_turn(chunks, missing, done, total, progress), None
        for index, found in run:
            results[index] = found
            _save(found, files[index])
            done += len(found)
            _tell(progress, done, total, found)
        return [result for found in results if found is not None for result in found]

    def chunks(self, job: AttackJob) -> list[list[int]]:
        """Return the chunks into which a job is split, as lists of indices of its observations."""
        indices = torch.arange(len(job.observations))
        return [several.tolist() for several in indices.split(self.chunk) if len(several)]

    def _files(self, chunks: "list[_Chunk]") -> list[Path | None]:
        """Return for each chunk the path of the file for its results, or ``None`` to keep none.

        A chunk is an attack on some of a job's observations. The name of its file is a digest of
        everything that the results depend on.
        """
        if self.folder is None:
            return [None] * len(chunks)
        try:
            names = [finished_name(chunk.attack, chunk.job) for chunk in chunks]
        except Exception as error:  # pickling and the user's model may raise any error
            warnings.warn(
                f"No finished attack is kept in {self.folder} or read from it, as nothing tells "
                f"this call from others: {str(error).rstrip('.')}. If it is interrupted, it starts "
                "anew.",
                stacklevel=3,
            )
            return [None] * len(chunks)
        return [Path(self.folder) / name for name in names]

    def _in_turn(
        self,
        chunks: "list[_Chunk]",
        missing: list[int],
        done: int,
        total: int,
        progress: ProgressCallback | None,
    ) -> Iterator[tuple[int, Results]]:
        def tell(p: AttackProgress) -> None:
            assert progress is not None
            progress(replace(p, done=done + p.done, total=total))

        for index in missing:
            yield index, chunks[index](None if progress is None else tell)
            done += len(chunks[index].job.observations)

    def _in_processes(
        self, chunks: "list[_Chunk]", missing: list[int]
    ) -> Iterator[tuple[int, Results]]:
        assert not isinstance(self.workers, RayTasks)
        broken = []
        pool = _pool(min(self.workers, len(missing)))
        try:
            futures: dict[Future[bytes], int] = {
                pool.submit(_work, chunks[index].to_bytes()): index for index in missing
            }
            for future in as_completed(futures):
                index = futures[future]
                try:
                    found: Results = pickle.loads(future.result())
                except BrokenProcessPool:
                    broken.append(index)
                    continue
                yield index, found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        # A worker that dies ends the whole pool. Each unfinished chunk then runs in a pool of its
        # own, which shows whether this chunk was the cause.
        for index in broken:
            with _pool(1) as alone:
                try:
                    answer = alone.submit(_work, chunks[index].to_bytes()).result()
                    yield index, pickle.loads(answer)
                except BrokenProcessPool:
                    reason = "the worker process died, most likely as it ran out of memory."
                    yield index, [failure(reason) for _ in chunks[index].job.observations]

    def _on_ray(self, chunks: "list[_Chunk]", missing: list[int]) -> Iterator[tuple[int, Results]]:
        assert isinstance(self.workers, RayTasks)
        if not missing:
            return
        arguments = [chunks[index].to_bytes for index in missing]
        for number, answer, causes in self.workers.run(_work_in_one_thread, arguments):
            index = missing[number]
            if isinstance(answer, str):
                found = [failure(answer) for _ in chunks[index].job.observations]
            else:
                found = pickle.loads(answer)
            if causes:
                found = [
                    replace(each, stats={**each.stats, RETRIED: "; ".join(causes)})
                    for each in found
                ]
            yield index, found


@dataclass(frozen=True)
class _Chunk:
    """An attack and the job of some observations, which together determine the results."""

    attack: Attack
    job: AttackJob

    def __call__(self, progress: ProgressCallback | None = None) -> Results:
        try:
            return self.attack(self.job, progress)
        except Exception as error:  # an error of one chunk must not stop the others
            return [failure(f"{type(error).__name__}: {error}") for _ in self.job.observations]

    def to_bytes(self, pickled: Callable[[Any], bytes] = pickle.dumps) -> bytes:
        # A chunk is pickled here, as the pool's own queue would pass its tensors as open files.
        try:
            return pickled(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"workers > 1 need a model, a loss and an attack that can be pickled: {error}"
            ) from error


def _work(chunk: bytes) -> bytes:
    return pickle.dumps(pickle.loads(chunk)())


def _work_in_one_thread(chunk: bytes) -> bytes:
    torch.set_num_threads(1)
    return _work(chunk)


def _tell(progress: ProgressCallback | None, done: int, total: int, found: Results) -> None:
    if progress is not None:
        objectives = [r.objective for r in found if math.isfinite(r.objective)]
        mean = sum(objectives) / len(objectives) if objectives else math.nan
        progress(AttackProgress(done, total, done, total, mean))


def _pool(workers: int) -> ProcessPoolExecutor:
    # A server process that has imported the package forks workers fast. Unlike this process, it has
    # neither threads nor the context of a GPU, which must not be forked.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["flwr_leakage.attacks"])
    return ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,))


def _save(results: Results, file: Path | None) -> None:
    """Write an attack's results to a file that only its owner can read.

    Tensors and JSON are written under another name first, so that the file is complete if it
    exists. Nothing is written if ``file`` is ``None``.
    """
    if file is None:
        return
    from safetensors.torch import save  # this package belongs to the extra ``server``

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value.item()  # the value is a scalar of NumPy
        tensors[str(len(tensors))] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: str(len(tensors) - 1)}

    plain = [
        {
            "batch": [r.batch.inputs, r.batch.targets] if r.batch else None,
            "objective": r.objective,
            "stats": r.stats,
            "error": r.error,
            "parts": [vars(part) for part in r.parts],
            "spec": vars(r.spec) if r.spec else None,
        }
        for r in results
    ]
    told = json.dumps(plain, default=place)
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as whole:
        whole.write(save(tensors, {"results": told}))
    partial.replace(file)


def _spec(entry: dict[str, Any] | None) -> InputSpec | None:
    if entry is None:
        return None
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return InputSpec(**fields)  # type: ignore[arg-type]  # the constructor checks them


def finished_name(attack: Attack, job: AttackJob) -> str:
    """Return the file name for an attack's results on a job: a :func:`digest` and an ending."""
    return f"{digest(attack, job)}.safetensors"


def read_finished(file: Path | None, count: int) -> Results | None:
    """Return the results in a file, or None unless it is valid and holds ``count`` of them."""
    if file is None or not file.exists():
        return None
    try:
        with open_tensors(file) as found:

            def put(node: dict[str, Any]) -> Any:
                return found.get_tensor(node[_TENSOR]) if _TENSOR in node else node

            entries = json.loads(found.metadata()["results"], object_hook=put)
        results = [
            Reconstruction(
                None if entry["batch"] is None else Batch(*entry["batch"]),
                entry["objective"],
                entry["stats"],
                entry["error"],
                tuple(Part(**part) for part in entry["parts"]),
                _spec(entry["spec"]),
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return results if len(results) == count else None
