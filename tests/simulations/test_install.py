"""The container and the conda environment install what pyproject.toml and constraints.txt name."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
HERE = ROOT / "simulations" / "install"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def dockerfile() -> list[tuple[str, str]]:
    """Return each instruction of the Dockerfile with its arguments."""
    lines = (HERE / "Dockerfile").read_text().splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line and not line.startswith("#")]


def told(instruction: str) -> list[str]:
    return [words for name, words in dockerfile() if name == instruction]


def environment() -> tuple[dict[str, str], list[str]]:
    """Return the versions that conda installs, and the lines that pip is given."""
    (*packages, held) = yaml.safe_load((HERE / "environment.yml").read_text())["dependencies"]
    parts = (each.partition("=") for each in packages)
    return {name: version for name, _, version in parts}, held["pip"]


def test_both_have_a_python_that_the_project_is_tested_on():
    (base,) = told("FROM")
    python = re.fullmatch(r"python:(3\.\d+)-slim", base).group(1)
    assert environment()[0] == {"python": python, "pip": ""}
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)
    assert PROJECT["tool"]["mypy"]["python_version"] == python


def test_the_container_copies_what_the_build_needs():
    copied = {source for words in told("COPY") for source in shlex.split(words)[:-1]}
    build, project = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"], PROJECT["project"]
    needed = {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert copied == needed | set(build["packages"]) | set(build["force-include"])
    assert all((ROOT / source).exists() for source in copied)


def test_the_container_starts_a_command_of_the_project():
    (command,) = told("ENTRYPOINT")
    assert command == f'["{next(iter(PROJECT["project"]["scripts"]))}"]'


def test_both_install_torch_first_and_the_extra_of_a_server_under_the_constraints():
    (argument,) = told("ARG")
    name, extra = argument.split("=")
    pip = [shlex.split(words) for words in told("RUN") if " pip " in words]
    install = ["python", "-m", "pip", "install", "--no-cache-dir", "--constraint"]
    assert pip == [
        [*install, "constraints.txt", "torch"],
        [*install, "constraints.txt", f".[${name}]"],
    ]
    constraint, *lines = environment()[1]
    option, place = constraint.split()
    assert option == "--constraint" and (HERE / place).resolve() == ROOT / "constraints.txt"
    assert lines == ["torch", f"../..[{extra}]"] and (HERE / "../..").resolve() == ROOT
    assert extra in EXTRAS


@pytest.mark.parametrize("extra", ["", "server", "all"])
def test_the_constraints_name_a_version_that_each_requirement_takes(extra):
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line:
            name, version = line.split("==")
            pinned[re.sub("[-_.]+", "-", name).lower()] = version
    for text in PROJECT["project"]["dependencies"] + EXTRAS.get(extra, []):
        wanted = Requirement(text)
        if wanted.name != PROJECT["project"]["name"]:
            assert wanted.specifier.contains(pinned[wanted.name.lower()]), text
