"""What METHODS decides in docs/: a page for every method, the facts at its top, the list in index.md, the menu of the site.

A page holds `<!-- method: dpo -->` and `<!-- end of method -->`, index.md `<!-- methods -->` and `<!-- end of methods -->`; what is
between them is replaced. A method without a page gets one, from the docstring of its trainer.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from posttrain.data.rows.formats import RowFormat
from posttrain.methods.table import METHODS, Method

DOCS = Path(__file__).resolve().parents[1] / "docs"
FACTS = re.compile(r"(<!-- method: (\w+) -->\n)(.*?)(<!-- end of method -->)", re.DOTALL)
LIST = re.compile(r"(<!-- methods -->\n)(.*?)(<!-- end of methods -->)", re.DOTALL)
NUMBERS = dict.fromkeys(("tokens", "sequences", "units", "batches"), "N")
"""What a step divides by: a number in a run, a letter on a page."""


def title_of(name: str, text: str) -> str:
    """The heading of a page, such as "Reward models"."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/{name}.md has no heading: its first line should be `# ` and the name of the method.")
    return found[1]


def facts(name: str) -> str:
    """How the method is called, which rows it reads, and its loss as it comes."""
    method = METHODS[name]
    rows = [f"| Rows | {row_words(form)} |" for form in method.trainer_class.formats]
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| In Python | `from posttrain import {method.config}, {method.trainer}` |",
            f"| On the command line | `posttrain {name} CONFIG.yaml`, or flags alone; `posttrain {name} --help` lists them |",
            *rows,
            *([f"| State | {method.status} |"] if method.status != "stable" else []),
            *loss_lines(name),
            "",
        ]
    )


def loss_lines(name: str) -> list[str]:
    """The loss with the default options."""
    method = METHODS[name]
    formula = method.trainer_class.formula(method.config_class(output_dir=f"runs/{name}"), NUMBERS)
    about = "The loss with the default options; `posttrain explain CONFIG.yaml` prints it with the numbers of a run:"
    return ["", about, "", "```text", *formula.lines(), "```"]


def row_words(form: RowFormat) -> str:
    """Columns of a row, the needed ones in all their alternatives."""
    columns = [" and ".join(f"`{column}`" for column in needed) for needed in form.required]
    optional = ", ".join(f"`{column}`" for column in form.optional)
    return f"[{form.name}](data.md): {', or '.join(columns)}" + (f"; optional {optional}" if optional else "")


def new_page(name: str, method: Method) -> str:
    """For a method about which nobody has written yet."""
    about = inspect.getdoc(method.trainer_class) or method.summary + "."
    parts = [
        f"# {method.summary}",
        about,
        "## In short",
        f"<!-- method: {name} -->\n<!-- end of method -->",
        "## Options",
        "These come on top of [the shared ones](options.md).",
        f"<!-- options: {method.config} -->\n<!-- end of options -->",
    ]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Every page of docs/ with its text, those included that methods lack."""
    found = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
    missing = {
        path: new_page(name, method) for name, method in METHODS.items() if (path := DOCS / f"{name}.md") not in found
    }
    return found | missing


def rewritten(text: str, texts: dict[Path, str]) -> str:
    """A page with its facts and lists replaced; `texts` are all pages."""
    listed = "".join(
        f"| [{title_of(name, texts[DOCS / f'{name}.md'])}]({name}.md) | `posttrain {name}` | {method.summary} |\n"
        for name, method in METHODS.items()
    )
    table = "| method | command | |\n|---|---|---|\n" + listed
    text = FACTS.sub(lambda match: match[1] + facts(match[2]) + match[4], text)
    return LIST.sub(lambda match: match[1] + table + match[3], text)


def menu() -> list[dict[str, str]]:
    """The methods' part of the site's menu."""
    texts = pages()
    return [{title_of(name, texts[DOCS / f"{name}.md"]): f"{name}.md"} for name in METHODS]
