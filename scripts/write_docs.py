"""Write the generated parts of docs/, README and the command line: option tables, what METHODS decides, the GPU receipt.

`--check` fails if one is out of date.

A page holds `<!-- options: DPOConfig -->` and `<!-- end of options -->`; what is between them is replaced. A config's table has the
options that it declares itself or takes from a mixin; those of BaseConfig have a page of their own. `options: RefusedOptions` are
those of TRL that have no effect here.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from posttrain.methods.table import METHODS
from posttrain.rewards import BUILT_IN_REWARDS
from posttrain.rewards.runtime.invoke import OURS, Wants
from posttrain.trainer.options.base import BaseConfig, default_of, is_ours
from posttrain.trainer.options.online import RefusedOptions
from scripts import gpu_receipt, method_pages, option_specs
from scripts.method_pages import DOCS

README = DOCS.parent / "README.md"
RECEIPT = re.compile(r"(<!-- gpu receipt -->).*?(<!-- end of gpu receipt -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- options: (\w+) -->\n)(.*?)(<!-- end of options -->)", re.DOTALL)
REWARDS = re.compile(r"(<!-- rewards -->\n).*?(<!-- end of rewards -->)", re.DOTALL)
HEADER = "| option | type | default | what it does |\n|---|---|---|---|\n"


def configs() -> dict[str, type]:
    """Every config by name, the shared one first."""
    found = [BaseConfig, *(method.config_class for method in METHODS.values())]
    return {config.__name__: config for config in found}


def own_options(config: type) -> list[dataclasses.Field]:
    """Options that `config` declares or takes from a mixin, in the order of declaration; an override counts as its own."""
    shared = BaseConfig.__mro__[1:] if config is BaseConfig else BaseConfig.__mro__
    declared = {name for base in config.__mro__ if base not in shared for name in inspect.get_annotations(base)}
    return [field for field in dataclasses.fields(config) if field.name in declared and is_ours(field)]


def table(config: type) -> str:
    options = dataclasses.fields(config) if config is RefusedOptions else own_options(config)
    return HEADER + "".join(row(field, written_type(config, field.name)) for field in options)


def written_type(config: type, name: str) -> str:
    """As it stands in the source. Not `field.type`, in whose place HfArgumentParser puts the type itself."""
    return next(kinds[name] for base in config.__mro__ if name in (kinds := inspect.get_annotations(base)))


def row(field: dataclasses.Field, kind: str) -> str:
    cells = (f"`{field.name}`", f"`{kind}`", f"`{shown(default_of(field))}`", field.metadata["help"])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def shown(value: Any) -> str:
    """A default as one would write it; 0.00002 as 2e-05, "sigmoid" with double quotes."""
    return repr(value).replace("'", '"')


def rewritten(text: str) -> str:
    """A page with every table replaced by that of its config."""
    known = configs() | {RefusedOptions.__name__: RefusedOptions}

    def fill(match: re.Match[str]) -> str:
        if match[2] not in known:
            raise ValueError(f"There is no config {match[2]}; known are {', '.join(known)}.")
        return match[1] + table(known[match[2]]) + match[4]

    return REWARDS.sub(lambda match: match[1] + reward_table() + match[2], TABLE.sub(fill, text))


def reward_table() -> str:
    """The built-in rewards: what each gives, in the words of its docstrings, and which columns it reads."""
    lines = ["| name | columns | what it gives |", "|---|---|---|"]
    for name, (module, arguments) in BUILT_IN_REWARDS.items():
        made = getattr(importlib.import_module(module), name)
        reward = made if arguments is None else made(*arguments)
        columns = ", ".join(f"`{column}`" for column in sorted(Wants(reward).required - set(OURS))) or "none"
        told = inspect.getdoc(made)
        if arguments is not None:
            values = ", ".join(f"{key} {value:g}" for key, value in dataclasses.asdict(reward).items())
            told = f"{told} {inspect.getdoc(type(reward))} Made by name, it has {values}."
        told = " ".join(told.split()).replace("|", "\\|")
        lines.append(f"| `{name}` | {columns} | {told} |")
    return "\n".join(lines) + "\n"


def outdated() -> dict[Path, str]:
    """File -> its text with current parts, for every file whose parts are not, or that is not there."""
    pages = method_pages.pages()
    fresh = {page: rewritten(method_pages.rewritten(text, pages)) for page, text in pages.items()}
    said = gpu_receipt.in_words(gpu_receipt.read())
    fresh[README] = RECEIPT.sub(rf"\g<1>{said}\g<2>", README.read_text(encoding="utf-8"))
    found = {
        page: text for page, text in fresh.items() if not page.exists() or text != page.read_text(encoding="utf-8")
    }
    specs = option_specs.written()
    if not option_specs.FILE.exists() or option_specs.FILE.read_text(encoding="utf-8") != specs:
        found[option_specs.FILE] = specs
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a table is out of date; write nothing")
    check = parser.parse_args().check
    pages = outdated()
    for page, text in pages.items():
        print(f"{page.relative_to(DOCS.parent)} {'is out of date: run `make docs`' if check else 'written'}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return 1 if check and pages else 0


if __name__ == "__main__":
    sys.exit(main())
