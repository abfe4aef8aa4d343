"""Run folders whose files are links, devices, bombs or texts that somebody would obey."""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from simulations.benchmarks.hostile_gadgets import put

Change = Callable[[Path, Path], Path | None]
"""(run folder, foreign folder) ↦ the folder in its place, where it is renamed."""

ROUND = "kept/round000001"
KEPT = f"{ROUND}/client0000.safetensors"
TRUTH = f"{ROUND}/client0000.truth"
HUGE = 64 << 30
"""Bytes of a file with a hole, which takes no room on the disk."""

TEXTS = {
    "terminal escape": "\x1b]0;evil\x07\x1b[2Jgone",
    "C1 control": "\x9b31mred",
    "direction mark": "safe\u202egnp.exe",
    "line separator": "a\u2028b\u2066c",
    "formula": "=HYPERLINK(\"http://evil.example\")",
    "formula with a sign": "-1+cmd|'/C calc'!A0",
    "formula after a tab": "\t@SUM(1)",
    "formula after a semicolon": "a;=cmd|'/C calc'!A0",
    "wide formula": "＝cmd|'/C calc'!A0",
    "script": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "attribute": "\" onmouseover=\"alert(1)",
    "Markdown link": "[x](javascript:alert(1)) ![y](http://evil.example/z.png)",
    "Markdown cell": "a\\| b | c\n\n# heading",
    "TeX": "\\input{/etc/passwd}\\write18{touch x} $x^2$ % &",
    "mathematics": "$\\frac{1}{$",
    "template": "{{ 7 * 7 }}{% raw %}",
}  # fmt: skip


def entries() -> dict[str, Change]:
    """Every hostile folder by name."""
    links = {
        f"{name} is a link": _link(name)
        for name in (
            "run.json", "records.jsonl", "images", "kept", ROUND, KEPT, TRUTH, "report.html",
            "kept/image_numbers.json", "kept/finished", "weights", "failure.txt",
        )
    }  # fmt: skip
    files = ("run.json", "records.jsonl", KEPT, TRUTH, "kept/image_numbers.json")
    pipes = {f"{name} is a pipe": _pipe(name) for name in files}
    holes = {f"{name} has 64 GiB": _hole(name) for name in files}
    numbers = {
        f"{key} of {value:g} in a kept round": _about(key, value)
        for key, value in (
            ("schedule.num_steps", 10**9), ("schedule.batch_size", 10**9), ("num_examples", 10**9),
            ("spec.num_classes", 10**12), ("server_round", 10**300), ("client_id", 10**300),
        )
    }  # fmt: skip
    widths = {
        f"{place} = {value}": _config(place, value)
        for place, value in (
            ("num_clients", 10**9), ("client.num_examples", 10**15), ("attack.max_rows", 10**18),
            ("model.network._target_", "flwr_leakage.models.ResNet152"),
            ("model.network", {"_target_": "flwr_leakage.models.MLP", "widths": [10**6, 10**6]}),
            ("partition.num_partitions", 10**9),
        )
    }  # fmt: skip
    paths = {
        f"{place} leads elsewhere": _foreign_path(place, name)
        for place, name in (
            ("dataset.root", ""), ("metric.lpips.backbone", "evil.pt"),
            ("model.weights", "tiny_train.npz"), ("client.folder", "victim"),
            ("server.attack_folder", "victim"), ("run_dir", "victim"),
        )
    }  # fmt: skip
    texts = {f"{name} in settings": _text_in_settings(text) for name, text in TEXTS.items()}
    texts |= {f"{name} in records": _text_in_records(text) for name, text in TEXTS.items()}
    texts |= {f"{name} as a folder": _text_as_folder(text) for name, text in TEXTS.items()}
    return {
        **links,
        **pipes,
        **holes,
        **numbers,
        **widths,
        **paths,
        **texts,
        "an image is a link": _image_link,
        "an image is a pipe": _image_pipe,
        "an image has 64 GiB": _image_hole,
        "an image of 60,000 × 60,000": _image_bomb,
        "an image with a script": _image_script,
        "records name an image outside": _image_outside,
        "records.jsonl is a device": _device,
        "records.jsonl is a folder": _folder_as_file,
        "a line of 32 MB": lambda run, _: _append(run, "x" * 32_000_000),
        "a million lines of nothing": lambda run, _: _append(run, "\n".join(["{}"] * 1_000_000)),
        "100,000 names": _names,
        "JSON of 100,000 levels": lambda run, _: _append(run, "[" * 100_000),
        "run.json of 100,000 levels": _deep,
        "a value of 1e400": lambda run, _: _append(run, _record(value=7).replace("7", "1e400")),
        "a round of 10^400": lambda run, _: _append(run, _record(server_round=10**400)),
        "a round of 2^63": lambda run, _: _append(run, _record(server_round=2**63)),
        "a header that claims 2^40 bytes": _claims,
        "a seed of 10^400": _config("seed", 10**400),
        "a shape of 10^5 × 10^5": _about("spec.shape", [1, 10**5, 10**5]),
        "a name with .. in the data set": _dataset_name,
        "a client's folder is a link": _client_link,
    }


def _record(**changed: Any) -> str:
    row = {
        "type": "record", "value": 1.0, "run": "r", "server_round": 1, "client_id": 0, "sample": 0,
        "kind": "score", "name": "x", "unit": "1", "direction": "", "note": "", "error": None,
        "state": "",
    }  # fmt: skip
    return json.dumps({**row, **changed})


def _append(run: Path, text: str) -> None:
    with (run / "records.jsonl").open("a") as file:
        file.write(text + "\n")


