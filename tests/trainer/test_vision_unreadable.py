"""Images that cannot be read any more when their batch is made: left out exactly, or an error that names them."""

from __future__ import annotations

import logging

import pytest
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.data.images.limits import BadImage
from posttrain.trainer.step.unreadable import FEW, METRIC
from tests.data.picture_files import encoded, noise
from tests.trainer.vision_runs import answer, gradient, question, trainer_of

ROWS, GONE = 6, 2
COLUMNS = {"sft": ("completion",), "dpo": ("chosen", "rejected"), "kto": ("completion",)}


def rows_of_files(method, folder, rows=ROWS):
    """Rows of distinct pictures, each in a file of its own."""
    folder.mkdir(exist_ok=True)
    made = []
    for number in range(rows):
        (folder / f"{number}.png").write_bytes(encoded(noise(40, 40 + number, seed=number)))
        row = {"image": f"{number}.png", "prompt": [{"role": "user", "content": f"What is number {number}?"}]}
        row |= {column: [answer(f"{column} {number * 7}.")] for column in COLUMNS[method]}
        made.append(row | ({"label": number % 2 == 0} if method == "kto" else {}))
    return made


def run_of(method, tmp_path, rows=None, **options):
    folder = tmp_path / "pictures"
    given = {
        "train_dataset": rows or rows_of_files(method, folder),
        "image_root": str(folder),
        "check_images": "header",
    }
    return trainer_of(method, "qwen2_5_vl", tmp_path, **given | options)


def vanish(folder):
    (folder / f"{GONE}.png").unlink()


def cut_off(folder):
    path = folder / f"{GONE}.png"
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize("damage", [vanish, cut_off], ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("method", "layout", "split"), [("sft", RAGGED, 3), ("sft", PADDED, 1), ("dpo", SHARED, 2), ("dpo", PADDED, 6)]
)
def test_the_gradient_is_that_of_the_other_rows(method, layout, split, damage, tmp_path):
    """A sample of blank pixels and weight zero would still stand in the divisors of means over sequences and pairs."""
    trainer = run_of(method, tmp_path, on_bad_rows="drop")
    damage(tmp_path / "pictures")
    found = gradient(trainer, layout, split)
    assert trainer.metrics.totals[METRIC] == 1
    others = [row for number, row in enumerate(rows_of_files(method, tmp_path / "pictures")) if number != GONE]
    expected = gradient(run_of(method, tmp_path, others), layout, len(others))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_a_packed_block_keeps_its_other_texts(tmp_path):
    trainer = run_of("sft", tmp_path, on_bad_rows="drop", packing=True, max_length=4096)
    vanish(tmp_path / "pictures")
    (batch,) = trainer.get_train_dataloader()
    assert sorted(batch.rows) == [row for row in range(ROWS) if row != GONE]


def rows_of_bytes():
    """The picture of one row is cut off below its header, which a check of headers does not see."""
    made = []
    for number in range(ROWS):
        data = encoded(noise(40, 40 + number, seed=number))
        data = data[:300] if number == GONE else data
        made.append(
            {"image": data, "prompt": [question(f"Number {number}?")], "completion": [answer(f"It is {number}.")]}
        )
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_the_image_is_named_once_and_a_resume_is_exact(workers, tmp_path, caplog):
    """Two epochs, with a checkpoint after the first row that is left out: the resumed run ends with the weights of the whole."""
    options = {"on_bad_rows": "drop", "per_device_train_batch_size": 1, "max_steps": 2 * ROWS, "logging_steps": 1}
    options |= {"dtype": torch.float32, "dataloader_num_workers": workers, "save_strategy": "steps"}
    trainer = run_of("sft", tmp_path, rows_of_bytes(), save_steps=ROWS + 2, **options)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (named,) = [record.message for record in caplog.records if "left out" in record.message]
    assert f"train, row {GONE}, column 'image'" in named
    assert max(entry.get(METRIC, 0) for entry in trainer.state.log_history) == 2
    whole = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    resumed = run_of("sft", tmp_path, rows_of_bytes(), save_steps=ROWS + 2, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{ROWS + 2}"))
    assert all(torch.equal(value, whole[name]) for name, value in resumed.model.state_dict().items())
    assert resumed.metrics.totals == trainer.metrics.totals


def test_a_resume_without_a_file_is_refused(tmp_path):
    """The row is found bad when the data is prepared again: the run would be another."""
    options = {"on_bad_rows": "drop", "save_strategy": "steps", "save_steps": 1, "dtype": torch.float32}
    rows = rows_of_files("sft", tmp_path / "pictures")
    run_of("sft", tmp_path, rows, **options).train()
    vanish(tmp_path / "pictures")
    with pytest.raises(ValueError, match=f"dataset: {ROWS} rows -> {ROWS - 1} rows"):
        run_of("sft", tmp_path, rows, **options).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("damage", [vanish, cut_off], ids=lambda one: one.__name__)
def test_it_is_an_error_unless_rows_may_be_dropped(damage, tmp_path):
    trainer = run_of("sft", tmp_path)
    damage(tmp_path / "pictures")
    with pytest.raises(
        BadImage, match=rf"train, row {GONE}, column 'image'.*{GONE}\.png.*Restore it, or .*on_bad_rows"
    ):
        list(trainer.get_train_dataloader())


def test_a_folder_that_is_gone_ends_the_run(tmp_path):
    rows = rows_of_files("sft", tmp_path / "pictures", rows=3 * FEW)
    trainer = run_of("sft", tmp_path, rows, on_bad_rows="drop", max_steps=3 * FEW)
    for number in range(FEW + 5):
        (tmp_path / "pictures" / f"{number}.png").unlink()
    with pytest.raises(RuntimeError, match=f"{FEW + 1} of .* rows had to be left out"):
        trainer.train()
