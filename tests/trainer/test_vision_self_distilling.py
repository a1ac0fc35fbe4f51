"""SDFT, SDPO and GOLD on rows with images: the teacher's prompt shows the student's images, and says what it says about them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from posttrain.core.sample import Sample
from posttrain.trainer.self_distilling_trainer import shown, teacher_sample
from tests import tiny_vision
from tests.tiny_vision import TinyVision, vision_model
from tests.trainer.vision_runs import PICTURES, chats, question, trainer_of
from tests.vision_samples import Shown

WITHIN = [{"role": "user", "content": [
    {"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "and"},
    {"type": "image", "image": PICTURES[1]}, {"type": "text", "text": "?"},
]}]  # fmt: skip
PROMPTS = [*(prompt for prompt, _, _ in chats()[:3]), WITHIN]
SHARED = {"max_completion_length": 4, "per_device_train_batch_size": 8, "num_generations": 2}
SDFT = {**SHARED, "teacher_prompt_template": "Hint: {privileged_context} {prompt} Now!"}
SDPO = {**SHARED, "reward_workers": 0, "success_reward_threshold": 0.0, "dont_reprompt_on_self_success": False}


def made(method: str, family: str, folder: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    rows = [{"prompt": prompt, "privileged_context": f"It is {n}."} for n, prompt in enumerate(PROMPTS)]
    given = {"sdft": SDFT, "sdpo": SDPO | {"reward_funcs": lambda completions, **_: [1.0] * len(completions)}}[method]
    return trainer_of(method, family, folder, dtype, train_dataset=rows, **given | options)


def window_of(trainer: Any) -> list[Sample]:
    return [unit[0] for unit in trainer.get_train_dataloader().source.next_window() if unit is not None]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "gemma3", "paligemma"])
@pytest.mark.parametrize("method", ["sdft", "sdpo"])
def test_the_teacher_sees_the_students_images(method, family, tmp_path):
    """Its log-probs are those of transformers' own forward of its prompt and the student's completion."""
    trainer = made(method, family, tmp_path)
    window = window_of(trainer)
    processor, vision = trainer.vision.processor, trainer.vision
    plain = Shown(TinyVision(copy.deepcopy(trainer.model), processor, ""), vision.family)
    assert {len(sample.images) for sample in window} == {0, 1, 2}
    batch = trainer.data_collator([(sample,) for sample in window])
    found = trainer.teacher.logps(batch.twin).split(batch.counts.tolist())
    for sample, logps in zip(window, found):
        twin = sample.twin
        assert [image.key for image in twin.images] == [image.key for image in sample.images]
        assert len(twin) > len(sample)
        said = processor.tokenizer.decode(twin.input_ids)
        assert ("Hint: It is" if method == "sdft" else "Correct solution") in said
        plain.pictures |= {image.key: trainer.pixels.source(image)[0].rgb() for image in twin.images}
        with torch.no_grad():
            assert (plain.own_logps(twin) - logps).abs().max() < 1e-6
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))


def test_images_stay_where_they_stand_in_the_text():
    a, b = ({"type": "image", "key": name} for name in "ab")
    text = lambda said: {"type": "text", "text": said}  # noqa: E731
    prompt = [{"role": "user", "content": [a, text("and"), b, text("?")]}]
    (turn,) = shown(prompt, lambda said: f"Look: {said} {said}!", 0)
    assert turn["content"] == [text("Look: "), a, text("and"), b, text("? "), a, text("and"), b, text("?!")]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "paligemma"])
def test_completions_are_written_to_the_teachers_prompt_with_its_images(family, tmp_path):
    trainer = made("sdft", family, tmp_path, torch.float32, generate_from_teacher=True, temperature=0.01)
    window = window_of(trainer)
    batch = trainer.data_collator([(sample,) for sample in window])
    likely = trainer.teacher.logps(batch.twin)  # nearly greedy: of what the teacher itself would say
    assert likely.exp().median() > 0.5


def test_a_teachers_prompt_in_which_images_have_no_room_is_refused_or_left_out(tmp_path, caplog):
    trainer = made("sdpo", "llava", tmp_path, torch.float32, max_reprompt_len=24)
    assert [len(sample.images) for sample in window_of(trainer)] == [0, 0]
    assert caplog.text.count("an image would be cut off") == 1
    trainer = made("sdft", "llava", tmp_path / "b", torch.float32)
    row = trainer.train_dataset[0]
    with pytest.raises(ValueError, match=r"row 0 has \d+ tokens with its images, and there is room for 9"):
        teacher_sample(trainer.renderer, row.prompt, row.columns, 0, 9, row.images)


def test_images_in_the_privileged_context_are_refused(tmp_path):
    rows = [{"prompt": [question("What?")], "privileged_context": [question("It is this", PICTURES[0])]}] * 2
    with pytest.raises(ValueError, match="more than texts in the column 'privileged_context'"):
        trainer_of("sdft", "llava", tmp_path, torch.float32, train_dataset=rows, **SDFT)


GOLD = {"max_completion_length": 4, "per_device_train_batch_size": 4, "lmbda": 1.0}


def test_gold_with_one_tokenizer_reads_images(tmp_path):
    rows = [{"prompt": prompt, "completion": [good]} for prompt, good, _ in chats()[:4]]
    given = {"train_dataset": rows, "teacher_model": vision_model("qwen2_5_vl", seed=1).model}
    tokenizer = vision_model("qwen2_5_vl").processor.tokenizer
    trainer = trainer_of(
        "gold", "qwen2_5_vl", tmp_path, torch.float32, **given, teacher_processing_class=tokenizer, **GOLD
    )
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0


def with_other_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> TinyVision:
    """A model of the family whose tokenizer joins some letters: its placeholders have other ids, and texts other lengths."""
    merges = [("a", "t"), ("i", "s"), ("W", "h"), ("Wh", "at")]
    with monkeypatch.context() as patched:
        patched.setattr(tiny_vision, "tokenizer", functools.partial(tiny_vision.tokenizer, merges))
        return vision_model(family, seed=1, dtype=torch.float64)


ULD = {"use_uld_loss": True, "max_completion_length": 6, "per_device_train_batch_size": 8, "lmbda": 0.0}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next", "gemma3"])
def test_a_teacher_with_another_tokenizer_sees_the_students_images(family, tmp_path, monkeypatch):
    """Its hidden states are those of transformers' own forward of its own rendering of prompt and completion."""
    teacher = with_other_tokens(family, monkeypatch)
    rows = [{"prompt": prompt, "completion": [good]} for prompt, good, _ in chats()[:4]]
    rows = [*rows, {"prompt": WITHIN, "completion": [chats()[0][1]]}]
    given = {"teacher_model": teacher.model, "teacher_processing_class": teacher.processor, "train_dataset": rows}
    trainer = trainer_of("gold", family, tmp_path, **given, **ULD)
    window = window_of(trainer)
    theirs = trainer._teachers_renderer.layouts.family
    assert theirs.placeholder_id != trainer.vision.family.placeholder_id
    plain = Shown(TinyVision(copy.deepcopy(trainer.teacher.asked.model), teacher.processor, ""), theirs)
    batch = trainer.data_collator([(sample,) for sample in window])
    found = trainer.teacher.logps(batch.twin).split(batch.twin.counts.tolist())
    for sample, logps in zip(window, found):
        twin = sample.twin
        assert [image.key for image in twin.images] == [image.key for image in sample.images]
        plain.pictures |= {image.key: trainer.pixels.source(image)[0].rgb() for image in twin.images}
        with torch.no_grad():
            assert (plain.own_logps(twin) - logps).abs().max() < 1e-6
    assert any(sample.images for sample in window)
    trainer.train()
    assert trainer.state.log_history[-1]["train_loss"] > 0


def test_a_teacher_with_another_processor_is_refused(tmp_path):
    teacher = vision_model("llava")
    rows = [{"prompt": prompt, "completion": [good]} for prompt, good, _ in chats()[:4]]
    given = {"teacher_model": teacher.model, "teacher_processing_class": teacher.processor, "train_dataset": rows}
    with pytest.raises(
        ValueError, match="a model of type 'llava', would be shown by another processor than the student"
    ):
        trainer_of("gold", "qwen2_5_vl", tmp_path, torch.float32, **given, **ULD)
