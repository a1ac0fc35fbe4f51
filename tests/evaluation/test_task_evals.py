"""Task scores during a run: equal to those of the saved checkpoints, without a trace in training; best checkpoint, early ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from peft import LoraConfig
from transformers import EarlyStoppingCallback

from posttrain import (
    DPOConfig,
    DPOTrainer,
    EvalSpec,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
    TaskEvals,
)
from posttrain.data.render.renderer import Renderer
from posttrain.evaluation.run import TaskEvaluation, engine_for, stop_ids
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.load.saved_model import find_saved
from tests import tiny

PROMPTS = [{"prompt": f"What is {i}?", "answer": i} for i in range(8)]
COMMON = {
    "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.02, "report_to": "none", "use_cpu": True,
    "logging_steps": 1, "save_steps": 2,
}  # fmt: skip


def odd(completion_ids, answer, **columns):
    return [float((sum(ids) + a) & 1) for ids, a in zip(completion_ids, answer)]


def length(completion_ids, **columns):
    return [float(len(set(ids))) for ids in completion_ids]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def spec(**changes):
    return EvalSpec(PROMPTS, odd, **{"name": "odd", "samples": 3, "max_new_tokens": 8, "every": 2, **changes})


def sft(model, folder, **options):
    named = {name: options.pop(name) for name in ("callbacks", "eval_dataset", "peft_config") if name in options}
    config = SFTConfig(output_dir=str(folder), **{**COMMON, **options})
    return SFTTrainer(model, config, train_dataset=Dataset.from_list(tiny.chats()), **named)


def dpo(model, folder, **options):
    config = DPOConfig(output_dir=str(folder), **{**COMMON, **options})
    return DPOTrainer(model, args=config, train_dataset=Dataset.from_list(tiny.pairs()))


def grpo(model, folder, **options):
    config = GRPOConfig(output_dir=str(folder), num_generations=4, max_completion_length=6, **{**COMMON, **options})
    return GRPOTrainer(model, length, config, train_dataset=Dataset.from_list(PROMPTS))


def lora(model, folder, **options):
    return sft(model, folder, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), **options)


def rloo(model, folder, **options):
    config = RLOOConfig(output_dir=str(folder), num_generations=4, max_completion_length=6, **{**COMMON, **options})
    return RLOOTrainer(model, length, config, train_dataset=Dataset.from_list(PROMPTS))


MAKERS = {"sft": sft, "dpo": dpo, "grpo": grpo, "rloo": rloo, "lora": lora}


def scores(trainer, name="evals/odd/score"):
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


def offline(folder, one):
    """What `posttrain eval` does with a folder."""
    saved = find_saved(folder)
    tokenizer, raw = saved.tokenizer(), saved.load()
    loaded = load_model(raw, LoadOptions(dtype=raw.dtype)).model.eval()
    task = TaskEvaluation(one, one.rows(Renderer(tokenizer)), tokenizer)
    found = task(engine_for("native", tokenizer)(loaded), stop_ids(loaded, tokenizer))
    task.close()
    return found


@pytest.mark.parametrize("method", MAKERS)
def test_a_score_of_the_run_is_that_of_its_checkpoint(model, tmp_path, method):
    trainer = MAKERS[method](model, tmp_path)
    TaskEvals(trainer, [spec()])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "evals/odd/score" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    for entry in logged[1:]:
        found = offline(tmp_path / f"checkpoint-{entry['step']}", spec()).metrics()
        assert {f"evals/odd/{name}": value for name, value in found.items() if name != "seconds"} == {
            name: value for name, value in entry.items() if name.startswith("evals/") and name != "evals/odd/seconds"
        }
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "evals/odd/pass@1" in line] == [0, 2, 4]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_training_is_the_same_with_and_without(model, tmp_path, method):
    plain, evaluated = (MAKERS[method](model, tmp_path / name) for name in ("plain", "evaluated"))
    TaskEvals(evaluated, [spec(every=1)])
    plain.train()
    evaluated.train()
    without, with_evals = ([e["loss"] for e in one.state.log_history if "loss" in e] for one in (plain, evaluated))
    assert without == with_evals
    files = [Path(one.args.output_dir) / "checkpoint-4" / "model.safetensors" for one in (plain, evaluated)]
    assert files[0].read_bytes() == files[1].read_bytes()


def falling(trainer_state, completion_ids, **columns):
    """Best at step 2."""
    return [{0: 0.5, 2: 0.9}.get(trainer_state.global_step, 0.1)] * len(completion_ids)


def test_the_best_checkpoint_is_kept_and_loaded(model, tmp_path):
    trainer = sft(model, tmp_path / "kept", save_total_limit=2, save_steps=1)
    TaskEvals(trainer, [EvalSpec(PROMPTS, falling, name="f", max_new_tokens=2, every=1)])
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (2, pytest.approx(0.9))
    assert {path.name for path in (tmp_path / "kept").glob("checkpoint-*")} == {
        f"checkpoint-{step}" for step in (2, 3, 4)
    }

    options = {"save_strategy": "best", "metric_for_best_model": "evals/f/score", "load_best_model_at_end": True}
    trainer = sft(model, tmp_path / "best", **options)
    TaskEvals(trainer, [EvalSpec(PROMPTS, falling, name="f", max_new_tokens=2, every=1)])
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = find_saved(tmp_path / "best" / "checkpoint-2").load().state_dict()
    now = trainer.model.state_dict()
    assert all((best[name] == now[name]).all() for name in best)


def test_early_ends(model, tmp_path, capsys):
    trainer = sft(model, tmp_path / "patience", max_steps=10, save_strategy="no")
    TaskEvals(trainer, [EvalSpec(PROMPTS, falling, name="f", max_new_tokens=2, every=1, patience=3)])
    trainer.train()
    assert trainer.state.global_step == 5  # best at 2; 3, 4 and 5 are not better
    assert "has not been above 0.9 in 3 evaluations" in capsys.readouterr().out
    trainer = sft(model, tmp_path / "drop", max_steps=10, save_strategy="no")
    TaskEvals(trainer, [EvalSpec(PROMPTS, falling, name="f", max_new_tokens=2, every=1, max_drop=0.3)])
    trainer.train()
    assert trainer.state.global_step == 1  # 0.1 after 0.5
    assert "more than `max_drop`=0.3 below" in capsys.readouterr().out


def test_transformers_early_stopping_reads_the_scores(model, tmp_path):
    options = {
        "max_steps": 10, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "evals/f/score",
        "load_best_model_at_end": True, "eval_dataset": Dataset.from_list(tiny.chats(4)),
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=2)],
    }  # fmt: skip
    trainer = sft(model, tmp_path, **options)
    TaskEvals(trainer, [EvalSpec(PROMPTS, falling, name="f", max_new_tokens=2)])
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.state.global_step == 4
    assert scores(trainer, "evals/f/score") == pytest.approx({0: 0.5, 1: 0.1, 2: 0.9, 3: 0.1, 4: 0.1})


def test_a_resumed_run_goes_on_with_its_scores(model, tmp_path):
    whole = sft(model, tmp_path / "whole", max_steps=4)
    TaskEvals(whole, [spec(every=1)])
    whole.train()
    first = sft(model, tmp_path / "parts", max_steps=4, save_steps=2)
    TaskEvals(first, [spec(every=1, patience=99)])
    first.train()
    again = sft(model, tmp_path / "parts", max_steps=4, save_steps=2)
    TaskEvals(again, [spec(every=1, patience=99)])
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert scores(again) == scores(whole)


def test_what_cannot_be_is_refused(model, tmp_path):
    trainer = sft(model, tmp_path, metric_for_best_model="evals/nobody/score")
    with pytest.raises(ValueError, match="nobody"):
        TaskEvals(trainer, [spec()])
    with pytest.raises(ValueError, match="named 'odd'"):
        TaskEvals(trainer, [spec(), spec()])
    rewarder = RewardTrainer(
        tiny.reward_model(), RewardConfig(output_dir=str(tmp_path / "r"), **COMMON), processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_list(tiny.pairs()),
    )  # fmt: skip
    with pytest.raises(ValueError, match="writes nothing"):
        TaskEvals(rewarder, [spec()])
