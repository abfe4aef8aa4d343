"""The page of the documentation on records, made of the types of the records.

python tests/support/records_page.py > docs/records.md
"""

import json

from flwr_leakage.tracking.lines import LINES, VERSION, schema

IMAGES = "`client`/`images` is what a sample is: `image`, `text` or `row`."
HEAD = f"""# Records

A run folder holds `records.jsonl`, `images/` and, if the command or a config ran it, `run.json`; an
app of your own has none. Every number, event, image and text is a line of `records.jsonl`, a JSON
object. Its `type` names what it is, and its `version` the format of the line, which is {VERSION}
now. This page is made of the package's own types, and a test compares them.

```python
from flwr_leakage.tracking import read_run

run = read_run("outputs/RUN")
run.records, run.events, run.images, run.texts, run.metadata, run.problems
run.to_pandas()  # a row a number
```

`read_run` opens runs of all versions: it brings each line of an earlier version up to date. A run
of a newer version is refused with a sentence that says so. A line that cannot be read is left out
and named in `problems`. Lines have at most 64 KiB, numbers lie in ±10¹⁰⁰, and a text keeps 1,024
tokens.

| version | written | what changed |
|---|---|---|
| 1 | until 26 November 2026 | Lines hold no version. Early ones have neither `error` nor `state`. |
| 2 | since then | Each line has its version, and a number all of its fields. The unit of {IMAGES} |

`run.json` holds the version too, as `version`, beside the configuration, the seed, the versions of
packages, the commit, the threat model in words, and when and how the run was started.
"""

TITLES = {
    "record": "Numbers", "event": "Events", "image": "Images", "text": "Texts",
    "run": "Begin and end",
}  # fmt: skip


def page() -> str:
    """Return the page in Markdown."""
    found = schema()
    parts = [HEAD]
    for kind in found["oneOf"]:
        rows = [
            f"| `{name}` | {_type(node)} | {_told(node.get('description', ''))} |"
            for name, node in kind["properties"].items() if name != "version"
        ]  # fmt: skip
        head = f'## {TITLES[kind["title"]]}: `"type": "{kind["title"]}"`'
        name = LINES[kind["title"]].__name__
        parts.append(f"{head}\n\n{kind['description']} In Python a `{name}`.\n")
        parts.append("\n".join(["| field | type | meaning |", "|---|---|---|", *rows]) + "\n")
    written = json.dumps(found, indent=1, ensure_ascii=False)
    parts.append(
        "## The schema\n\nJSON schema of one line, draft 2020-12, as "
        f"`flwr_leakage.tracking.schema()` returns it.\n\n```json\n{written}\n```\n"
    )
    return "\n".join(parts)


def _type(node: dict) -> str:
    if "const" in node:
        return f'`"{node["const"]}"`'
    if "enum" in node:
        return ", ".join(f'`"{value}"`' for value in node["enum"])
    if "items" in node:
        return f"array of {node['items']['type']}s"
    kinds = node["type"]
    return " or ".join(kinds) if isinstance(kinds, list) else kinds


def _told(text: str) -> str:
    text = text.replace("``None``", "`null`").replace("``", "`")
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    print(page(), end="")
