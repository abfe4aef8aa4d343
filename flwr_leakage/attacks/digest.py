"""A digest that two attack jobs share only if they give the same result."""

import hashlib
import io
import pickle
import platform
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from flwr_leakage.attacks.base import Attack
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.records import Batch


def digest(attack: Attack, job: AttackJob) -> str:
    """Return the SHA-256 of all that the result of an attack on a job depends on, in hexadecimal.

    These are the versions of Python and torch, the source files of this package, and what pickling
    writes of the attack and the job: names of classes and functions, settings and tensors. An
    installed package counts by its version. If other code takes part, such as a user's model or
    loss, all loaded source files of that kind count, and so does the gradient at two random
    inputs, which also tells apart what no file shows, such as the value of a global variable.

    Raises:
        Exception: some part cannot be pickled, its code is in no file, or the model fails at random
            inputs; the message says what.
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
    """Return what pickling writes of an object, the same in every process.

    It adds the modules that the object names to ``modules``.

    Tensors are written by their bytes, sets in the order of what is written of their entries.
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
    writer.fast = True  # no references to what was written before, as copies share nothing
    writer.dump(value)
    return written.getvalue()


def _gradient_at_random(job: AttackJob) -> dict[str, Tensor]:
    """The gradient of the loss at two random inputs and labels."""
    seen = job.observations[0]
    device = next(iter(seen.params.values())).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        targets = torch.randint(job.spec.num_classes, (2,))
        batch = Batch(torch.rand(2, *job.spec.shape), targets).to(device)
        return job.gradient_map(seen.params, batch, seen.buffers)


def _version(module: str) -> str:
    """Return the version of a module's package if it is installed, or an empty string."""
    root = module.partition(".")[0]
    if root in (*sys.stdlib_module_names, "flwr_leakage"):
        return root
    package = sys.modules.get(root)
    places = Path(getattr(package, "__file__", None) or "").parts
    installed = {"site-packages", "dist-packages"} & {*places}  # else its code may be edited
    return f"{root} {vars(package).get('__version__')}" if package and installed else ""
