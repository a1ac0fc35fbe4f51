"""BEMA and reference sync on hand-worked numbers; completions that leave the run as it was."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import posttrain as callbacks
from posttrain import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.models.load.reference import frozen_copy
from posttrain.trainer.online.log_completions import MAX_PROMPTS, Answers, answer_marker, prompt_of, show
from posttrain.trainer.report.progress import Pace, RichProgressCallback, RichView
from tests import tiny


def quiet(tmp_path, **changes):
    given = {
        "output_dir": str(tmp_path / "run"), "max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 4,
        "learning_rate": 1e-2, "save_strategy": "no", "alerts": False,
    }  # fmt: skip
    return given | changes


def sft(tmp_path, callback_list=None, rows=None, peft_config=None, **changes):
    return SFTTrainer(
        tiny.causal_lm(),
        SFTConfig(**quiet(tmp_path, **changes)),
        train_dataset=Dataset.from_list(tiny.chats(16)),
        eval_dataset=Dataset.from_list(rows or tiny.chats(6)),
        processing_class=tiny.tokenizer(),
        callbacks=callback_list,
        peft_config=peft_config,
    )


def test_public_names():
    for name in ("BEMACallback", "LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback"):
        assert getattr(callbacks, name).__name__ == name
    assert callbacks.RichProgressCallback is RichProgressCallback


# ---- BEMA ----------------------------------------------------------------------------------------------------------------


class Two(torch.nn.Module):
    """Two weights that are trained, one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.tensor([7.0], dtype=torch.float64), requires_grad=False)
        self.a = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        self.b = torch.nn.Parameter(torch.tensor([-2.0], dtype=torch.float64))
        self.config = None

    def move(self, a: float, b: float) -> None:
        with torch.no_grad():
            self.a.fill_(a)
            self.b.fill_(b)


def drive(callback, model, path, max_steps=10):
    """Call the callback as a run does: before the first step, then after each step with the weights of `path`."""
    args = SimpleNamespace(fsdp=None, deepspeed=None, output_dir="/nonexistent")
    state = SimpleNamespace(global_step=0, max_steps=max_steps, is_world_process_zero=True)
    callback.on_train_begin(args, state, None, model=model)
    for state.global_step, weights in enumerate(path, start=1):
        model.move(*weights)
        callback.on_step_end(args, state, None, model=model)


def test_bema_by_hand():
    """lag 4, multiplier 5, ema_power 0.5, bias_power 1, an update each step, theta_0 = (1, -2).

    t = 1: lag + mult t = 9,  beta = 1/3, alpha = 1/9;  theta = (4, 1)
        EMA  = 2/3 (1, -2) + 1/3 (4, 1)     = (2, -1)
        BEMA = 1/9 (3, 3) + (2, -1)         = (7/3, -2/3)
    t = 2: 14, beta = 14**-0.5, alpha = 1/14;   theta = (4, 1) again
        EMA  = (2, -1) + beta (2, 2);  BEMA = 3/14 + EMA
    """
    model, callback = Two(), callbacks.BEMACallback(update_freq=1, ema_power=0.5, bias_power=1.0, lag=4, multiplier=5.0)
    drive(callback, model, [(4.0, 1.0)])
    assert callback.weights.keys() == {"a", "b"}
    assert callback.weights["a"].item() == pytest.approx(7 / 3, abs=1e-12)
    assert callback.weights["b"].item() == pytest.approx(-2 / 3, abs=1e-12)
    model, callback = Two(), callbacks.BEMACallback(update_freq=1, ema_power=0.5, bias_power=1.0, lag=4, multiplier=5.0)
    drive(callback, model, [(4.0, 1.0), (4.0, 1.0)])
    beta = 14**-0.5
    assert callback.average["a"].item() == pytest.approx(2 + 2 * beta, abs=1e-12)
    assert callback.weights["a"].item() == pytest.approx(3 / 14 + 2 + 2 * beta, abs=1e-12)
    assert callback.weights["b"].item() == pytest.approx(3 / 14 - 1 + 2 * beta, abs=1e-12)


def test_bema_waits_and_skips():
    """update_after 2, update_freq 3: theta_0 is the weights after step 2; the only update up to step 7 is at step 5."""
    model, callback = (
        Two(),
        callbacks.BEMACallback(update_freq=3, update_after=2, lag=11, ema_power=0.5, bias_power=0.5),
    )
    drive(callback, model, [(float(i), 0.0) for i in range(1, 8)])
    assert callback.start["a"].item() == 2
    beta = alpha = (11 + 5) ** -0.5  # 1/4
    assert callback.average["a"].item() == pytest.approx((1 - beta) * 2 + beta * 5)
    assert callback.weights["a"].item() == pytest.approx(alpha * 3 + 2.75)


