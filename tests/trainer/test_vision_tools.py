"""Tools and environments that return images: what the model was shown is what is trained, and it can be found again."""

from __future__ import annotations

import json
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from posttrain.core.sample import Sample
from posttrain.data.images.media import FOLDER, MediaFolder, MediaNotWritten
from posttrain.rollout.engines.native import engine as native
from posttrain.rollout.rollout import POLICY_LOGPS, VALUES, Rollout
from posttrain.rollout.store import read_rollouts
from tests.trainer.vision_runs import PICTURES, trainer_of
from tests.trainer.vision_tools import CallGrammar, Room, draw, tool_trainer

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "llava_next", "smolvlm", "internvl")


@pytest.fixture(autouse=True)
def calls_in_every_turn(monkeypatch):
    monkeypatch.setattr(native, "Grammar", CallGrammar)


def collected(trainer: Any) -> list[Rollout]:
    """The rollouts of the first window."""
    found: list[Rollout] = []
    hook = trainer.log_of_rollouts.on_collected
    trainer.log_of_rollouts.on_collected = lambda one: (found.extend(one.rollouts), hook(one))
    trainer.train()
    return found[: trainer.args.per_device_train_batch_size]


def own_logps(trainer: Any, model: Any, sample: Sample) -> np.ndarray:
    """Log-probs of the trained tokens by transformers' own forward of the whole episode, which makes its own positions."""
    family = trainer.vision.family
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.three_axis_positions:
        kwargs["mm_token_type_ids"] = (ids == family.placeholder_id).long()
    kwargs |= trainer.pixels.load(sample.images)
    with torch.no_grad():
        logits = model._forward_without_scores(**kwargs, use_cache=False).logits[0, :-1]
    logps = logits.log_softmax(-1)[range(len(sample) - 1), sample.input_ids[1:].tolist()]
    return logps.numpy()[sample.trained[1:]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trained_sequence_is_the_sampled_one(family, tmp_path):
    trainer = tool_trainer(family, tmp_path, learning_rate=0.0)
    rollouts = collected(trainer)
    assert len({len(rollout.sample.images) for rollout in rollouts}) == 2  # prompts with an image, and without
    for rollout in rollouts:
        assert rollout.error is None
        assert len(rollout.tool_calls) == 2
        assert [call.error for call in rollout.tool_calls] == [None, None]
        spans = [span for span in rollout.sample.images if span.start >= rollout.prompt_length]
        assert len(spans) == 2
        assert not any(rollout.sample.trained[span.start : span.stop].any() for span in spans)
        shown = [part["image"].key for m in rollout.completion if m["role"] == "tool" for part in m["content"]]
        assert shown == [span.key for span in spans]
        logps = own_logps(trainer, trainer.model, rollout.sample)
        assert np.abs(rollout.sample.read_trained(POLICY_LOGPS) - logps).max() < 1e-4


def test_a_critic_reads_images_of_tools(tmp_path):
    """PPO has values of the tokens between which images stand."""
    trainer = tool_trainer("qwen2_5_vl", tmp_path, method="ppo")
    for rollout in collected(trainer):
        assert len([span for span in rollout.sample.images if span.start >= rollout.prompt_length]) == 2
        values = rollout.sample.per_token[VALUES]
        assert np.isfinite(values[rollout.sample.trained]).all()
        assert not values[~rollout.sample.trained].any()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_what_a_tool_drew_is_found_by_its_content(family, tmp_path):
    trainer = tool_trainer(family, tmp_path)
    rollouts = collected(trainer)
    media = MediaFolder(tmp_path / "run" / FOLDER)
    numbers = {call.arguments: call for rollout in rollouts for call in rollout.tool_calls}
    assert len(list(media.path.iterdir())) <= len(numbers) + 2
    for rollout in rollouts:
        for call in rollout.tool_calls:
            (part,) = call.result
            number = int(call.arguments.split(":")[1].strip(" }"))
            assert np.array_equal(np.asarray(media.find(part["image"].key).rgb()), np.asarray(draw(number)))


@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_template_that_drops_images_of_tools_is_refused_or_helped(role, tmp_path):
    if role == "tool":
        with pytest.raises(ValueError, match=r"cannot show an image .* Set `tool_image_role` to 'user'"):
            tool_trainer("qwen2_5_vl", tmp_path, drops_images=True)
        return
    trainer = tool_trainer("qwen2_5_vl", tmp_path, drops_images=True, tool_image_role="user", learning_rate=0.0)
    for rollout in collected(trainer):
        assert [message["role"] for message in rollout.completion] == ["assistant", "tool", "user"] * 2 + ["assistant"]
        logps = own_logps(trainer, trainer.model, rollout.sample)
        assert np.abs(rollout.sample.read_trained(POLICY_LOGPS) - logps).max() < 1e-4


def test_an_environment_shows_images_from_its_reset_on(tmp_path):
    """Its rows may have images as well; a method that says nothing about what it returns needs the option."""
    trainer = tool_trainer("qwen2_5_vl", tmp_path, environment_factory=Room, tool_image_role="tool", learning_rate=0.0)
    rollouts = collected(trainer)
    assert sorted({len(rollout.sample.images) for rollout in rollouts}) == [3, 4]
    for rollout in rollouts:
        parts = rollout.prompt[-1]["content"]
        assert [part["type"] for part in parts[-3:]] == ["text", "image", "text"]
        logps = own_logps(trainer, trainer.model, rollout.sample)
        assert np.abs(rollout.sample.read_trained(POLICY_LOGPS) - logps).max() < 1e-4


def test_an_image_for_which_there_is_no_room_ends_the_episode_before_it(tmp_path):
    trainer = tool_trainer("qwen2_5_vl", tmp_path, max_completion_length=80)
    for rollout in collected(trainer):
        assert rollout.is_truncated
        assert len(rollout.completion_ids) <= 80
        assert all(span.stop <= len(rollout.sample) for span in rollout.sample.images)
        assert len(rollout.tool_calls) == 1  # it was run all the same
        assert not [span for span in rollout.sample.images if span.start >= rollout.prompt_length]


def test_rewards_see_what_the_model_saw(tmp_path):
    """Pictures of prompts and of tools, as parts and as columns, in this process."""
    seen: list[tuple[Any, Any]] = []

    def looks(prompts, completions, **columns):
        seen.extend(zip(prompts, completions))
        return [float(place % 2) for place in range(len(prompts))]

    collected(tool_trainer("llava", tmp_path, reward_funcs=looks))
    assert len(seen) == 4
    for prompt, completion in seen:
        shown = [
            p["image"] for m in (*prompt, *completion) for p in m["content"] if isinstance(p, dict) and "image" in p
        ]
        assert all(isinstance(picture, Image.Image) for picture in shown)
        assert len(shown) in (2, 3)
        drawn = [int(call["function"]["arguments"]["number"]) for m in completion for call in m.get("tool_calls", ())][
            :2
        ]
        for picture, number in zip(shown[-2:], drawn, strict=True):
            assert np.array_equal(np.asarray(picture), np.asarray(draw(number)))


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_stored_names_images_and_keeps_small_pictures_apart(keeps, tmp_path):
    trainer = tool_trainer("qwen2_5_vl", tmp_path, log_multimodal=keeps)
    rollouts = collected(trainer)
    stored = read_rollouts(tmp_path / "run").to_pylist()
    folder, keys = tmp_path / "run" / "rollout_images", set()
    for rollout, row in zip(rollouts, stored, strict=True):
        assert len(row["images"]) == len(rollout.sample.images) > 0
        said = {name: [part for m in json.loads(row[name]) if isinstance(m["content"], list) for part in m["content"]] for name in
                ("prompt", "completion")}  # fmt: skip
        for image, span in zip(row["images"], rollout.sample.images):
            keys.add(image["key"])
            ids = row[f"{image['column']}_ids"][image["start"] : image["start"] + image["tokens"]]
            assert ids == rollout.sample.input_ids[span.start : span.stop].tolist()
            assert (image["height"], image["width"]) == span.size
            pictured = [part for part in said[image["column"]] if part["type"] == "image"]
            assert pictured[image["place"]] == {"type": "image", "key": span.key.hex()}
        assert [json.loads(call["result"]) for call in row["tool_calls"]] == [
            [{"type": "image", "key": part["image"].key.hex()} for part in call.result] for call in rollout.tool_calls
        ]
    assert {path.stem for path in folder.glob("*.webp")} == (keys if keeps else set())


@pytest.mark.parametrize("workers", [0, 1])
def test_columns_of_images_are_pictures_wherever_a_reward_runs(workers, tmp_path):
    """Undecoded rows, paths and arrays: a reward is given PIL images, in its process or in a worker's."""
    first, second = PICTURES[:2]
    first.save(tmp_path / "first.png")
    rows = [
        {
            "images": [str(tmp_path / "first.png")],
            "prompt": [{"role": "user", "content": "What?"}],
            "wanted": [[60, 40]],
        },
        {"images": [np.asarray(second)], "prompt": [{"role": "user", "content": "And?"}], "wanted": [[30, 90]]},
    ]
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "wanted": datasets.List(datasets.List(datasets.Value("int64"))),
        }
    )
    stored = datasets.Dataset.from_list([row | {"images": [first]} for row in rows[:1]], features=features)
    for data in (rows, stored):
        made = trainer_of(
            "grpo", "llava", tmp_path / type(data).__name__, torch.float32, train_dataset=data, reward_funcs=measures,
            num_generations=2, per_device_train_batch_size=4, max_completion_length=3, reward_workers=workers,
        )  # fmt: skip
        rollouts = collected(made)
        made.close()
        assert [rollout.failures for rollout in rollouts] == [[]] * 4
        assert all(rollout.rewards["measures"] > 0 for rollout in rollouts)


