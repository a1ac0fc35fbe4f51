"""Worker processes are shown images, of rows, of streams and of tools: the run is the one that a thread writes, to the bit."""

from __future__ import annotations

import functools
import os
import random
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from safetensors.torch import load_file

from posttrain.data.images.limits import BadImage
from posttrain.rollout.engines.native import engine as native
from posttrain.rollout.feed.group import Group
from posttrain.rollout.feed.journal import Journal
from posttrain.rollout.feed.processes import WorkerProcesses
from tests import forked_workers as forked
from tests.forked import Child, start_group, wait_for_group
from tests.forked_workers import forked_workers  # noqa: F401
from tests.trainer import fsdp_on_cpu
from tests.trainer.resumable_run import KillAfter, as_stream, checksum
from tests.trainer.test_async import written
from tests.trainer.test_async_workers import Attack
from tests.trainer.vision_runs import PICTURES, chats, question, trainer_of
from tests.trainer.vision_tools import CallGrammar, Room, draw, tool_trainer

pytestmark = pytest.mark.usefixtures("forked_workers")
OPTIONS: dict[str, Any] = {
    "reward_funcs": checksum,
    "num_generations": 2,
    "max_completion_length": 5,
    "per_device_train_batch_size": 4,
    "max_steps": 4,
    "learning_rate": 0.01,
    "reward_workers": 0,
    "seed": 7,
}
AHEAD = {"async_rollouts": True, "async_order": "in_order"}
TWO = {"rollout_workers": 2}
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}


def rows() -> list[dict[str, Any]]:
    return [{"prompt": prompt} for prompt, _, _ in chats()[:4]]


