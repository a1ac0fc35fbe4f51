"""`posttrain replay RUN`: an asynchronous run once more, on the groups of its journal and in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.cli.commands import train
from posttrain.cli.errors import UsageError
from posttrain.cli.options.arguments import parse
from posttrain.cli.running.run_record import CONFIG_FILE

USAGE = """usage: posttrain replay RUN [--output_dir FOLDER] [--option value ...]

Trains RUN, which had `async_rollouts` and `keep_journal`, once more: the same groups in the same order, from its journal. Nothing
is written or judged anew. On a CPU the weights become the same to the bit, and the command says whether they did.
FOLDER is RUN-replay unless it is given; other options take precedence over those of RUN. Exit code 1: the weights differ."""


def main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    run, more = Path(words[0]), words[1:]
    if not (run / CONFIG_FILE).is_file():
        raise UsageError(f"there is no {CONFIG_FILE} in {run}: name the folder of a run that `posttrain METHOD` began.")
    method = _recorded(run)["method"]
    words = [str(run / CONFIG_FILE), "--replay_from", str(run), "--output_dir", f"{run}-replay", *more]
    code = train.main(method, words)
    if code == 0:
        sentence, is_same = compared(run, Path(parse(method, words).get("output_dir")))
        print(f"  replay      {sentence}")
        code = int(not is_same)
    return code


def _recorded(run: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))


def compared(run: Path, again: Path) -> tuple[str, bool]:
    """What there is to say about the weights of both, and whether nothing speaks against them."""
    import torch
    from safetensors.torch import load_file

    files = sorted(path.name for path in run.glob("*.safetensors"))
    if not files:
        return f"{run} has no weights to compare with: it did not come to its end.", True
    for name in files:
        if not (again / name).is_file():
            return f"{again} has no {name}, and {run} has.", False
        before, after = load_file(run / name), load_file(again / name)
        for tensor, values in before.items():
            if tensor not in after or not torch.equal(values, after[tensor]):
                return f"{tensor} in {name} is not what it is in {run}.", False
    return f"all weights are those of {run}, to the bit.", True
