"""Teachers, the coin, and completions that the dataset brings."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import DistillationConfig, DistillationTrainer, GKDConfig, GKDTrainer, SSDConfig, SSDTrainer
from posttrain.methods.ssd import is_stub
from posttrain.rollout.engines.noise import noise_base, uniforms
from posttrain.rollout.rollout import DATASET, POLICY, TEACHER
from posttrain.rollout.schedule import Schedule
from posttrain.rollout.source import Prompts, PromptStream
from posttrain.trainer.distilling_trainer import COIN, lands_on_policy
from tests import tiny

ROWS = [{"prompt": f"What is {i}?", "completion": f" It is {i}."} for i in range(8)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": f"It is {i}."},
        ]
    }
    for i in range(4)
]


def gkd(folder, rows=ROWS, teacher=None, tokenizer=None, given=None, **options):
    args = GKDConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, save_strategy="no", logging_steps=1, max_steps=2,
        per_device_train_batch_size=4, max_completion_length=4, learning_rate=1e-3, disable_tqdm=True, **options,
    )  # fmt: skip
    teacher = tiny.causal_lm(1) if teacher is None else teacher
    own = {"processing_class": tiny.tokenizer(), "teacher_processing_class": tokenizer or tiny.tokenizer()}
    return GKDTrainer(
        tiny.causal_lm(), teacher, args, train_dataset=Dataset.from_list(rows), **{**own, **(given or {})}
    )


def collected(trainer):
    """The rollouts of the first window."""
    loader = trainer.get_train_dataloader()
    loader.source.next_window()
    return loader.source.take_finished()[0].rollouts


# ---- the coin ------------------------------------------------------------------------------------------------------------


def test_the_coin_falls_by_prompt_whatever_the_processes():
    """0 never, 1 always, 0.3 for about 30%; the prompts of a window are dealt out to 1, 2 or 4 processes."""
    falls = [lands_on_policy(7, number, 0.3) for number in range(4000)]
    assert sum(falls) / 4000 == pytest.approx(0.3, abs=0.03)
    assert not any(lands_on_policy(7, number, 0.0) for number in range(4000))
    assert all(lands_on_policy(7, number, 1.0) for number in range(4000))
    noises = torch.tensor([noise_base(7, number, COIN) for number in range(4000)])
    assert falls == (uniforms(noises, torch.zeros(4000, dtype=torch.long)) < 0.3).tolist()
    assert falls != [lands_on_policy(8, number, 0.3) for number in range(4000)]
    seen = []
    for processes in (1, 2, 4):
        schedule = Schedule.of(num_generations=1, batch_size=8 // processes, world_size=processes, accumulation=2)
        dealt = [Prompts(PromptStream(16, 3, True), schedule, rank).take_window() for rank in range(processes)]
        seen.append({r.row: lands_on_policy(3, r.number, 0.5) for part in dealt for r in part})
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 16


@pytest.mark.parametrize(("options", "other"), [({}, DATASET), ({"seq_kd": True}, TEACHER)])
def test_each_prompt_is_answered_by_whom_its_coin_names(options, other, tmp_path):
    trainer = gkd(tmp_path, per_device_eval_batch_size=4, lmbda=0.5, steps_per_generation=2, **options)
    rollouts = collected(trainer)
    wanted = [POLICY if lands_on_policy(trainer.args.seed, r.request.number, 0.5) else other for r in rollouts]
    assert [r.author for r in rollouts] == wanted
    assert {POLICY, other} == set(wanted)
    decode = trainer.processing_class.decode
    for rollout in rollouts:
        row = ROWS[rollout.request.row]
        assert decode(rollout.sample.input_ids[: rollout.prompt_length]) == row["prompt"]
        if rollout.author == DATASET:
            assert decode(rollout.sample.input_ids[rollout.sample.trained]).startswith(row["completion"])
            assert np.isnan(rollout.sample.per_token["sampling_logps"][-1])


def test_of_a_conversation_the_last_turn_is_the_completion(tmp_path):
    trainer = gkd(tmp_path, rows=CHATS, lmbda=0.0)
    (first, *_) = collected(trainer)
    sample, decode = first.sample, trainer.processing_class.decode
    wrote = CHATS[first.request.row]["messages"]
    assert wrote[-1]["content"] in decode(sample.input_ids[sample.trained])
    assert "Hello." not in decode(sample.input_ids[sample.trained])
    assert first.prompt == wrote[:-1]
    assert first.completion == wrote[-1:]


def test_conversations_without_an_answer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="row 0, column 'messages': ends on a user turn nobody answers"):
        gkd(tmp_path, rows=[{"messages": CHATS[0]["messages"][:3]}])


def test_prompts_alone_are_enough_where_nothing_else_is_read(tmp_path):
    prompts = [{"prompt": row["prompt"]} for row in ROWS]
    with pytest.raises(ValueError, match="this method reads prompt-completion"):
        gkd(tmp_path, rows=prompts, lmbda=0.5)
    for options in ({"lmbda": 1.0}, {"lmbda": 0.5, "seq_kd": True}):
        assert {r.author for r in collected(gkd(tmp_path, rows=prompts, **options))} <= {POLICY, TEACHER}


# ---- teachers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beta", "lora"), [(0.0, False), (0.5, True), (1.0, False)])
def test_a_teacher_that_is_the_student_teaches_nothing(beta, lora, tmp_path):
    """Loss and gradient are 0; with SGD, whose step is as long as the gradient, nothing moves."""
    given = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])} if lora else {}
    trainer = gkd(tmp_path, teacher=tiny.causal_lm(), beta=beta, lmbda=0.5, optim="sgd", given=given)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(abs(entry["loss"]) for entry in logs) < 1e-6
    assert {"on_policy_loss", "off_policy_loss"} <= {name for entry in logs for name in entry}
    moved = max((p - before[name]).abs().max().item() for name, p in trainer.model.state_dict().items())
    assert moved < 1e-6


def test_the_loss_falls_and_dataset_completions_are_what_is_evaluated(tmp_path):
    trainer = gkd(tmp_path, lmbda=0.5, given={"eval_dataset": Dataset.from_list(ROWS)}, beta=0.0)
    first = trainer.evaluate()
    trainer.train()
    last = trainer.evaluate()
    assert last["eval_loss"] < first["eval_loss"]
    assert not any(name.startswith(("reward", "frac_reward")) for entry in trainer.state.log_history for name in entry)


def test_the_vocabularies_of_one_tokenizer_may_be_padded_differently(tmp_path):
    wider, narrower = tiny.causal_lm(1), tiny.causal_lm(1)
    own = wider.config.vocab_size
    wider.resize_token_embeddings(own + 5)
    narrower.resize_token_embeddings(own - 5)
    for teacher, words in ((wider, own), (narrower, own - 5)):
        trainer = gkd(tmp_path, teacher=teacher)
        assert trainer.vocabulary == words
        trainer.train()
        assert all(np.isfinite(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(tmp_path):
    other = copy.deepcopy(tiny.tokenizer())
    other.add_tokens(["<new>"])
    with pytest.raises(
        ValueError, match=r"'<new>' is not in the vocabulary of the student and token \d+ of the teacher.*GOLD"
    ):
        gkd(tmp_path, tokenizer=other)


def test_what_a_teacher_cannot_be_is_said_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="GKDTrainer needs a teacher: pass `teacher_model`"):
        GKDTrainer(tiny.causal_lm(), args=GKDConfig(output_dir=str(tmp_path), use_cpu=True))
    with pytest.raises(ValueError, match="are for teachers given by name or path"):
        gkd(tmp_path, teacher_model_init_kwargs={"dtype": "float32"})
    with pytest.raises(ValueError, match="Pass it as `teacher_processing_class`"):
        gkd(tmp_path, given={"teacher_processing_class": None})
    with pytest.raises(ValueError, match="leave it at 1, or set `lmbda` to 1"):
        DistillationConfig(output_dir=str(tmp_path), use_cpu=True, lmbda=0.5, num_generations=2)
    with pytest.raises(ValueError, match=r"`reward_weights` is .*Nothing is rewarded"):
        GKDConfig(output_dir=str(tmp_path), use_cpu=True, reward_weights=[1.0])


def test_a_teacher_by_name_has_arguments_of_its_own(tmp_path):
    """Its dtype is its own; the student's `model_init_kwargs` are not handed to it."""
    teacher = tmp_path / "teacher"
    tiny.causal_lm(1).save_pretrained(teacher)
    tiny.tokenizer().save_pretrained(teacher)
    trainer = gkd(tmp_path, teacher=str(teacher), teacher_model_init_kwargs='{"dtype": "bfloat16"}')
    assert next(trainer.teacher.asked.model.parameters()).dtype == torch.bfloat16
    assert next(trainer.model.parameters()).dtype == torch.float32
    assert not any(p.requires_grad for p in trainer.teacher.asked.model.parameters())
    assert trainer.plan_lines(2)["teacher"].startswith(f"{teacher} (13,040 weights, bfloat16)")


