"""`posttrain completion bash|zsh|fish`: a script that completes commands and options, from the same table as `--help`."""

from __future__ import annotations

from posttrain.cli.commands import commands
from posttrain.cli.errors import UsageError
from posttrain.cli.options.table import method_names, table_of

USAGE = """usage: posttrain completion bash|zsh|fish

bash:  eval "$(posttrain completion bash)"        in ~/.bashrc
zsh:   eval "$(posttrain completion zsh)"         in ~/.zshrc, after compinit
fish:  posttrain completion fish | source         in ~/.config/fish/config.fish"""
BASH = """_posttrain() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  case "$word" in
    --*) COMPREPLY=($(compgen -W "$options" -- "$word"));;
    *) COMPREPLY=($(compgen -f -- "$word"));;
  esac
}}
complete -o filenames -F _posttrain posttrain
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if words[0] not in SHELLS:
        raise UsageError(f"there is no completion for {words[0]!r}; there is for {', '.join(SHELLS)}.")
    print(SHELLS[words[0]](), end="")
    return 0


def _options() -> dict[str, list[str]]:
    return {method: [f"--{name}" for name in table_of(method).shown] for method in method_names()}


def bash() -> str:
    cases = "\n".join(f'    {method}) local options="{" ".join(options)}";;' for method, options in _options().items())
    return BASH.format(commands=" ".join(commands()), cases=cases)


def zsh() -> str:
    return ZSH + bash()


def fish() -> str:
    lines = [
        f"complete -c posttrain -n __fish_use_subcommand -f -a {name} -d '{summary.replace(chr(39), '')}'"
        for name, (_, summary) in commands().items()
    ]
    for method, options in _options().items():
        lines += [f"complete -c posttrain -n '__fish_seen_subcommand_from {method}' -l {name[2:]}" for name in options]
    return "\n".join(lines) + "\n"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
