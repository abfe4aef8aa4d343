"""Hooks of mkdocs: they add a page for each public name, the notebooks and the results.

A public name is one that a package exports. Its page has the signature and the docstring, by
mkdocstrings, and the example of its package's guide in ``reference/``. Links that leave this folder
work on a code host. Here they lead to pages of the site, or to ``REPO_URL``, or become plain text.
"""

import ast
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import notebooks  # noqa: E402

RESULTS = "simulations/benchmarks/results"
ELSEWHERE = {"README.md": "index.md", "simulations/benchmarks/RESULTS.md": "results/index.md"}
"""Pages of the repository outside of this folder, and where the site has them."""


def packages() -> list[str]:
    """Return the packages that have a guide, the whole package first."""
    names = sorted(path.stem for path in (DOCS / "reference").glob("*.md") if path.stem != "index")
    return sorted(names, key=lambda name: name != "flwr_leakage")


def exported(package: str) -> list[str]:
    """Return what ``__all__`` of a package or module names."""
    home = ROOT / "flwr_leakage" / ("" if package == "flwr_leakage" else package)
    source = home.with_suffix(".py") if not home.is_dir() else home / "__init__.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{source.name} of {package} has no __all__.")


def examples(package: str) -> dict[str, str]:
    """Return the example of each name, from the sections of a package's guide.

    A section's heading has the names that its example uses. The code of the section ``Setup``
    stands in front of each.
    """
    text = (DOCS / "reference" / f"{package}.md").read_text()
    _, *parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    setup = sections.pop("Setup", "")
    code = "".join(re.findall(r"```python\n(.*?)```", setup, re.DOTALL))
    return {
        name: section.replace("```python\n", f"```python\n{code}", 1)
        for names, section in sections.items()
        for name in names.split(", ")
    }


def reference() -> dict[str, str]:
    """Return the pages of all public names, by their paths on the site."""
    pages = {}
    for package in packages():
        module = "flwr_leakage" if package == "flwr_leakage" else f"flwr_leakage.{package}"
        shown = examples(package)
        for name in exported(package):
            lines = [
                f"# {name}",
                f"Exported by [`{module}`]({package}.md).",
                f"::: {module}.{name}",
            ]
            if name in shown:
                lines += ["## Example", shown[name]]
            pages[_path(package, name)] = "\n\n".join(lines)
    return pages


def _path(package: str, name: str) -> str:
    """Return the path of a name's page, also where files differ by their case only."""
    twins = [other for other in exported(package) if other.lower() == name.lower()]
    rank = "_" * twins.index(name)
    return f"reference/{package}/{name}{rank}.md"


def _results() -> dict[str, Path]:
    pages = {f"results/{path.name}": path for path in sorted((ROOT / RESULTS).glob("*.md"))}
    return {"results/index.md": ROOT / "simulations/benchmarks/RESULTS.md", **pages}


def on_config(config: Any) -> Any:
    """Fill the headings ``Reference`` and ``Results`` of the navigation."""
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
    contents = [
        {package: [f"reference/{package}.md"]
            + [{name: _path(package, name)} for name in exported(package)]}
        for package in packages()
    ]  # fmt: skip
    filled = {"Reference": ["reference/index.md", *contents], "Results": list(_results())}
    config.nav = [
        {title: filled.get(title, entry) for title, entry in one.items()} for one in config.nav
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are no files of this folder."""
    from mkdocs.structure.files import File

    pages = reference() | {path: source.read_text() for path, source in _results().items()}
    for path in sorted((DOCS / "gallery").glob("*.ipynb")):
        pages[f"gallery/{path.stem}.md"] = notebooks.to_markdown(json.loads(path.read_text()))
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Mend the links of a page, and add to a package's guide a list of its names."""
    path = page.file.src_uri
    source = next((place for place, site in ELSEWHERE.items() if site == path), f"docs/{path}")
    if path.startswith("reference/") and path.count("/") == 2:
        source = f"docs/{posixpath.dirname(path)}.md"  # whose examples it shows
    if path.startswith("results/") and source.startswith("docs/"):
        source = f"{RESULTS}/{posixpath.basename(path)}"
    folder, package = posixpath.split(path)
    if folder == "reference" and package != "index.md":
        package = package.removesuffix(".md")
        names = [
            f"[`{name}`]({_path(package, name).removeprefix('reference/')})"
            for name in exported(package)
        ]
        intro, heading, rest = markdown.partition("\n## ")
        markdown = f"{intro}\n{', '.join(names)}\n{heading}{rest}"
    mend = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
    return mend.sub(lambda link: _link(link, source, path, config.repo_url), markdown)


def _link(link: re.Match[str], source: str, page: str, repository: str | None) -> str:
    """Return a link of the repository's file ``source`` as the site's page ``page`` needs it."""
    bang, text, target, anchor = link.groups(default="")
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    site = place.removeprefix("docs/") if place.startswith("docs/") else ELSEWHERE.get(place)
    if place.startswith(f"{RESULTS}/") and place.endswith(".md"):
        site = f"results/{posixpath.basename(place)}"
    if site is not None:
        site = re.sub(r"\.ipynb$", ".md", site)
        return f"{bang}[{text}]({posixpath.relpath(site, posixpath.dirname(page) or '.')}{anchor})"
    if not repository:
        return text
    return f"{bang}[{text}]({repository.rstrip('/')}/blob/main/{place}{anchor})"
