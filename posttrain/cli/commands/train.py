"""`posttrain METHOD [CONFIG.yaml] [--option value ...]`: one command for every method of METHODS."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from posttrain.cli.errors import UsageError, as_usage_error
from posttrain.cli.options.arguments import RunConfig, parse
from posttrain.cli.options.table import OptionSpec, table_of
from posttrain.cli.running import processes
from posttrain.cli.running.output import no_bars
from posttrain.core.options import resume_request
from posttrain.core.secrets import hidden_text

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


def main(method: str, words: list[str]) -> int:
    if any(word in ("-h", "--help") for word in words):
        print(help_of(method))
        return 0
    config = parse(method, words)
    os.environ.update(config.environment)
    if not processes.is_started():
        command = processes.command_of(config, words)
        if command is not None:
            return processes.run(command, config.environment)
    return train(config, words)


def train(config: RunConfig, words: list[str]) -> int:
    from safetensors import SafetensorError
    from transformers import TrainerCallback

    from posttrain.cli.running.assemble import trainer_of
    from posttrain.cli.running.run_record import write_record
    from posttrain.rewards.runtime.results import RewardError
    from posttrain.trainer.checkpoints.background_save import EXIT_CODE
    from posttrain.trainer.checkpoints.checkpoint import best_effort
    from posttrain.trainer.checkpoints.saving import nonfinite_weights

    no_bars()
    trainer = trainer_of(config)
    folder = Path(trainer.args.output_dir)

    class Record(TrainerCallback):
        """Written once the run is on its way: a resume that is refused leaves the record of the run that is there."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if args.should_save:
                with best_effort(f"The record of the run in {folder}"):
                    write_record(folder, config, ["posttrain", config.method, *words])

    trainer.add_callback(Record())
    try:
        as_usage_error(lambda: trainer.train(resume_from_checkpoint=_resume(config, folder)))
    except RewardError as error:
        return _ended(config.method, str(error))
    if bad := nonfinite_weights(trainer.model, trainer.args):
        return _ended(
            config.method,
            f"{bad[0]} (of {len(bad)} tensors) holds NaN or infinity, so no model is written to {folder}. The last checkpoint "
            "there is from before.",
        )
    try:
        trainer.save_model(trainer.args.output_dir)
    except (OSError, SafetensorError) as error:
        _ended(
            config.method,
            f"The model could not be written to {folder} ({error}). Checkpoints there are whole: once there is room, the same "
            f"command again or `posttrain export {folder}` takes the newest.",
        )
        return EXIT_CODE
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=config.get("dataset_name"))
    if trainer.args.should_save:
        print(f"  model       {trainer.args.output_dir}")
        sys.stdout.flush()
    return 0


def _ended(method: str, sentence: str) -> int:
    """For a run that began as it should and came to a bad end."""
    print(hidden_text(f"posttrain {method}: {sentence}"), file=sys.stderr)
    return 1


def _resume(config: RunConfig, folder: Path) -> Any:
    """The same command again continues where the last one stopped: True takes the newest checkpoint that is whole."""
    is_given = "resume_from_checkpoint" in config.values
    if config.get("fresh"):
        if is_given and resume_request(config.get("resume_from_checkpoint")):
            raise UsageError(
                "`fresh` starts from the beginning, and `resume_from_checkpoint` continues; give one of them."
            )
        return False
    return resume_request(config.get("resume_from_checkpoint")) if is_given else any(folder.glob("checkpoint-*"))


# ---- --help, from the option table: no library is imported for it --------------------------------------------------


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
