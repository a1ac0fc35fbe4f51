"""`posttrain METHOD --help`, from the option table: no library is imported for it."""

from __future__ import annotations

import shutil
import textwrap

from posttrain.cli.options.table import OptionSpec, table_of

GROUP_TITLES = {
    "model": "Model and adapter",
    "data": "Data",
    "rewards": "Rewards, tools, environments",
    "method": "{method}",
    "shared": "All methods",
    "launch": "Start, processes and machines",
    "training": "Training (transformers.TrainingArguments)",
}
LEFT = 36


def help_of(method: str) -> str:
    table = table_of(method)
    width = max(60, min(shutil.get_terminal_size((110, 40)).columns, 130))
    parts = [
        f"usage: posttrain {method} [CONFIG.yaml] [--option value ...]",
        f"\n{table.summary}. Defaults < file < flags.",
        "The same command again continues where the last one stopped; with --fresh it starts from the beginning.",
        "A switch is --name or --no_name; a list is several words; a mapping is JSON. none stands for no value.",
    ]
    for group, title in GROUP_TITLES.items():
        options = [spec for spec in table.options.values() if spec.group == group]
        if options:
            parts.append(f"\n{title.format(method=method.upper())}")
            parts += [_entry(spec, width) for spec in options]
    return "\n".join(parts)


def _entry(spec: OptionSpec, width: int) -> str:
    kinds = [kind for kind in spec.kinds if kind != "none"]
    left = f"  --{spec.name} {'|'.join(kinds) if kinds != ['bool'] else ''}".rstrip()
    choices = f" One of {', '.join(spec.choices)}." if spec.choices else ""
    text = f"{spec.help}{choices} (default: {default_text(spec)})".strip()
    lines = textwrap.wrap(text, width - LEFT)
    pad = " " * LEFT
    first = f"{left:<{LEFT - 1}} " if len(left) < LEFT else f"{left}\n{pad}"
    return first + f"\n{pad}".join(lines)


def default_text(spec: OptionSpec) -> str:
    value = spec.default
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return str(value) if not isinstance(value, str) or value else "''"
