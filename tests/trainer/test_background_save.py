"""A checkpoint that is written while training goes on is the checkpoint of its step, and an ordinary one."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from posttrain.core import faults
from posttrain.trainer.checkpoints import background_save, tensor_file
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.snapshot import HostArena, Snapshot, capturing
from posttrain.trainer.checkpoints.tensor_file import DTYPES, HeldTensor, raw_bytes, write_tensor_file
from tests import tiny
from tests.trainer import resumable_run


@pytest.fixture(autouse=True)
def _no_faults_left():
    yield
    faults.arm(None)


def snapshot_of(save, folder: Path, arena: HostArena | None) -> None:
    snapshot = Snapshot(folder, arena)
    with capturing(snapshot):
        save(folder)
    snapshot.write()


def everything_in(folder: Path) -> dict[str, object]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as opened:
                found[name] = (opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118
        elif path.is_file():
            found[name] = path.read_text()
    return found


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    assert one.keys() == other.keys()
    for name, content in one.items():
        if isinstance(content, str):
            assert content == other[name], name
            continue
        assert content[0] == other[name][0]
        assert content[1].keys() == other[name][1].keys()
        for key, tensor in content[1].items():
            theirs = other[name][1][key]
            assert (tensor.dtype, tensor.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(tensor, theirs), (name, key)


def with_adapters():
    return get_peft_model(tiny.causal_lm(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


@pytest.mark.parametrize("arena", [None, HostArena(page_locked=False)], ids=["pointed", "copied"])
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny.causal_lm, {}),
        (lambda: tiny.causal_lm(tie_word_embeddings=True), {}),
        (lambda: tiny.causal_lm(dtype=torch.bfloat16), {"max_shard_size": "8KB"}),
        (lambda: tiny.causal_lm(family="qwen3_moe"), {}),
        (tiny.reward_model, {}),
        (with_adapters, {}),
    ],
    ids=["plain", "tied", "shards", "moe", "reward", "adapters"],
)
def test_a_snapshot_is_what_save_pretrained_writes(tmp_path, make, options, arena):
    model = make()
    model.save_pretrained(tmp_path / "theirs", **options)
    snapshot_of(lambda folder: model.save_pretrained(folder, **options), tmp_path / "ours", arena)
    assert_same(everything_in(tmp_path / "theirs"), everything_in(tmp_path / "ours"))
    if "max_shard_size" in options:
        assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2


def test_from_pretrained_reads_it(tmp_path):
    model = tiny.causal_lm(tie_word_embeddings=True)
    snapshot_of(model.save_pretrained, tmp_path / "full", HostArena(page_locked=False))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    model.name_or_path = str(tmp_path / "full")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    snapshot_of(adapted.save_pretrained, tmp_path / "adapter", HostArena(page_locked=False))
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(adapted.eval()(ids).logits, loaded.eval()(ids).logits)


def test_every_type_and_shape_comes_back(tmp_path):
    tensors = {}
    for dtype in DTYPES:
        whole = torch.arange(12).remainder(2) if dtype == torch.bool else torch.arange(12)
        tensors[str(dtype)] = whole.to(dtype).reshape(3, 4)
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "across": torch.arange(12.0).reshape(3, 4).T}
    held = {name: HeldTensor(t.dtype, tuple(t.shape), [raw_bytes(t)]) for name, t in tensors.items()}
    record = write_tensor_file(tmp_path / "x.safetensors", held, {"made": "here"})
    assert record == tensor_file.FileRecord(
        (tmp_path / "x.safetensors").stat().st_size, files.sha256(tmp_path / "x.safetensors")
    )
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(raw_bytes(back[name]), raw_bytes(tensor)), name


def test_a_type_without_a_name_in_the_format_is_refused():
    with pytest.raises(TypeError, match="complex128 cannot be saved"):
        raw_bytes(torch.zeros(2, dtype=torch.complex128))


def test_an_arena_splits_what_does_not_fit_and_is_used_again(monkeypatch):
    monkeypatch.setattr("posttrain.trainer.checkpoints.snapshot.CHUNK_BYTES", 2**16)
    arena = HostArena(page_locked=False)
    large = torch.randn(100_000)
    for _ in range(3):
        arena.reset()
        small, held = arena.hold(torch.tensor(1.0)), arena.hold(large)
        assert len(held.pieces) > 1
        assert torch.equal(torch.cat(held.pieces), raw_bytes(large))
        assert torch.equal(small.pieces[0], raw_bytes(torch.tensor(1.0)))
        size = arena.size
    assert arena.size == size < 600_000


class Writing(TrainerCallback):
    """Whether a save was in flight at the end of each step. Each save is held until the step after it has ended."""

    def __init__(self, last=None):
        self.steps = []
        self.step, self.last = 0, last
        self.changed = threading.Condition()

    def on_step_end(self, args, state, control, **kwargs):
        with self.changed:
            if any(thread.name == "checkpoint-writer" for thread in threading.enumerate()):
                self.steps.append(state.global_step)
            self.step = state.global_step
            self.changed.notify_all()

    def hold(self, point):
        """On the thread of a save, of which each has its own."""
        with self.changed:
            thread = threading.current_thread()
            thread.began = getattr(thread, "began", self.step)
            assert self.changed.wait_for(lambda: self.step > thread.began or self.step == self.last, 120)


@pytest.mark.parametrize("method", ["sft-bf16", "dpo-lora"])
def test_the_slowly_written_checkpoint_is_bit_for_bit_that_of_its_step(tmp_path, method, monkeypatch):
    """Nothing is written before another optimizer step has been taken."""
    resumable_run.main(method, tmp_path / "at-once", save_in_background=False, save_steps=3, max_steps=7)
    writing = Writing(last=7)
    monkeypatch.setitem(faults.ACTIONS, "slow", writing.hold)
    faults.arm("slow:save.file:*")
    trainer = resumable_run.main(method, tmp_path / "behind", save_steps=3, max_steps=7, callbacks=[writing])
    assert {4, 7} <= set(writing.steps)
    assert trainer.checkpoints.writer.statistics.saves == 3
    for path in files.checkpoints(tmp_path / "at-once"):
        ours, theirs = everything_in(path), everything_in(tmp_path / "behind" / path.name)
        for found in (ours, theirs):
            for name in ("manifest.json", "training_args.json", "run_state.json", "trainer_state.json"):
                found.pop(name)  # paths and timings; what they must say is compared by the tests of resuming
        assert_same(ours, theirs)


def test_a_second_save_waits_for_the_first_and_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "SLOW_SECONDS", 1.0)
    faults.arm("slow:save.done:1")  # a step takes less, even on a busy machine
    trainer = resumable_run.main("sft", tmp_path, save_steps=1, max_steps=4, eval_strategy="no")
    statistics = trainer.checkpoints.writer.statistics
    assert statistics.saves == 4
    assert statistics.waits >= 1
    assert statistics.seconds_waited > 0.1
    assert len(files.checkpoints(tmp_path)) == 4


def test_it_can_be_turned_off(tmp_path):
    writing = Writing()
    trainer = resumable_run.main("sft", tmp_path, save_in_background=False, callbacks=[writing])
    assert writing.steps == []
    assert trainer.checkpoints.writer.arena.size == 0
    assert len(files.checkpoints(tmp_path)) == 4


def test_without_memory_for_a_copy_it_is_written_at_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(background_save, "_available_memory", lambda: 1000)
    writing = Writing()
    with caplog.at_level(logging.WARNING):
        resumable_run.main("sft", tmp_path, callbacks=[writing])
    assert "not saved in the background" in caplog.text
    assert writing.steps == []
    assert len(files.checkpoints(tmp_path)) == 4


def test_the_estimate_of_the_state_is_right(tmp_path):
    for method in ("sft", "sft-bf16", "sft-lora", "sft-bf16-lora"):
        trainer = resumable_run.main(method, tmp_path / method, max_steps=2, eval_strategy="no")
        estimate = background_save.state_bytes(trainer.model, trainer.args.optim, save_only_model=False)
        newest = files.checkpoints(tmp_path / method)[0]
        tensors = [
            t for path in newest.glob("*.safetensors") if "rng" not in path.name for t in load_file(path).values()
        ]
        assert estimate == pytest.approx(sum(t.numel() * t.element_size() for t in tensors), rel=0.01)


# ---- who reads the folder ----------------------------------------------------------------------------------------------


class Reader(TrainerCallback):
    """Opens the checkpoint when it hears of it."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        files.verify(folder)
        self.seen.append(state.global_step)


