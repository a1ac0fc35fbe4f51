"""Options of images: what is wrong is a sentence when the options are read."""

from __future__ import annotations

import pytest

from posttrain.methods.table import METHODS
from tests.cli.runs import posttrain


def config(tmp_path, **options):
    return METHODS["sft"].config_class(output_dir=str(tmp_path), report_to="none", **options)


WRONG = [
    ({"image_processor_kwargs": "[1]"}, r"`image_processor_kwargs` is '\[1\]'; it must be a mapping"),
    ({"image_processor_kwargs": [("a", 1)]}, r"`image_processor_kwargs` is \[.*\]; it must be a mapping"),
    (
        {"image_processor_kwargs": "{size: 5}"},
        r"`image_processor_kwargs` is '\{size: 5\}', which is not JSON \(Expecting",
    ),
    ({"min_pixels": 3137, "max_pixels": 3136}, "`min_pixels` is 3137, more than `max_pixels`, which is 3136"),
    ({"image_augmentation": [{"name": "RandomCrop", "size": 5000}]}, r"`image_augmentation`: .*RandomCrop.* cannot be"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda one: "-".join(one) if isinstance(one, dict) else "")
def test_wrong_options_are_refused_in_words(options, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        config(tmp_path, **options)


def test_right_options_are_taken(tmp_path):
    assert config(tmp_path, image_processor_kwargs='{"a": 1}').image_processor_kwargs == {"a": 1}
    assert config(tmp_path, image_processor_kwargs={"a": 1}).image_processor_kwargs == {"a": 1}
    for pixels in ({"min_pixels": 9}, {"max_pixels": 9}, {"min_pixels": 9, "max_pixels": 9}):
        config(tmp_path, **pixels)


def test_the_command_line_names_the_entry(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = '[{"name": "RandomApply", "transforms": [{"name": "Normalize", "mean": [0.5], "std": [0.5]}]}]'
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    words = ("--model_name_or_path", "m", "--dataset_name", "rows.jsonl", "--image_augmentation", entry)
    assert posttrain("check", "sft", *words, "--use_cpu") == 2
    assert "`image_augmentation`: {'name': 'RandomApply'" in capsys.readouterr().err


def test_an_import_path_is_saved_with_what_it_leads_to(tmp_path):
    path = f"{__name__}:same"
    assert config(tmp_path, image_augmentation=path).to_dict()["image_augmentation"].startswith(f"{path} ")


def same(picture):
    return picture
