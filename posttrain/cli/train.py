"""`posttrain METHOD [CONFIG.yaml] [--option value ...]`: one command for every method of METHODS."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from posttrain.cli import launch
from posttrain.cli.arguments import RunConfig, parse
from posttrain.cli.help_text import help_of
from posttrain.cli.output import no_bars


def main(method: str, words: list[str]) -> int:
    if any(word in ("-h", "--help") for word in words):
        print(help_of(method))
        return 0
    config = parse(method, words)
    os.environ.update(config.environment)
    if not launch.is_started():
        command = launch.command_of(config, words)
        if command is not None:
            return launch.run(command, config.environment)
    return train(config, words)


def train(config: RunConfig, words: list[str]) -> int:
    from posttrain.cli.assemble import told, trainer_of
    from posttrain.cli.run_record import write_record

    no_bars()
    trainer = trainer_of(config)
    if trainer.args.should_save:
        write_record(Path(trainer.args.output_dir), config, ["posttrain", config.method, *words])
    told(lambda: trainer.train(resume_from_checkpoint=_resume(config, Path(trainer.args.output_dir))))
    trainer.save_model(trainer.args.output_dir)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=config.get("dataset_name"))
    if trainer.args.should_save:
        print(f"  model       {trainer.args.output_dir}")
        sys.stdout.flush()
    return 0


def _resume(config: RunConfig, folder: Path) -> Any:
    """The same command again goes on where the last one stopped: True takes the newest checkpoint that is whole."""
    given = config.get("resume_from_checkpoint")
    if given is None:
        return any(folder.glob("checkpoint-*"))
    return {"true": True, "auto": True, "false": False}.get(str(given).lower(), given)