def test_bema_weights_have_a_floor_and_defaults_of_the_paper():
    callback = callbacks.BEMACallback(min_ema_multiplier=0.25)
    assert callback.ema_weight(0) == pytest.approx(10**-0.5)
    assert callback.ema_weight(1000) == 0.25
    assert callback.bias_weight(990) == pytest.approx(1000**-0.2)
    assert (callback.update_freq, callback.update_after, callback.device.type) == (400, 0, "cpu")


@pytest.mark.parametrize("wrong", [{"update_freq": 0}, {"lag": 0}, {"min_ema_multiplier": 2}, {"ema_power": -1}])
def test_bema_refuses_options_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` is"):
        callbacks.BEMACallback(**wrong)


def test_bema_refuses_a_burn_in_longer_than_the_run():
    with pytest.raises(ValueError, match="nothing would be averaged"):
        drive(callbacks.BEMACallback(update_after=10), Two(), [(1.0, 1.0)])


def test_bema_of_a_run_is_saved_and_the_trained_weights_stay(tmp_path):
    """One weight of the saved model, from the checkpoints of every step; the trained model is not touched."""
    callback = callbacks.BEMACallback(update_freq=2)
    trainer = sft(tmp_path, [callback], save_strategy="steps", save_steps=1, max_steps=4)
    name = "model.layers.0.mlp.up_proj.weight"
    start = trainer.model.state_dict()[name].clone()
    trainer.train()
    run = tmp_path / "run"
    steps = {t: load_file(run / f"checkpoint-{t}" / "model.safetensors")[name] for t in (2, 4)}
    average = start
    for t in (2, 4):
        beta, alpha = (10 + t) ** -0.5, (10 + t) ** -0.2
        average = (1 - beta) * average + beta * steps[t]
        expected = alpha * (steps[t] - start) + average
    loaded = AutoModelForCausalLM.from_pretrained(run / "bema")
    torch.testing.assert_close(loaded.state_dict()[name], expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(trainer.model.state_dict()[name], steps[4])
    assert AutoTokenizer.from_pretrained(run / "bema").encode("Hi!") == tiny.tokenizer().encode("Hi!")


def test_bema_resumes_exactly(tmp_path):
    """Stopped after step 2 and resumed: the averages of step 6 are those of the run that was not stopped."""
    whole, first, second = (callbacks.BEMACallback(update_freq=1) for _ in range(3))
    sft(tmp_path / "whole", [whole], max_steps=6, lr_scheduler_type="constant").train()
    kept = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    sft(tmp_path, [first], max_steps=2, **kept).train()
    sft(tmp_path, [second], max_steps=6, **kept).train(resume_from_checkpoint=True)
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, second.weights[name]), name


def test_bema_refuses_to_resume_without_its_state(tmp_path):
    kept = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    sft(tmp_path, max_steps=2, **kept).train()
    with pytest.raises(FileNotFoundError, match="has no averages for step 2"):
        sft(tmp_path, [callbacks.BEMACallback(update_freq=1)], max_steps=4, **kept).train(resume_from_checkpoint=True)


def test_bema_of_an_adapter_holds_the_adapter_only(tmp_path):
    callback = callbacks.BEMACallback(update_freq=1)
    trainer = sft(tmp_path, [callback], peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer.train()
    assert callback.weights
    assert all("lora" in name for name in callback.weights)
    saved = load_file(tmp_path / "run" / "bema" / "adapter_model.safetensors")
    name = next(iter(callback.weights))
    torch.testing.assert_close(saved[name.replace(".default", "")], callback.weights[name])


# ---- SyncRef -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [frozen_copy, lambda module: module])
def test_reference_moves_by_its_share(given):
    """alpha 0.25, from 0 towards policies 1 and then 3: 0.25 after step 2, 0.75 * 0.25 + 0.25 * 3 after step 4."""
    policy, copy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    for parameter in copy.parameters():
        torch.nn.init.zeros_(parameter)
    args = SimpleNamespace(ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
    callback = callbacks.SyncRefModelCallback(given(copy))
    seen = []
    for step, value in enumerate([9.0, 1.0, 9.0, 3.0], start=1):
        for parameter in policy.parameters():
            torch.nn.init.constant_(parameter, value)
        callback.on_step_end(args, SimpleNamespace(global_step=step), None, model=policy)
        seen.append(copy.weight.item())
    assert seen == [0.0, 0.25, 0.25, pytest.approx(0.9375)]
    assert not copy.weight.requires_grad


def test_sync_ref_model_in_a_run(tmp_path):
    """alpha 1 at step 2: the reference is the policy of step 2."""
    args = DPOConfig(
        **quiet(tmp_path, sync_ref_model=True, ref_model_mixup_alpha=1.0, ref_model_sync_steps=2, max_steps=2)
    )
    trainer = DPOTrainer(
        tiny.causal_lm(), args=args, train_dataset=Dataset.from_list(tiny.pairs(8)), processing_class=tiny.tokenizer()
    )
    before = trainer.reference.model.state_dict()["lm_head.weight"].clone()
    trainer.train()
    after = trainer.reference.model.state_dict()["lm_head.weight"]
    assert not torch.equal(before, after)
    assert torch.equal(after, trainer.model.state_dict()["lm_head.weight"])


# ---- LogCompletions ------------------------------------------------------------------------------------------------------


def completions(trainer, **given):
    given = {"generation_config": GenerationConfig(do_sample=False, max_new_tokens=5), **given}
    return callbacks.LogCompletionsCallback(trainer, **given)


def test_completions_are_written_shown_and_equal_a_plain_generate(tmp_path, capsys):
    trainer = sft(tmp_path)
    trainer.add_callback(completions(trainer, num_prompts=3, freq=2))
    trainer.train()
    folder = tmp_path / "run" / "completions"
    assert sorted(path.name for path in folder.iterdir()) == ["step_2.parquet", "step_4.parquet"]
    table = pyarrow.parquet.read_table(folder / "step_4.parquet").to_pydict()
    assert table["step"] == [4, 4, 4]
    tokenizer, model = trainer.processing_class, trainer.model.eval()
    for row, prompt, completion in zip(tiny.chats(3), table["prompt"], table["completion"]):
        ids = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert prompt == tokenizer.decode(ids["input_ids"][0])
        alone = model.generate(**ids, do_sample=False, max_new_tokens=5, eos_token_id=256, pad_token_id=257)
        assert completion == tokenizer.decode(alone[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "completions at step 2 (all 3 in completions/step_2.parquet)" in capsys.readouterr().out


def test_completions_have_the_special_tokens_of_a_tool_call(tmp_path):
    """Where a family writes calls between special tokens, leaving them out would show an answer without its call."""
    tokenizer = tiny.tokenizer()
    call, end = tokenizer.convert_tokens_to_ids("<|im_start|>"), tokenizer.eos_token_id
    assert call in tokenizer.all_special_ids
    trainer = sft(tmp_path)
    one_token = GenerationConfig(max_new_tokens=2, suppress_tokens=[i for i in range(len(tokenizer)) if i != call])
    callback = callbacks.LogCompletionsCallback(trainer, one_token, freq=1, prompts=["Call it."])
    assert callback.answer(trainer.model, 1).completions == ["<|im_start|><|im_start|>"]
    only_end = GenerationConfig(max_new_tokens=2, suppress_tokens=[i for i in range(len(tokenizer)) if i != end])
    callback = callbacks.LogCompletionsCallback(trainer, only_end, freq=1, prompts=["End it."])
    assert callback.answer(trainer.model, 1).completions == [""]


def test_completions_change_nothing_about_the_run(tmp_path):
    """Sampled completions, yet equal losses; the padding side stays as it was."""
    plain = sft(tmp_path / "plain", logging_steps=1)
    plain.train()
    watched = sft(tmp_path / "watched", logging_steps=1)
    watched.processing_class.padding_side = "right"
    sampling = GenerationConfig(do_sample=True, max_new_tokens=4)
    watched.add_callback(callbacks.LogCompletionsCallback(watched, sampling, freq=1))
    watched.train()
    losses = [[e["loss"] for e in trainer.state.log_history if "loss" in e] for trainer in (plain, watched)]
    assert losses[0] == losses[1]
    assert watched.processing_class.padding_side == "right"
    assert watched.model.training


def test_completions_of_an_online_trainer_answer_its_evaluation_prompts(tmp_path):
    prompts = Dataset.from_dict({"prompt": ["Say A.", "Say B."]})
    args = GRPOConfig(**quiet(tmp_path, num_generations=2, per_device_train_batch_size=2, max_completion_length=4))
    trainer = GRPOTrainer(tiny.causal_lm(), len, args, prompts, prompts, tiny.tokenizer())
    model = trainer.model.eval()
    answers = completions(trainer, freq=1).answer(model, 1)
    assert answers.prompts == ["Say A.", "Say B."]
    ids = trainer.processing_class("Say B.", return_tensors="pt")
    alone = model.generate(**ids, do_sample=False, max_new_tokens=5, eos_token_id=256, pad_token_id=257)
    assert answers.completions[1] == trainer.processing_class.decode(alone[0, ids["input_ids"].shape[1] :])


def test_completions_need_a_frequency(tmp_path):
    trainer = sft(tmp_path)
    with pytest.raises(ValueError, match="`freq` is missing, and eval_strategy='no' gives none"):
        callbacks.LogCompletionsCallback(trainer)
    with pytest.raises(ValueError, match="`freq` is 0"):
        callbacks.LogCompletionsCallback(trainer, freq=0)
    with pytest.raises(ValueError, match="`num_prompts` is 129"):
        callbacks.LogCompletionsCallback(trainer, num_prompts=MAX_PROMPTS + 1, freq=1)
    with pytest.raises(ValueError, match="`prompts` holds 0 prompts"):
        callbacks.LogCompletionsCallback(trainer, freq=1, prompts=[])


def test_frequency_of_evaluation_is_the_default(tmp_path):
    trainer = sft(tmp_path, eval_strategy="steps", eval_steps=3)
    trainer.add_callback(completions(trainer, num_prompts=1))
    trainer.train()
    assert [path.name for path in (tmp_path / "run" / "completions").iterdir()] == ["step_3.parquet"]


def test_prompts_of_the_user(tmp_path):
    trainer = sft(tmp_path)
    callback = completions(trainer, freq=1, prompts=["Once", [{"role": "user", "content": "Hi"}]])
    texts = [trainer.processing_class.decode(prompt) for prompt in callback.prompts]
    assert texts == ["Once", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]


def test_prompt_of_a_pair_is_its_untrained_part(tmp_path):
    trainer = DPOTrainer(
        tiny.causal_lm(),
        args=DPOConfig(**quiet(tmp_path)),
        train_dataset=Dataset.from_list(tiny.pairs(4)),
        eval_dataset=Dataset.from_list(tiny.pairs(2)),
        processing_class=tiny.tokenizer(),
    )
    prompts = completions(trainer, freq=1).prompts
    assert [trainer.processing_class.decode(prompt) for prompt in prompts] == [row["prompt"] for row in tiny.pairs(2)]


def test_plain_texts_have_no_prompt(tmp_path):
    trainer = sft(tmp_path, rows=[{"text": "No question here."}])
    with pytest.raises(ValueError, match="nothing says where an answer begins"):
        completions(trainer, freq=1)


def test_marker_of_an_answer():
    tokenizer = tiny.tokenizer()
    assert tokenizer.decode(answer_marker(tokenizer)) == "<|im_start|>assistant\n"
    assert answer_marker(tiny.tokenizer(None)) == []
    sample = SimpleNamespace(input_ids=torch.arange(5).numpy(), trained=torch.ones(5, dtype=torch.bool).numpy())
    assert prompt_of(sample, [1, 2]) == [0, 1, 2]
    assert prompt_of(sample, []) == []


def test_completions_go_to_wandb_when_it_is_on(tmp_path, monkeypatch):
    logged = []
    table = lambda columns, data: {"columns": columns, "data": data}  # noqa: E731
    fake = SimpleNamespace(run=object(), log=logged.append, Table=table)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trainer = sft(tmp_path)
    callback = completions(trainer, num_prompts=1, freq=1)
    args = SimpleNamespace(output_dir=str(tmp_path), disable_tqdm=True, report_to=["wandb"])
    state = SimpleNamespace(global_step=1, is_world_process_zero=True, eval_steps=None)
    callback.on_step_end(args, state, None, model=trainer.model)
    assert logged[0]["completions"]["columns"] == ["step", "prompt", "completion"]
    assert len(logged[0]["completions"]["data"]) == 1
    assert json.dumps(logged)  # plain numbers and text, nothing of torch


def test_long_and_strange_completions_are_shown_clipped(capsys):
    show(Answers(7, ["[bold]x" * 100] * 10, ["ü\x00[/]"] * 10), disable_tqdm=True)
    out = capsys.readouterr().out
    assert out.count("  > ") == 4
    assert max(map(len, out.splitlines())) < 320


def test_a_table_is_drawn_above_the_live_display(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    terminal = Console(file=io.StringIO(), width=90, height=30)
    view = RichView(terminal)
    view.begin(Pace(0, 0.0), 0, 10)
    show(Answers(7, ["What is [1]?"], ["One."]), disable_tqdm=False)
    view.end()
    drawn = terminal.file.getvalue()
    assert "completions at step 7" in drawn
    assert "What is [1]?" in drawn
    assert drawn.rindex("One.") < drawn.rindex("training")
