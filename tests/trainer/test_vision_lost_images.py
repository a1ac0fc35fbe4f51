"""An image that is lost or broken after preparation ends a run with a sentence that names dataset, row, column and file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import TrainerCallback

from tests.trainer.resumable_run import checksum
from tests.trainer.vision_runs import PICTURES, answer, question, trainer_of

LOST = 2
"""The row whose image is broken."""
CHANGED = "is not what it was at preparation: prepare the dataset again."


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


def spoil(file: Path) -> None:
    """Its pixels cannot be unpacked any more; size and time of the file are what they were."""
    before, content = file.stat(), bytearray(file.read_bytes())
    content[60:-20] = bytes(len(content) - 80)
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def show_another(file: Path) -> None:
    Image.new("RGB", (20, 20)).save(file)


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


BREAKS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "vanished": (Path.unlink, "auto", "cannot be opened (No such file or directory)."),
    "cut short": (cut_short, "auto", CHANGED),
    "cut short, unread": (cut_short, "header", CHANGED),
    "spoiled": (spoil, "auto", CHANGED),
    "spoiled, unread": (spoil, "header", "is damaged or cut off (OSError: "),
    "another picture": (show_another, "auto", CHANGED),
    "a folder": (make_a_folder, "auto", "is not a plain file, but a folder, a pipe or a device."),
}
"""What happens -> (how, `check_images`, what is said of the file)."""


def files(folder: Path) -> list[str]:
    names = [f"{number}.png" for number in range(len(PICTURES))]
    for name, picture in zip(names, PICTURES):
        if not (folder / name).exists():  # a dataset knows when its files were written
            picture.save(folder / name)
    return names


def in_a_column(name: str) -> dict[str, Any]:
    return {"image": name, "prompt": [question("What is it?")], "completion": [answer("A cat.")]}


def in_a_list(name: str) -> dict[str, Any]:
    text = [{"role": "user", "content": "<image>And this?<image>"}]
    return {"images": ["0.png", name], "prompt": text, "completion": [answer("A cat.")]}


def in_a_message(name: str) -> dict[str, Any]:
    return {"prompt": [question("What is it?", name)], "completion": [answer("A cat.")]}


def in_a_prompt(name: str) -> dict[str, Any]:
    return {"prompt": [question("What is it?", name)]}


def in_a_pair(name: str) -> dict[str, Any]:
    return in_a_prompt(name) | {"chosen": [answer("A cat.")], "rejected": [answer("A dog.")]}


PAIRS = {"num_generations": 2, "max_completion_length": 2, "reward_funcs": checksum, "reward_workers": 0}
PLACES: dict[str, tuple[str, Callable[[str], dict[str, Any]], dict[str, Any], str]] = {
    "column": ("sft", in_a_column, {}, "train, row 2, column 'image': "),
    "list": ("sft", in_a_list, {}, "train, row 2, column 'images': image 1: "),
    "message": ("sft", in_a_message, {}, "train, row 2, column 'prompt': message 0, part 1: "),
    "pair": ("dpo", in_a_pair, {}, "train, row 2, column 'prompt': message 0, part 1: "),
    "prompt": (
        "grpo",
        in_a_prompt,
        PAIRS | {"dataloader_num_workers": 0},
        "train, row 2, column 'prompt': message 0, part 1: ",
    ),
}
"""Where the image stands -> (method, row of a file, options, how the sentence begins)."""


def trainer_on_files(folder: Path, method: str, row: Callable[[str], dict[str, Any]], **options: Any) -> Any:
    rows = [row(name) for name in files(folder)]
    shared = {"image_root": str(folder), "dataloader_num_workers": 2, "max_steps": 4, "learning_rate": 1e-3}
    return trainer_of(method, "llava", folder, torch.float32, **{"train_dataset": rows, **shared, **options})


def refusal(trainer: Any) -> str:
    """The last line: where a worker of the loader fails, torch hands on its traceback as the message of a RuntimeError.

    `pytest.raises` would keep the frames, and with them the loader, whose workers then wait for seconds before they end.
    """
    try:
        trainer.train()
    except (ValueError, RuntimeError) as error:
        return str(error).strip().splitlines()[-1]
    raise AssertionError("the run went through")


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_has_become_of_a_file_is_said(how, workers, tmp_path):
    broken, check, said = BREAKS[how]
    options = {"check_images": check, "dataloader_num_workers": workers}
    trainer = trainer_on_files(tmp_path, "sft", in_a_column, **options)
    broken(tmp_path / f"{LOST}.png")
    found = refusal(trainer)
    assert f"train, row {LOST}, column 'image': {tmp_path / f'{LOST}.png'}" in found
    assert said in found


@pytest.mark.parametrize("place", PLACES)
def test_where_the_image_stands_is_said(place, tmp_path):
    method, row, options, where = PLACES[place]
    trainer = trainer_on_files(tmp_path, method, row, **options)
    (tmp_path / f"{LOST}.png").unlink()
    found = refusal(trainer)
    assert f"{where}{tmp_path / f'{LOST}.png'} cannot be opened" in found


@pytest.mark.parametrize("named", [False, True])
def test_the_evaluation_dataset_is_named(named, tmp_path):
    rows = [in_a_column(name) for name in files(tmp_path)]
    given = {"eval_dataset": {"photos": rows} if named else rows, "train_dataset": rows[:2], "eval_strategy": "steps"}
    trainer = trainer_on_files(tmp_path, "sft", in_a_column, eval_steps=1, **given)
    (tmp_path / f"{LOST}.png").unlink()
    found = refusal(trainer)
    assert f"{'photos' if named else 'eval'}, row {LOST}, column 'image': {tmp_path}" in found


class Lose(TrainerCallback):
    """The image is moved away after step 3, one after a checkpoint."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.file.rename(self.file.with_suffix(".away"))


def test_a_run_is_resumed_exactly_when_its_image_is_back(tmp_path):
    """An error in a worker leaves the folder free for the next run in the same process, as in a notebook."""
    options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    options |= {"image_augmentation": "light", "save_in_background": False}
    file, ends = tmp_path / f"{LOST}.png", []
    for name in ("whole", "lost"):
        made = {"folder": tmp_path, "method": "sft", "row": in_a_column, "output_dir": str(tmp_path / name)} | options
        trainer = trainer_on_files(**made)
        if name == "lost":
            trainer.add_callback(Lose(file))
            assert f"train, row {LOST}, column 'image': {file} cannot be opened" in refusal(trainer)
            file.with_suffix(".away").rename(file)
            trainer = trainer_on_files(**made)
        trainer.train(resume_from_checkpoint=name == "lost")
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        ends.append((losses, dict(trainer.model.named_parameters())))
    (losses, weights), (losses_of_resumed, weights_of_resumed) = ends
    assert len(losses) == 8
    assert losses == losses_of_resumed
    assert all(torch.equal(one, weights_of_resumed[name]) for name, one in weights.items())
