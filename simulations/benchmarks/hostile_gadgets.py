"""Configs that call something: what a stranger may write in place of a part in ``run.json``."""

import base64
import json
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

MARK = "PWNED"
"""What a gadget prints, put together by the call: no message that quotes the config holds it."""

SECRET = "HOSTILE_SECRET"
"""An environment variable whose value is ``MARK``."""

OPTIMIZER = "attack.optimizer"


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return open, (self.path, "w")


def prepare(foreign: Path, ran: Path) -> None:
    """Write what gadgets load into a folder beside the run folder.

    Args:
        foreign: the folder; nothing of it may be opened.
        ran: the file that is made where a gadget runs.
    """
    (foreign / "victim").mkdir(parents=True)
    (foreign / "victim" / "file").write_text("precious")
    evil = Touch(str(ran))
    (foreign / "evil.pkl").write_bytes(pickle.dumps(evil))
    torch.save(evil, foreign / "evil.pt")
    np.save(foreign / "evil.npy", np.array([evil], dtype=object), allow_pickle=True)
    (foreign / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (foreign / "hubconf.py").write_text(f"def evil():\n    open({str(ran)!r}, 'w')\n")
    (foreign / "evil.so").write_bytes(b"no library")
    (foreign / "secret.txt").write_text("a,b\n1,2\n")
    images, labels = np.zeros((20, 28, 28), np.uint8), np.arange(20) % 10
    for part in ("train", "test"):
        np.savez(foreign / f"tiny_{part}.npz", images=images, labels=labels)


def node(target: str, *args: Any, **settings: Any) -> dict[str, Any]:
    """What Hydra calls."""
    return {"_target_": target, **({"_args_": list(args)} if args else {}), **settings}


def gadgets(foreign: Path, ran: Path) -> dict[str, tuple[str, Any]]:
    """(place in the config, what is put there) of every gadget, by name."""
    nodes = {**_foreign_calls(foreign, ran), **_own_calls(foreign, ran)}
    found = {name: (OPTIMIZER, content) for name, content in nodes.items()}
    system = node("os.system", f"touch {ran}")
    for place in (
        "attack", "attack.priors.x", "attack.labels", "dataset", "defense", "defense.x", "engine",
        "gate", "gate.stronger.0", "metric", "metric.lpips", "model.network", "partition",
        "partition.sizes.0", "score.x", "scoring", "selection", "self_attack", "strategy", "threat",
        "tracker", "what_if.x", "lab", "paper", "hydra.callbacks.x",
    ):  # fmt: skip
        found[f"os.system at {place}"] = (place, system)
    return {
        **found,
        "environment in a text": ("attack.dtype", f"${{oc.env:{SECRET}}}"),
        "environment in a class name": ("dataset.mean", [f"${{oc.env:{SECRET}}}"]),
        "target by interpolation": (OPTIMIZER, node("${oc.decode:os.system}", f"touch {ran}")),
        "a list of nodes": ("attack.priors", [system]),
        "not recursive": (OPTIMIZER, {**system, "_recursive_": False}),
        "converted": (OPTIMIZER, {**system, "_convert_": "all"}),
        "partial": (OPTIMIZER, {**system, "_partial_": True}),
        "partial of the packaged inline engine": (
            OPTIMIZER,
            {"_target_": "flwr_leakage.flower.run_inline", "_partial_": True},
        ),
    }


def _foreign_calls(foreign: Path, ran: Path) -> dict[str, Any]:
    touch, code, path = f"touch {ran}", f"open({str(ran)!r}, 'w')", str(ran)
    evil = {suffix: str(foreign / f"evil.{suffix}") for suffix in ("pkl", "pt", "npy", "py", "so")}
    victim, secret = str(foreign / "victim"), str(foreign / "secret.txt")
    packed = base64.b64encode(pickle.dumps(Touch(path))).decode()
    shell = ["sh", "-c", touch]
    called = {
        "os.system": (touch,), "posix.system": (touch,), "os.makedirs": (path,),
        "os.rename": (victim, path), "os.symlink": (victim, path), "shutil.rmtree": (victim,),
        "shutil.copytree": (victim, path), "subprocess.Popen": (shell,), "subprocess.run": (shell,),
        "subprocess.call": (shell,), "subprocess.check_output": (shell,),
        "subprocess.getoutput": (touch,), "builtins.eval": (code,), "builtins.exec": (code,),
        "builtins.open": (path, "w"), "runpy.run_path": (evil["py"],), "timeit.timeit": (code,),
        "cProfile.run": (code,), "torch.jit.load": (evil["pt"],),
        "torch.ops.load_library": (evil["so"],), "torch.classes.load_library": (evil["so"],),
        "torch.save": ([1], path), "pandas.read_pickle": (evil["pkl"],),
        "pandas.read_csv": (secret,), "sympy.sympify": (code,),
        "sympy.parsing.sympy_parser.parse_expr": (code,), "numpy.savetxt": (path, [1.0]),
        "numpy.fromfile": (secret,), "numpy.loadtxt": (secret,), "ctypes.CDLL": (evil["so"],),
        "webbrowser.open": (f"file://{secret}",), "urllib.request.urlopen": (f"file://{secret}",),
        "urllib.request.urlretrieve": (f"file://{secret}", path), "logging.FileHandler": (path,),
        "sqlite3.connect": (path,), "zipfile.ZipFile": (path, "w"), "PIL.Image.open": (secret,),
        "importlib.import_module": ("this",), "hydra.utils.get_method": ("os.system",),
        "safetensors.torch.load_file": (evil["pt"],), "matplotlib.pyplot.imread": (secret,),
    }  # fmt: skip
    system = node("os.system", touch)
    return {
        **{target: node(target, *args) for target, args in called.items()},
        "builtins.print": node("builtins.print", "PW", "NED", sep=""),
        "numpy.load": node("numpy.load", evil["npy"], allow_pickle=True),
        "torch.load": node("torch.load", evil["pt"], weights_only=False),
        "torch.hub.load": node("torch.hub.load", str(foreign), "evil", source="local"),
        "pickle.loads": node("pickle.loads", node("base64.b64decode", packed)),
        "pickle.load": node("pickle.load", node("builtins.open", evil["pkl"], "rb")),
        "pathlib.Path.touch": node("pathlib.Path.touch", node("pathlib.Path", path)),
        "operator.call": node("operator.call", node("hydra.utils.get_method", "os.system"), touch),
        "functools.partial": node("functools.partial", system),
        "hydra.utils.instantiate": node(
            "hydra.utils.instantiate", config=system, _recursive_=False
        ),
        "builtins.list": node("builtins.list", [system]),
    }


def _own_calls(foreign: Path, ran: Path) -> dict[str, Any]:
    """Through modules of the project to others, and functions of its own that read or write."""
    touch, path, secret = f"touch {ran}", str(ran), str(foreign / "secret.txt")
    where = node("pathlib.Path", path)
    own = {
        "flwr_leakage.tracking.jsonl.os.system": (touch,),
        "flwr_leakage.tracking.metadata.subprocess.getoutput": (touch,),
        "flwr_leakage.audit.kept.shutil.rmtree": (str(foreign / "victim"),),
        "flwr_leakage.cli.kept.importlib.import_module": ("this",),
        "flwr_leakage._lazy.importlib.import_module": ("this",),
        "flwr_leakage.attacks.presets.hydra.utils.call": (node("os.system", touch),),
        "flwr_leakage.tracking.jsonl.make_private_folder": (where,),
        "flwr_leakage.cli.kept._make": ("this:x",),
        "flwr_leakage.cli.app._simulate": ([f"run_dir={path}"],),
        "simulations.papers.perform": (),
    }
    settings = {
        "flwr_leakage.metrics.perceptual.torch.load": {
            "f": str(foreign / "evil.pt"), "weights_only": False,
        },
        "flwr_leakage.tracking.JsonlTracker": {"folder": path},
        "flwr_leakage.tracking.write_metadata": {"folder": path, "config": {}, "seed": 0},
        "flwr_leakage.report.write_report": {"run_folder": str(foreign), "output": path},
        "flwr_leakage.tracking.tensorboard.TensorBoardTracker": {"folder": path},
        "flwr_leakage.tracking.wandb.WandbTracker": {"folder": path},
        "flwr_leakage.tracking.mlflow.MlflowTracker": {"folder": path},
        "flwr_leakage.data.npz_dataset": {
            "root": str(foreign), "name": "tiny", "mean": [0.0], "std": [1.0],
        },
        "flwr_leakage.defenses.load_public_images": {"path": str(foreign / "tiny_train.npz")},
        "flwr_leakage.data.image_folder": {
            "root": str(foreign), "size": 8, "mean": [0.0], "std": [1.0],
        },
        "flwr_leakage.metrics.checkpoint.fetch": {
            "url": f"file://{secret}", "path": where, "seconds": 5.0,
        },
        "flwr_leakage.simulation.sweep.CompareRuns": {},
    }  # fmt: skip
    return {
        **{target: node(target, *args) for target, args in own.items()},
        **{target: node(target, **given) for target, given in settings.items()},
    }


def put(folder: Path, place: str, content: Any) -> None:
    """Put something into the config of a run folder; ``0`` is the only place of a list."""
    path = folder / "run.json"
    metadata = json.loads(path.read_text())
    keys = place.split(".")
    section = metadata["config"]
    for key, following in pairwise(keys):
        kind = list if following == "0" else dict
        if not isinstance(section.get(key), kind):
            section[key] = kind()
        section = section[key]
    if isinstance(section, list):
        section[:] = [content]
    else:
        section[keys[-1]] = content
    path.write_text(json.dumps(metadata))
