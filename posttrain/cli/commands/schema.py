"""`posttrain schema METHOD`: a JSON Schema of a method's file of options, for editors and for programs that write such files."""

from __future__ import annotations

import json
from typing import Any

from posttrain.cli.errors import UsageError, nearest
from posttrain.cli.options.arguments import METHOD_KEY
from posttrain.cli.options.run import ALIASES
from posttrain.cli.options.table import OptionSpec, method_names, table_of
from posttrain.core.config_file import ENVIRONMENT

USAGE = """usage: posttrain schema METHOD

Prints a JSON Schema. In an editor with YAML support: posttrain schema sft > sft.schema.json, and as the first line of the file
# yaml-language-server: $schema=sft.schema.json"""
TYPES = {
    "bool": "boolean", "int": "integer", "float": "number", "str": "string", "list": "array", "dict": "object", "none": "null",
}  # fmt: skip
NUMBER_AS_TEXT = {"type": "string", "pattern": "^[+-]?([0-9][0-9_]*[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?$"}
"""YAML 1.1 reads 1e-5 as text; the command line reads it as a number."""


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if words[0] not in method_names():
        raise UsageError(f"there is no method {words[0]!r}.{nearest(words[0], method_names())}")
    print(json.dumps(schema_of(words[0]), indent=1))
    return 0


def schema_of(method: str) -> dict[str, Any]:
    table = table_of(method)
    properties: dict[str, Any] = {METHOD_KEY: {"const": method}, ENVIRONMENT: {"type": "object"}}
    properties |= {name: _property(spec) for name, spec in table.options.items()}
    properties |= {old: properties[name] for old, name in ALIASES.items() if name in properties}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"posttrain {method}",
        "description": table.summary,
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _property(spec: OptionSpec) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = []
    for kind in spec.kinds:
        one: dict[str, Any] = {"type": TYPES[kind]}
        if kind == "str" and spec.choices:
            one["enum"] = list(spec.choices)
        if kind == "list":
            one["items"] = {"anyOf": [{"type": TYPES[item]} for item in spec.items or ("str",)]}
        kinds.append(one)
    if "float" in spec.kinds and "str" not in spec.kinds:
        kinds.append(NUMBER_AS_TEXT)
    shown = {"description": spec.help, "default": spec.default}
    return {**shown, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}
