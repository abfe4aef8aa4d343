"""Each public name has a page and an example; examples and notebooks run; links lead somewhere."""

import doctest
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load(ROOT / "docs/hooks.py")
PAGES = hooks.reference()
PACKAGES = hooks.packages()


def module_of(package):
    return importlib.import_module("flwr_leakage" + f".{package}" * (package != "flwr_leakage"))


def test_each_package_that_exports_names_has_a_guide():
    exporting = {
        path.parent.name if path.name == "__init__.py" else path.stem
        for path in (ROOT / "flwr_leakage").glob("*/__init__.py")
        if "__all__ = " in path.read_text()
    }
    inner = {"per_sample"}  # what operators and scores are made of
    assert (exporting - inner) | {"flwr_leakage"} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_exported_name_has_a_page_with_a_description_and_an_example(package):
    module, shown = module_of(package), hooks.examples(package)
    assert sorted(hooks.exported(package)) == sorted(module.__all__)
    assert shown.keys() <= set(module.__all__), "an example of a name that is not exported"
    for name in module.__all__:
        own = getattr(module, name)
        docstring = inspect.getdoc(own) or "" if callable(own) else ""
        directive = f"::: {module.__name__}.{name}\n"
        assert any(directive in page for page in PAGES.values()), name
        assert not docstring.startswith(f"{name}("), f"{name} has no docstring"
        if name in shown:
            is_result = not inspect.isroutine(own)  # an example may end in one
            assert is_result or re.search(rf"\b{name}\b", shown[name]), f"{name} is not used"
        else:
            assert ">>>" in docstring, f"{name} has no example"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_examples_run(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    told = []
    for section in dict.fromkeys(hooks.examples(package).values()):
        code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
        runner.run(parser.get_doctest(code, {}, package, package, 0), out=told.append)
        for path in tmp_path.iterdir():  # the next section begins in an empty folder
            path.rename(tmp_path.parent / f"{path.name}-{len(list(tmp_path.parent.iterdir()))}")
    assert runner.failures == 0 and runner.tries > 0, "".join(told)


def test_the_pages_differ_also_where_files_differ_by_their_case_only():
    assert len({path.lower() for path in PAGES}) == len(PAGES)


NOTEBOOKS = sorted((ROOT / "docs/gallery").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_shows_what_it_found(path):
    text = path.read_text()
    cells = hooks.notebooks.code_cells(json.loads(text))
    assert len(text) < 400_000
    assert not re.search(r"/(?:home|root|tmp|work|Users)/", text)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for cell in cells:
        has_picture = any(output["output_type"] == "display_data" for output in cell["outputs"])
        assert bool(cell["metadata"].get("alt")) == has_picture, "pictures have a description"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_finds_what_its_text_says(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GALLERY_SIZE", "small")
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = hooks.notebooks.run(json.loads(path.read_text()))
    assert all(names["CLAIMS"].values()), names["CLAIMS"]


def test_a_notebook_becomes_a_page_with_code_output_and_picture():
    page = hooks.notebooks.to_markdown(json.loads(NOTEBOOKS[0].read_text()))
    assert "```python\n" in page and "```text\n" in page
    assert re.search(r'<img alt="[^"]+" src="data:image/png;base64,', page)


class Page:
    def __init__(self, path):
        self.file = self
        self.src_uri = path


class Config:
    repo_url = None


def mended(text, page, repository=None):
    config = Config()
    config.repo_url = repository
    return hooks.on_page_markdown(text, Page(page), config)


def test_links_out_of_the_docs_lead_to_pages_of_the_site_or_to_the_code_host_or_nowhere():
    code = "[x](../flwr_leakage/params.py)"
    results = "[x](../simulations/benchmarks/results/text.md#a)"
    assert mended(code, "attacks.md") == "x"
    assert mended(code, "attacks.md", "https://host/us/it/") == (
        "[x](https://host/us/it/blob/main/flwr_leakage/params.py)"
    )
    assert mended(results, "attacks.md") == "[x](results/text.md#a)"
    assert mended("[x](../../../docs/attacks.md)", "results/text.md") == "[x](../attacks.md)"
    assert mended("[x](../scores.md)", "reference/scores/LAVP.md") == "[x](../../scores.md)"
    assert mended("[x](one_update.ipynb)", "gallery/index.md") == "[x](one_update.md)"
    assert mended("[x](https://arxiv.org) [y](#z)", "faq.md") == "[x](https://arxiv.org) [y](#z)"
