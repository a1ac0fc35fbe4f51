"""README.md of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posttrain.trainer.base import BaseTrainer


def write_model_card(
    trainer: BaseTrainer, model_name: str | None, dataset_name: str | None, tags: str | list[str] | None
) -> None:
    """Write the card into the output folder."""
    name = model_name or Path(trainer.args.output_dir).name
    lines = [f"# {name}", "", f"Trained with posttrain ({trainer.method}) from {trainer.loaded.name}."]
    (Path(trainer.args.output_dir) / "README.md").write_text("\n".join(lines), encoding="utf-8")