def trained(made: Any) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Weights and rollouts, without times."""
    made.train()
    made.close()
    stored = written(made.args.output_dir)
    for call in (call for row in stored for call in row["tool_calls"] or ()):
        call.pop("seconds", None)
    return [parameter.detach().clone() for parameter in made.model.parameters()], stored


def run(folder: Path, family: str = "qwen2_5_vl", **options: Any) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    given = {"train_dataset": rows()} | OPTIONS | options
    return trained(trainer_of("grpo", family, folder, torch.float32, **given))


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    assert other[1] == one[1]
    assert all(torch.equal(left, right) for left, right in zip(one[0], other[0], strict=True))


FAMILIES = [
    "qwen2_5_vl",
    "qwen3_vl",
    "llava_next",
    "smolvlm",
    "internvl",
    "gemma3",
]  # the last is written for by transformers


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_lead_worker_processes_write_the_synchronous_run(tmp_path, family):
    wanted = run(tmp_path / "plain", family)
    assert {len(row["images"]) for row in wanted[1]} == {0, 1, 2}
    same(wanted, run(tmp_path / "thread", family, **AHEAD, async_lead=0))
    same(wanted, run(tmp_path / "workers", family, **AHEAD, async_lead=0, **TWO))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, LORA], ids=["", "lora"])
def test_ahead_of_training_workers_that_are_killed_write_what_a_thread_does(tmp_path, options):
    wanted = run(tmp_path / "thread", **AHEAD, async_lead=2, **options)
    rng, killed = random.Random(0), []

    def kill(children: list[Any]) -> None:
        busy = [child for child in children if child.seat.has_begun and child.handle.popen.poll() is None]
        if busy and len(killed) < 3:
            killed.append(rng.choice(busy).handle.popen.pid)
            os.kill(killed[-1], signal.SIGKILL)

    attack = Attack(kill)
    given = {"train_dataset": rows(), "callbacks": [attack]} | OPTIONS | AHEAD | TWO | options
    attack.trainer = trainer_of("grpo", "qwen2_5_vl", tmp_path / "workers", torch.float32, async_lead=2, **given)
    same(wanted, trained(attack.trainer))
    assert len(killed) == 3


@pytest.mark.slow
def test_a_worker_that_dies_between_two_groups_that_it_wrote_together(tmp_path, monkeypatch):
    """What it had handed in is written once more beside the rest: alone, the rest would have other last bits."""
    wanted, killed = run(tmp_path / "thread", **AHEAD, async_lead=2), []
    deliver = WorkerProcesses._on_deliver

    def deliver_and_die(platform: Any, child: Any, **message: Any) -> None:
        deliver(platform, child, **message)
        if child.issued and len(killed) < 3:
            killed.append([*child.issued])
            os.kill(child.handle.popen.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerProcesses, "_on_deliver", deliver_and_die)
    same(wanted, run(tmp_path / "workers", **AHEAD, **TWO, async_lead=2))
    assert len(killed) == 3


def files(folder: Path) -> list[dict[str, Any]]:
    """Rows that name pictures by their paths."""
    folder.mkdir(exist_ok=True)
    for number, picture in enumerate(PICTURES):
        picture.save(folder / f"{number}.png")
    return [
        {"prompt": [question(f"What is {number}?")], "image": str(folder / f"{number}.png")}
        for number in range(len(PICTURES))
    ]


def stored(folder: Path) -> datasets.Dataset:
    return datasets.Dataset.from_list(files(folder)).cast_column("image", datasets.Image())


def shown_once(completions: Any, completion_ids: Any, images: Any = None, image: Any = None, **columns: Any) -> Any:
    """A reward that looks at the pictures of its row, which workers are not sent a second time."""
    pictures = image or images or [None] * len(completion_ids)
    return [float((sum(ids) + getattr(one, "height", 0)) % 13) for ids, one in zip(completion_ids, pictures)]


SOURCES = {
    "files, of which headers were read": lambda folder: {"train_dataset": files(folder), "check_images": "header"},
    "files of a dataset": lambda folder: {"train_dataset": stored(folder)},
    "a stream": lambda folder: {"train_dataset": as_stream(rows()), "shuffle_dataset": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_images_reach_workers_wherever_they_come_from(tmp_path, source):
    options = {"async_lead": 1, "reward_funcs": shown_once, **AHEAD, **SOURCES[source](tmp_path / "pictures")}
    wanted = run(tmp_path / "thread", "llava", **options)
    same(wanted, run(tmp_path / "workers", "llava", **options, **TWO))


@pytest.mark.slow
def test_an_image_that_vanishes_is_named_where_the_trainer_waits(tmp_path):
    given = OPTIONS | AHEAD | {"async_lead": 1, "rollout_workers": 1, "check_images": "header"}
    made = trainer_of("grpo", "llava", tmp_path, torch.float32, train_dataset=files(tmp_path / "pictures"), **given)
    (tmp_path / "pictures" / "2.png").unlink()
    with pytest.raises(BadImage, match=r"train, row 2, column 'image': .*2\.png cannot be opened"):
        made.train()
    made.close()


KILLED = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_in_background": False, "logging_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["dataset", "stream"])
def test_a_trainer_that_is_killed_with_its_workers_ends_as_the_undisturbed_one(tmp_path, is_stream):
    def train(folder: Path, callbacks: list[Any], resume: bool = False) -> Child:
        def go() -> None:
            forked.use()
            data = {"train_dataset": as_stream(rows()), "shuffle_dataset": False} if is_stream else {}
            given = {"train_dataset": rows()} | OPTIONS | KILLED | AHEAD | TWO | data
            made = trainer_of(
                "grpo",
                "qwen2_5_vl",
                folder,
                torch.float32,
                async_lead=1,
                callbacks=callbacks,
                steps_per_generation=2,
                **given,
            )
            made.train(resume_from_checkpoint=resume)
            made.close()

        return Child(go, folder.with_name(f"{folder.name}.log"))

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for child, code in ((train(whole, []), 0), (train(killed, [KillAfter(3)]), -signal.SIGKILL)):
        assert child.wait() == code, child.output()
    resumed = train(killed, [], resume=True)
    assert resumed.wait() == 0, resumed.output()
    one, other = (load_file(folder / "run/checkpoint-6/model.safetensors") for folder in (whole, killed))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert written(whole / "run") == written(killed / "run")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, LORA], ids=["", "lora"])
def test_workers_of_sharded_trainers_see_what_their_threads_do(tmp_path, options):
    def on_two(folder: Path, **workers: Any) -> list[dict[str, Any]]:
        def train(rank: int) -> None:
            fsdp_on_cpu.allow()
            forked.use()
            run(folder, **AHEAD, async_lead=1, fsdp=True, dataset_cache_dir=f"{folder}-{rank}", **options, **workers)
            dist.destroy_process_group()

        children = start_group(2, train, folder / "rank")
        assert wait_for_group(children) == [0, 0], "\n".join(child.output() for child in children)
        return written(folder / "run")

    assert on_two(tmp_path / "threads") == on_two(tmp_path / "workers", rollout_workers=1) != []


# ---- images of tools -----------------------------------------------------------------------------------------------------


def calling(make: Any, model: Any) -> Any:
    """In whichever process: an engine that calls a tool in every turn."""
    native.Grammar = CallGrammar
    return make(model)


def seen(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """A reward of every pixel that the episode showed."""
    parts = [
        [p["image"] for m in (*prompt, *said) if isinstance(m["content"], list) for p in m["content"] if "image" in p]
        for prompt, said in zip(prompts, completions)
    ]
    return [float(sum(sum(picture.convert("RGB").tobytes()) for picture in shown) % 13) for shown in parts]


def play(folder: Path, **options: Any) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    # who is decoded together depends on when tools answer, and log-probs in their last bits on that
    given = (
        {"max_rollout_slots": 1, "max_tool_calling_iterations": 1, "async_lead": 1, "max_steps": 2} | AHEAD | options
    )
    made = tool_trainer("qwen2_5_vl", folder, reward_funcs=seen, **given)
    maker = made.engine_maker
    made.engine_maker = lambda **how: functools.partial(calling, maker(**how))
    return trained(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, {1, 2}),
        ({"environment_factory": Room, "tool_image_role": "tool"}, {2, 3}),
        ({"max_completion_length": 80}, {0, 1}),  # a tool has drawn, and there was no room for its image
    ],
    ids=["tools", "environment", "no room"],
)
def test_images_of_tools_come_from_workers(tmp_path, monkeypatch, options, shown):
    monkeypatch.setattr(native, "Grammar", CallGrammar)
    wanted = play(tmp_path / "thread", **options)
    assert {len(row["images"]) for row in wanted[1]} == shown
    same(wanted, play(tmp_path / "workers", **options, **TWO))
    shown_keys = {image["key"] for row in wanted[1] for image in row["images"]}
    for name in ("thread", "workers"):
        assert {path.stem for path in (tmp_path / name / "run/rollout_images").iterdir()} == shown_keys


def test_a_picture_for_which_there_was_no_room_is_in_the_journal(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "Grammar", CallGrammar)
    made = tool_trainer(
        "llava", tmp_path, max_completion_length=80, max_steps=1, keep_journal=True, async_lead=0, **AHEAD
    )
    made.train()
    made.close()
    group = Group.from_bytes(Journal(tmp_path / "run").read(0), lambda row: made.train_dataset[row])
    (part,) = group.written.rollouts[0].tool_calls[0].result
    number = int(group.written.rollouts[0].tool_calls[0].arguments.split(":")[1].strip(" }"))
    assert part["image"].size == draw(number).size[::-1]
    assert part["image"].key not in {span.key for span in group.written.rollouts[0].sample.images}


def test_actors_of_ray_have_no_folder_for_images_of_tools(tmp_path):
    with pytest.raises(ValueError, match="which a worker keeps in `OUTPUT/media`"):
        tool_trainer("llava", tmp_path, rollout_workers="ray", **AHEAD, async_lead=1)
