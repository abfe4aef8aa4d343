"""Files that others wrote: what is larger, elsewhere or another kind of file is not read."""

import io
import json
import os
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from flwr_leakage import untrusted
from flwr_leakage.untrusted import (
    NotTensorsError,
    check_archive,
    check_png,
    inside,
    memory_limit,
    open_tensors,
    parse_json,
    read_file,
    read_npz,
)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "..", "a\\x"])
def test_a_name_leads_out_of_no_folder(tmp_path, name):
    with pytest.raises(ValueError, match="inside of the folder"):
        inside(tmp_path, name)


def test_a_link_is_followed_at_no_place_below_the_folder(tmp_path):
    (tmp_path / "run" / "a").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "run" / "b").symlink_to(tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert inside(tmp_path / "link", "a/file") == tmp_path / "link" / "a" / "file"
    for name in ("b", "b/file"):
        with pytest.raises(ValueError, match="symbolic link"):
            inside(tmp_path / "run", name)


def test_a_pipe_is_not_waited_for_and_a_device_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "."):
        with pytest.raises(ValueError, match="regular file"):
            read_file(tmp_path / name, 100, follow=True)
    with pytest.raises(ValueError, match="symbolic link"):
        read_file(tmp_path / "link", 100)


def test_a_larger_file_is_not_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ValueError, match="at most 4 bytes, got 5"):
        read_file(path, 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1e400}', "1e400 is no JSON number"),
        ("NaN", "NaN is no JSON number"),
        (f"[{10**30}]", "±2\\^64"),
        (f"[{'9' * 5000}]", "±2\\^64"),
        ("[" * 100 + "]" * 100, "at most 64 levels"),
        ("[" * 200_000, "at most 64 levels"),
    ],
)
def test_json_is_finite_in_every_way(text, said):
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_json_that_trackers_write_is_read():
    node = {"a": [1, -1.5, None, True, "ü\ud800"], "node": 2**64 - 1}
    assert parse_json(json.dumps(node).encode()) == node


def _png(mode, size=(4, 3), **settings):
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG", **settings)
    return buffer.getvalue()


def test_a_png_file_is_grey_or_colour_and_no_more():
    for mode in ("L", "RGB"):
        check_png(_png(mode))
    header = struct.pack(">IIBBBBB", 70_000, 70_000, 8, 0, 0, 0, 0)
    kind = b"IHDR" + header
    bomb = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + kind + struct.pack(">I", zlib.crc32(kind))
    for content, said in (
        (_png("RGBA"), "grey or colour"),
        (_png("RGB", dpi=(72, 72)), "no more"),
        (_png("L") + b"<script>", "no more"),
        (_png("L")[:-4], "no more"),
        (b"<svg onload=alert(1)>", "PNG file"),
        (bomb, "at most 4,194,304 pixels, got 70000×70000"),
    ):
        with pytest.raises(ValueError, match=said):
            check_png(content)


def test_a_header_of_tensors_is_bounded(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(2)}, path, {"format": "f"})
    with open_tensors(path) as found:
        assert found.get_slice("a").get_shape() == [2]
    path.write_bytes(struct.pack("<Q", 90 << 20) + b" " * 100)
    with pytest.raises(NotTensorsError, match="a header must have at most"), open_tensors(path):
        pass
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(NotTensorsError), open_tensors(path):
        pass


def test_an_archive_of_arrays_is_measured_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, images=np.zeros((1000, 1000), np.uint8))
    assert read_npz(path, ["images"])[0].shape == (1000, 1000)
    monkeypatch.setattr(untrusted, "MAX_ARRAYS_BYTES", 100_000)
    with pytest.raises(ValueError, match="at most 100,000 bytes, got 1,000,128"):
        read_npz(path, ["images"])


def test_an_array_has_as_many_bytes_as_its_header_says(tmp_path):
    path = tmp_path / "x.npz"
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776,), }\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"abc"
    with zipfile.ZipFile(path, "w") as held:
        held.writestr("images.npy", array)
    with pytest.raises(ValueError, match="says that it has 1,099,511,627,776 bytes"):
        read_npz(path, ["images"])


def test_saved_weights_are_not_packed(tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"a": torch.ones(3)}, path)
    check_archive(path)
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in entries.items():
            new.writestr(name, content)
    with pytest.raises(ValueError, match="packed"):
        check_archive(path)


def test_what_takes_too_much_memory_fails_and_says_so():
    child = os.fork()
    if not child:
        code = 1
        try:
            with memory_limit(2 << 30):
                torch.ones(3 << 28)
        except ValueError as error:
            code = 0 if "takes more than 2,147,483,648 bytes" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
