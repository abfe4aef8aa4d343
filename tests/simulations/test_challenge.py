"""Entries of the challenge are measured alike, and what no attack could have made is refused."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from simulations.challenge.entries import enter
from simulations.challenge.folder import Challenge, write
from simulations.challenge.score import score, table
from simulations.challenge.tracks import TRACKS, UPDATES, starts, updates

TRACK, COUNT = "mlp-digits", 8


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", UPDATES * COUNT), ("test", 100)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count)
        np.savez(root / f"mnist_{split}.npz", images=pixels, labels=labels)
    return root


@pytest.fixture(scope="module")
def bench(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("challenge") / "bench"
    write(folder, "none", updates(TRACK, images, 0, 0))
    return folder


def answers(bench: Path, entry: Path) -> dict[str, dict[str, np.ndarray]]:
    """Write the private images themselves as an entry, which no attack can do; return them."""
    entry.mkdir()
    challenge, found = Challenge(bench), {}
    for name in challenge.index:
        private = challenge.secret(name).private
        found[name] = {"images": private.inputs.numpy(), "labels": private.targets.numpy()}
        np.savez(entry / f"{name}.npz", **found[name])
    return found


def test_there_are_sixty_updates_in_twelve_tracks_and_no_image_is_used_twice() -> None:
    first = list(starts(0).values())
    assert len(TRACKS) * UPDATES == 60
    sizes = [UPDATES * int(case.split("/")[1]) for case in TRACKS.values()]
    assert [b - a for a, b in pairwise(first)] == sizes[:-1]


def test_an_update_holds_what_the_server_knows_and_no_private_image(bench: Path) -> None:
    challenge = Challenge(bench)
    for frozen in challenge.updates():
        private = challenge.secret(frozen.name).private
        raw = (bench / "updates" / f"{frozen.name}.safetensors").read_bytes()
        assert private.inputs[0].numpy().tobytes() not in raw
        with torch.no_grad():
            logits = frozen.model()(frozen.spec.normalize(private.inputs))
        assert logits.shape == (COUNT, 10)
        assert [*frozen.seen.update.delta] == [
            name for name, _ in frozen.model().named_parameters()
        ]


def test_the_private_images_in_another_order_are_exact(bench: Path, tmp_path: Path) -> None:
    for name, held in answers(bench, tmp_path / "own").items():
        turned = {key: value[::-1] for key, value in held.items()}
        np.savez(tmp_path / "own" / f"{name}.npz", **turned)
    found = score(Challenge(bench), tmp_path / "own", tmp_path / "runs")[TRACK]
    assert (found.answered, found.exact, found.identified) == (5, 5 * COUNT, 5 * COUNT)
    again = score(Challenge(bench), tmp_path / "own", tmp_path / "again")[TRACK]
    assert again == found
    assert (tmp_path / "runs" / TRACK / "report.html").is_file()
    assert "| own | all | 5 | 40 |" in table({"own": {TRACK: found}})


def test_what_is_no_answer_counts_for_nothing_and_is_told(bench: Path, tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    held = answers(bench, entry)
    first, second, third, fourth, fifth = held
    stolen = held[fifth]["images"].copy()
    stolen[0] = held[first]["images"][3]
    np.savez(entry / f"{first}.npz", images=held[first]["images"] * np.nan, labels=np.zeros(COUNT))
    np.savez(entry / f"{second}.npz", images=held[second]["images"][:3], labels=np.zeros(3))
    np.savez(entry / f"{third}.npz", images=np.array([{}]), labels=np.zeros(COUNT))
    (entry / f"{fourth}.npz").unlink()
    np.savez(entry / f"{fifth}.npz", images=stolen, labels=held[fifth]["labels"])
    found = score(Challenge(bench), entry, tmp_path / "runs")[TRACK]
    assert (found.answered, found.found, found.identified) == (0, [], 0)
    expected = ("pixels in [0, 1]", "must hold images", "", "has no", f"image of {first}: a copy")
    assert len(found.refusals) == 5
    for name, reason, part in zip(held, found.refusals, expected, strict=True):
        assert reason.startswith(f"{name}: ")
        assert part in reason


def test_strange_files_and_changed_updates_are_refused(bench: Path, tmp_path: Path) -> None:
    answers(bench, tmp_path / "entry")
    (tmp_path / "entry" / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes\.txt"):
        score(Challenge(bench), tmp_path / "entry", tmp_path / "runs")
    challenge = Challenge(bench)
    name = next(iter(challenge.index))
    challenge.index = {name: {"updates": "0" * 64, "truth": "0" * 64}}
    with pytest.raises(ValueError, match="not the file that was frozen"):
        next(challenge.updates())
    with pytest.raises(FileNotFoundError, match="run freeze first"):
        Challenge(tmp_path)


def test_a_preset_enters_and_its_answers_stay(bench: Path, tmp_path: Path) -> None:
    enter(Challenge(bench), tmp_path / "idlg", "idlg", seconds=0.2)
    files = sorted((tmp_path / "idlg").iterdir())
    assert len(files) == UPDATES
    written = [file.stat().st_mtime_ns for file in files]
    enter(Challenge(bench), tmp_path / "idlg", "idlg", seconds=0.2)
    assert [file.stat().st_mtime_ns for file in files] == written


def test_a_defense_changes_the_updates_and_not_what_is_behind_them(
    bench: Path, images: Path, tmp_path: Path
) -> None:
    write(tmp_path / "pruned", "pruning", updates(TRACK, images, 0, 0, "pruning"))
    plain, pruned = Challenge(bench), Challenge(tmp_path / "pruned")
    assert pruned.defense == "pruning"
    for before, after in zip(plain.updates(), pruned.updates(), strict=True):
        zeros = [float((v == 0).float().mean()) for v in after.seen.update.delta.values()]
        assert max(zeros) > 0.9
        assert after.seen.params.keys() == before.seen.params.keys()
        assert plain.index[before.name]["truth"] == pruned.index[after.name]["truth"]


def test_the_attack_from_outside_enters(bench: Path, tmp_path: Path) -> None:
    source = next((bench / "updates").glob("*.safetensors"))
    (tmp_path / "updates").mkdir()
    (tmp_path / "updates" / source.name).write_bytes(source.read_bytes())
    command = [sys.executable, "-m", "simulations.examples.outside_attack", tmp_path]
    subprocess.run([*command, tmp_path / "outside"], check=True)
    with np.load(tmp_path / "outside" / f"{source.stem}.npz") as held:
        assert held["images"].shape == (COUNT, 1, 14, 14)
        assert held["labels"].shape == (COUNT,)
