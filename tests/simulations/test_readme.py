"""The snippets of the README and of the guide need nothing but what an app of one's own has."""

import re
from pathlib import Path

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from PIL import Image
from torch import nn

from flwr_leakage.flower import ClientAudit, ServerAudit

ROOT = Path(__file__).parents[2]


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))


def snippets(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_one_line_a_side_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    strategy = FedAvg()
    for page in ("README.md", "docs/flower.md"):
        client, server = snippets(page)[:2]
        names = {"Net": Net, "app": ClientApp(), "strategy": strategy}
        exec(client, names)
        exec(server, names)
        assert isinstance(names["app"], ClientApp)
        assert names["strategy"].strategy is strategy
        names["strategy"].audit.tracker.close()
        (tmp_path / "leakage").rename(tmp_path / page.replace("/", "-"))


def test_the_third_snippet_of_the_readme_needs_nothing(capsys):
    exec(snippets("README.md")[2], {})
    assert "exact_batch" in capsys.readouterr().out


def test_the_snippets_by_hand_import_and_define_what_they_use(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client, server = snippets("docs/flower.md")[-2:]
    names = {"Net": Net, "app": ClientApp(), "Message": Message, "Context": Context}
    exec(client, names)
    assert isinstance(names["audit"], ClientAudit)
    audit, start, _ = server.partition("HonestButCurious(FedAvg()")
    exec(audit, names)
    assert isinstance(names["audit"], ServerAudit)
    assert start
    names["tracker"].close()


def test_the_tutorial_does_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "tutorial"}
    for block in snippets("docs/tutorial.md"):
        exec(block, names)
    assert all(names["psnr"].value > 48)
    plain, pruned = capsys.readouterr().out.splitlines()[-2:]
    assert plain.startswith("| plain | – | 1 | 2 | 2 | 100% | 0% | 0% | 120.0")
    assert pruned.startswith("| pruned | GradientPruning | 1 | 2 | 2 |"), "it is attacked, too"
    assert (tmp_path / "leakage" / "plain" / "report.html").is_file()


def anchors(page):
    """The anchors that a code host gives a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_the_pages_lead_somewhere_and_the_site_shows_every_page():
    results = ROOT / "simulations/benchmarks"
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in [*pages, results / "RESULTS.md", *sorted((results / "results").glob("*.md"))]:
        links = re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text())
        for path, anchor in links:
            target = page.parent / path if path else page
            assert target.exists(), (page.name, path)
            if anchor:
                assert anchor in anchors(target), (page.name, path, anchor)
    shown = set(re.findall(r"- (?:.*: )?([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.M))
    kept = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in
            (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")}  # fmt: skip
    assert shown == {name for name in kept if not name.startswith("reference/")}
    listed = set(re.findall(r"results/([\w-]+\.md)", (results / "RESULTS.md").read_text()))
    assert listed == {"README.md", *(path.name for path in (results / "results").glob("*.md"))}


def test_the_recipe_for_hugging_face_data_sets(monkeypatch):
    flwr_datasets = pytest.importorskip("flwr_datasets")
    datasets = pytest.importorskip("datasets")
    images = [Image.new("L", (28, 28), level) for level in range(200)]
    table = datasets.Dataset.from_dict({"image": images, "label": [i % 10 for i in range(200)]})

    class Local:
        """As ``flwr_datasets.FederatedDataset``, with no download."""

        def __init__(self, dataset, partitioners):
            self.partitioner = partitioners["train"]
            self.partitioner.dataset = table

        def load_partition(self, partition_id):
            return self.partitioner.load_partition(partition_id)

        def load_split(self, split):
            return table

    monkeypatch.setattr(flwr_datasets, "FederatedDataset", Local)
    names = {}
    exec(next(code for code in snippets("docs/simulations.md") if "flwr_datasets" in code), names)
    assert len(names["train"]) == 200 and names["data"].num_clients == 10
    assert names["batch"].inputs.shape[1:] == (1, 28, 28)