def measures(prompts, completions, images, wanted, **columns):
    """1 and a bit where pictures of the column and of the prompt are what the row says."""
    found = []
    for prompt, pictures, sizes in zip(prompts, images, wanted):
        parts = [part["image"] for message in prompt for part in message["content"] if part["type"] == "image"]
        right = all(type(one).__module__.startswith("PIL.") for one in (*pictures, *parts))
        right &= [[one.height, one.width] for one in pictures] == [[one.height, one.width] for one in parts] == sizes
        found.append((1.0 + len(found)) * right)
    return found


@pytest.mark.parametrize("reward", ["org/some-model", "judge:http://127.0.0.1:1/v1?model=x"])
def test_reward_models_and_judges_refuse_images(reward, tmp_path):
    with pytest.raises(ValueError, match=r"The model is shown images, and .* would be shown texts alone"):
        tool_trainer("llava", tmp_path, reward_funcs=reward)


def unsaid(number: int) -> Any:
    """
    Draw a picture, and say nothing about it.

    Args:
        number: Which one.
    """
    return draw(number)


unsaid.__name__ = "draw"


def test_an_image_that_nobody_announced_ends_the_run(tmp_path):
    trainer = tool_trainer("llava", tmp_path, tools=[unsaid])
    with pytest.raises(RuntimeError, match=r"Tool draw: it returned an image, .* `tool_image_role`"):
        trainer.train()


def test_a_full_disk_ends_the_run_and_is_no_mistake_of_the_tool(tmp_path, monkeypatch):
    trainer = tool_trainer("llava", tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("posttrain.data.images.media.os.replace", full)
    with pytest.raises(MediaNotWritten, match=r"could not be kept in .*media \(No space left on device\)"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"use_vllm": True}, "vLLM is not shown images that come between turns"),
        ({"tool_image_role": "system"}, "tool_image_role"),
    ],
)
def test_images_of_tools_are_refused_where_they_cannot_be_shown(options, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        tool_trainer("llava", tmp_path, **options)