# ---- the methods ---------------------------------------------------------------------------------------------------------


def test_distillation_compares_at_its_temperature_and_gkd_at_its_own(tmp_path):
    shared = {"output_dir": str(tmp_path), "use_cpu": True, "temperature": 0.7}
    assert DistillationTrainer.compared_at(DistillationConfig(**shared)) == 0.7
    assert GKDTrainer.compared_at(GKDConfig(**shared)) == 1.0
    assert gkd(tmp_path, loss_temperature=0.5).teacher.asked.temperature == 0.5


def test_stubs_are_left_out_of_self_distillation(tmp_path):
    """Numbers of a step are those of the completions that are left."""
    assert [is_stub(text) for text in (" \n ", "short", "a\nb", "ten chars.")] == [True, True, False, False]
    args = SSDConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, save_strategy="no", max_steps=1, max_completion_length=12,
        per_device_train_batch_size=8, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in ROWS])
    model = tiny.causal_lm().eval()  # as it is loaded
    trainer = SSDTrainer(model, args, prompts, processing_class=tiny.tokenizer())
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    texts = [rollout.completion for rollout in trainer.log_of_rollouts.latest]
    kept = sum(not is_stub(text) for text in texts)
    assert 0 < kept < 8, "the seed should give some of both"
    assert entry["ssd/active_sample_ratio"] == kept / 8
    assert entry["ssd/cross_entropy_loss"] == pytest.approx(entry["loss"], rel=1e-5)


@pytest.mark.parametrize("longest_pass", [None, 30], ids=["whole", "passes"])
def test_what_is_left_of_a_step_is_counted_where_it_is_trained(tmp_path, longest_pass):
    """Two steps of a generation, each of two micro-batches: a run that is resumed between them counts the same."""
    options = {
        "report_to": "none", "use_cpu": True, "max_steps": 2, "save_steps": 1, "max_completion_length": 12, "logging_steps": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "disable_tqdm": True,
        "max_tokens_per_pass": longest_pass,
    }  # fmt: skip
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in ROWS])

    def ratios(checkpoint=None):
        args = SSDConfig(output_dir=str(tmp_path), **options)
        trainer = SSDTrainer(tiny.causal_lm(), args, prompts, processing_class=tiny.tokenizer())
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, [entry["ssd/active_sample_ratio"] for entry in trainer.state.log_history if "loss" in entry]

    trainer, whole = ratios()
    left = [not is_stub(rollout.completion) for rollout in trainer.log_of_rollouts.latest]
    assert whole == [sum(left[:4]) / 4, sum(left[4:]) / 4]
    assert whole != [1, 1]
    assert ratios(str(tmp_path / "checkpoint-1"))[1] == whole