def _moved(run: Path, name: str, foreign: Path) -> Path:
    """Move an entry to the foreign folder; where it lies now."""
    there = foreign / f"moved-{name.replace('/', '-')}"
    if (run / name).exists():
        shutil.move(run / name, there)
    else:
        there.write_text("{}") if "." in name else there.mkdir()
    return there


def _link(name: str) -> Change:
    def change(run: Path, foreign: Path) -> None:
        there = _moved(run, name, foreign)
        (run / name).symlink_to(there)

    return change


def _pipe(name: str) -> Change:
    def change(run: Path, foreign: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def _hole(name: str) -> Change:
    def change(run: Path, foreign: Path) -> None:
        (run / name).touch()
        os.truncate(run / name, HUGE)

    return change


def _about(key: str, value: Any) -> Change:
    def change(run: Path, foreign: Path) -> None:
        with safe_open(run / KEPT, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        about = json.loads(metadata["observation"])
        section, keys = about, key.split(".")
        for part in keys[:-1]:
            section = section[part]
        section[keys[-1]] = value
        save_file(tensors, run / KEPT, {**metadata, "observation": json.dumps(about)})

    return change


def _config(place: str, value: Any) -> Change:
    return lambda run, _: put(run, place, value)


def _foreign_path(place: str, name: str) -> Change:
    def change(run: Path, foreign: Path) -> None:
        if place == "dataset.root":
            names = {"name": "tiny", "root": str(foreign), "mean": [0.0], "std": [1.0]}
            put(run, "dataset", {"_target_": "flwr_leakage.data.npz_dataset", **names})
        elif place == "metric.lpips.backbone":
            lpips = {"_target_": "flwr_leakage.metrics.Lpips", "net": "squeeze"}
            put(run, "metric.lpips", {**lpips, "backbone": str(foreign / name)})
        else:
            put(run, place, str(foreign / name))

    return change


def _text_in_settings(text: str) -> Change:
    def change(run: Path, foreign: Path) -> None:
        for place in ("choices.defense", "dataset.name"):
            put(run, place, text)
        put(run, "defense", {text.replace(".", ""): 1, "name": text, "_target_": "x"})
        path = run / "run.json"
        metadata = json.loads(path.read_text()) | dict.fromkeys(
            ("run", "defense", "attack", "threat", "commit", "command", "platform"), text
        )
        path.write_text(json.dumps(metadata))

    return change


def _text_in_records(text: str) -> Change:
    def change(run: Path, foreign: Path) -> None:
        for number, kind in enumerate(("score", "metric")):
            texts = dict.fromkeys(("run", "name", "unit", "direction", "note"), text)
            _append(run, _record(**texts, kind=kind, sample=number))
        event = {"type": "event", "run": text, "server_round": 1, "client_id": 0}
        _append(run, json.dumps({**event, "level": "warning", "message": text}))
        _append(run, text)

    return change


def _text_as_folder(text: str) -> Change:
    def change(run: Path, foreign: Path) -> Path:
        (run / "run.json").unlink()  # the name of the folder is then that of the run
        return run.rename(run.with_name(text.replace("/", "∕")[:80]))

    return change


def _an_image(run: Path) -> Path:
    return sorted((run / "images").glob("*_original.png"))[0]


def _image_link(run: Path, foreign: Path) -> None:
    path = _an_image(run)
    path.rename(foreign / "private.png")
    path.symlink_to(foreign / "private.png")


def _image_pipe(run: Path, foreign: Path) -> None:
    path = _an_image(run)
    path.unlink()
    os.mkfifo(path)


def _image_hole(run: Path, foreign: Path) -> None:
    os.truncate(_an_image(run), HUGE)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checked = kind + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


def _image_bomb(run: Path, foreign: Path) -> None:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(60_001 * 200), 9)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")
    _an_image(run).write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def _image_script(run: Path, foreign: Path) -> None:
    path = _an_image(run)
    path.write_bytes(path.read_bytes() + b"<script>alert(1)</script>")


def _image_outside(run: Path, foreign: Path) -> None:
    shutil.copy(_an_image(run), foreign / "private.png")
    row = {"type": "image", "server_round": 1, "client_id": 0, "sample": 9, "role": "original"}
    _append(run, json.dumps({**row, "path": str(foreign / "private.png")}))
    _append(run, json.dumps({**row, "role": f"../../{foreign.name}/private"}))


def _device(run: Path, foreign: Path) -> None:
    (run / "records.jsonl").unlink()
    (run / "records.jsonl").symlink_to("/dev/zero")


def _folder_as_file(run: Path, foreign: Path) -> None:
    (run / "records.jsonl").unlink()
    (run / "records.jsonl").mkdir()


def _names(run: Path, foreign: Path) -> None:
    names = (_record(name=f"score_{i}", value=float(i % 7), sample=i) for i in range(100_000))
    _append(run, "\n".join(names))


def _deep(run: Path, foreign: Path) -> None:
    (run / "run.json").write_text('{"config": ' + "[" * 100_000 + "]" * 100_000 + "}")


def _claims(run: Path, foreign: Path) -> None:
    claimed = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    header = json.dumps({"params/w": claimed})
    (run / KEPT).write_bytes(struct.pack("<Q", len(header)) + header.encode())


def _dataset_name(run: Path, foreign: Path) -> None:
    names = {"root": str(run), "name": f"../{foreign.name}/tiny", "mean": [0.0], "std": [1.0]}
    put(run, "dataset", {"_target_": "flwr_leakage.data.npz_dataset", **names})


def _client_link(run: Path, foreign: Path) -> None:
    (run / "run-1-client-7").symlink_to(_copy(run, foreign / "run-1-client-7"))


def _copy(run: Path, there: Path) -> Path:
    there.mkdir()
    shutil.copy(run / "records.jsonl", there)
    return there