def test_a_callback_that_reads_on_save_finds_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "SLOW_SECONDS", 0.01)
    faults.arm("slow:save.file:*")
    reader = Reader()
    resumable_run.main("sft", tmp_path, callbacks=[reader])
    assert reader.seen == [2, 4, 6, 8]


def test_the_best_model_is_loaded_after_its_save_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "SLOW_SECONDS", 0.02)
    faults.arm("slow:save.file:*")
    trainer = resumable_run.main(
        "sft",
        tmp_path,
        load_best_model_at_end=True,
        save_total_limit=1,
        eval_steps=2,
        metric_for_best_model="eval_loss",
    )
    best = Path(trainer.state.best_model_checkpoint)
    files.verify(best)
    saved = load_file(best / "model.safetensors")
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in saved.items())


# ---- when it goes wrong --------------------------------------------------------------------------------------------------


def test_an_error_on_the_thread_is_raised_by_training(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(files, "publish", broken)
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        resumable_run.main("sft", tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_does_not_end_training(tmp_path, caplog, background):
    faults.arm("oserror:save.write:6")  # four files of tensors a save: inside the second save
    with caplog.at_level(logging.WARNING):
        trainer = resumable_run.main("sft", tmp_path, save_in_background=background)
    said = [record.getMessage() for record in caplog.records if "was not saved" in record.getMessage()]
    assert len(said) == 1
    assert "step 4" in said[0]
    assert "bytes needed" in said[0]
    assert "bytes free" in said[0]
    assert str(tmp_path / "checkpoint-4") in said[0]
    assert trainer.state.global_step == 8
    assert [path.name for path in files.checkpoints(tmp_path)] == ["checkpoint-8", "checkpoint-6", "checkpoint-2"]
    assert all(files.is_whole(path) for path in files.checkpoints(tmp_path))
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("background", [True, False])
def test_a_last_save_that_fails_ends_the_run_with_its_own_status(tmp_path, background):
    faults.arm("oserror:save.write:14")
    with pytest.raises(background_save.CheckpointNotSaved, match="step 8 was not saved") as leaving:
        resumable_run.main("sft", tmp_path, save_in_background=background)
    assert leaving.value.code == 74
    assert isinstance(leaving.value, SystemExit)
    assert files.checkpoints(tmp_path)[0].name == "checkpoint-6"


def test_the_best_checkpoint_is_not_one_that_could_not_be_saved(tmp_path):
    faults.arm("oserror:save.write:14")
    with pytest.raises(background_save.CheckpointNotSaved):
        resumable_run.main(
            "sft", tmp_path, load_best_model_at_end=True, eval_steps=2, metric_for_best_model="eval_loss"
        )
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith("checkpoint-6")


class Interrupted(Exception):
    pass


def test_an_interrupted_wait_calls_the_save_off(tmp_path, monkeypatch):
    """As a second Ctrl-C does: the thread stops at the next piece and takes its half-written folder away."""
    model = tiny.causal_lm()
    writer = background_save.CheckpointWriter(torch.device("cpu"))
    snapshot = Snapshot(tmp_path / "checkpoint-1.tmp-1", writer.arena_for_next())
    with capturing(snapshot):
        model.save_pretrained(snapshot.folder)
    monkeypatch.setattr(faults, "SLOW_SECONDS", 3.0)
    faults.arm("slow:save.write:1")
    writer.submit(background_save.SaveRequest(1, snapshot, tmp_path, None))
    waits = writer._idle.wait
    writer._idle.wait = lambda: (_ for _ in ()).throw(Interrupted)
    with pytest.raises(Interrupted):
        writer.wait()
    writer._idle.wait = waits
    writer.wait()  # does not wait again
    assert not writer._idle.is_set()
    writer.join()
    assert writer.outcome() is None
    assert not list(tmp_path.iterdir())
