"""The model as its own teacher: its weights, what it is shown, and what is compared."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from posttrain import SDFTConfig, SDFTTrainer
from posttrain.losses.distributions import sampled_divergence
from posttrain.losses.importance import capped_ratios
from posttrain.models.load.reference import frozen_adapter, frozen_copy
from posttrain.trainer.references.setup import MoveTeacherCallback
from posttrain.trainer.self_distilling_trainer import fill, shown
from tests import tiny
from tests.forked_workers import forked_workers  # noqa: F401
from tests.trainer.test_async import written
from tests.trainer.test_distilling import collected

ROWS = [{"prompt": f"What is {i}?", "privileged_context": f"It is {i}."} for i in range(8)]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def sdft(folder, rows=ROWS, model=None, given=None, **options):
    chosen = {"num_generations": 2, "max_completion_length": 4, "max_steps": 2, "learning_rate": 1e-2, **options}
    args = SDFTConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4, disable_tqdm=True, **chosen,
    )  # fmt: skip
    model = tiny.causal_lm() if model is None else model
    named = {"processing_class": tiny.tokenizer(), **(given or {})}
    return SDFTTrainer(model, args, Dataset.from_list(rows), **named)


def adapted(model=None):
    """With an adapter whose B is not 0."""
    model = get_peft_model(tiny.causal_lm() if model is None else model, LORA)
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    return model


def a_batch(trainer):
    return trainer.data_collator([(one.sample,) for one in collected(trainer)])


# ---- the teacher's weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: tiny.causal_lm(dtype=torch.bfloat16), adapted], ids=["copy-bf16", "adapter"])
def test_a_moving_average_starts_as_a_copy_and_ends_at_a_policy_that_stands_still(make):
    """TRL starts both factors of the adapter at 0; and shares of a bfloat16's last digit are lost where nothing keeps them."""
    policy = make()
    is_adapter = hasattr(policy, "peft_config")
    teacher = frozen_adapter(policy, "teacher") if is_adapter else frozen_copy(copy.deepcopy(policy))
    teacher.keep_averages()
    trained = {name: w for name, w in policy.named_parameters() if w.requires_grad}
    before = {name: w.detach().clone() for name, w in trained.items()}
    assert all(torch.equal(teacher.weights()[name], w) for name, w in trained.items())
    for parameter in trained.values():
        parameter.data.mul_(2)
    teacher.sync(policy, 0.1)
    name, first = next(iter(before.items()))
    torch.testing.assert_close(teacher.state()[name], first.float() * 1.1, rtol=1e-6, atol=1e-7)
    for _ in range(300):
        teacher.sync(policy, 0.1)
    assert bool(teacher.averages) != is_adapter  # float32 beside bfloat16 only
    for name, parameter in trained.items():
        torch.testing.assert_close(teacher.weights()[name], parameter.detach(), rtol=1e-6, atol=1e-7)
        assert not teacher.weights()[name].requires_grad


def test_base_is_the_model_under_a_new_adapter_and_a_continued_adapter_as_it_was(tmp_path):
    new = sdft(tmp_path, given={"peft_config": LORA})
    batch = a_batch(new)
    wanted = sdft(tmp_path).teacher.logps(batch)  # of a copy
    for name, parameter in new.model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.2)
    torch.testing.assert_close(new.teacher.logps(batch), wanted)
    continued = sdft(tmp_path, model=adapted())
    as_it_was = continued.teacher.logps(batch)
    assert (as_it_was - wanted).abs().max() > 1e-3
    for name, parameter in continued.model.named_parameters():
        if "lora_B.default" in name:
            parameter.data.fill_(0.2)
    torch.testing.assert_close(continued.teacher.logps(batch), as_it_was)


def test_live_is_the_policy_and_no_second_model(tmp_path):
    trainer = sdft(tmp_path, teacher_model_kind="live")
    assert trainer.teacher.asked.model is trainer.model
    trainer.train()
    batch = a_batch(trainer)
    rows = trainer.teacher.rows(batch)
    assert not rows.hidden.requires_grad
    assert trainer.model.training


def test_the_average_moves_every_so_many_steps_by_its_rate(tmp_path):
    trainer = sdft(tmp_path, teacher_model_kind="ema", teacher_sync_steps=2, teacher_update_rate=0.25)
    began = {name: w.detach().clone() for name, w in trainer.model.named_parameters()}
    trainer.train()
    assert any(isinstance(one, MoveTeacherCallback) for one in trainer.callback_handler.callbacks)
    for name, now in trainer.model.named_parameters():
        wanted = 0.75 * began[name] + 0.25 * now.detach()  # one update in two steps
        torch.testing.assert_close(trainer.teacher.asked.weights()[name], wanted)


def test_what_is_saved_of_two_adapters_is_the_trained_one(tmp_path):
    trainer = sdft(tmp_path, teacher_model_kind="ema", given={"peft_config": LORA})
    assert set(trainer.model.peft_config) == {"default", "teacher"}
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "saved" / "teacher").exists()


def test_an_adapter_on_the_head_and_options_without_effect_are_refused(tmp_path):
    on_head = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    untied = tiny.causal_lm(tie_word_embeddings=False)
    with pytest.raises(ValueError, match="The adapter is on the output head"):
        sdft(tmp_path, model=untied, given={"peft_config": on_head})
    for options, said in (
        ({"teacher_update_rate": 0.1}, "only `teacher_model_kind='ema'` reads it"),
        (
            {"distillation_mode": "full_logits", "distillation_topk": 5},
            "only `distillation_mode='topk_logits'` reads it",
        ),
        ({"distillation_mode": "sampled_token"}, "`distillation_alpha` is 0.5; of the written token alone"),
        ({"teacher_prompt_template": "{prompt}"}, "has no {privileged_context}"),
        ({"use_teacher_server": True}, "it is asked in this process"),
    ):
        with pytest.raises(ValueError, match=said):
            sdft(tmp_path, **options)


# ---- what it is shown ----------------------------------------------------------------------------------------------------


def test_the_teacher_reads_the_context_before_the_same_completion(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is {x}?"}]
    told = [{"role": "user", "content": "It is"}, {"role": "assistant", "content": "{prompt}."}]
    rows = [{"prompt": chat, "privileged_context": told}] * 4
    options = {"num_loss_tokens_to_skip": 2, "teacher_prompt_template": "Q: {prompt} Hint: {privileged_context}"}
    trainer = sdft(tmp_path, rows, given={"processing_class": tiny.tokenizer("chatml")}, **options)
    for rollout in collected(trainer):
        sample, twin = rollout.sample, rollout.sample.twin
        read = trainer.processing_class.decode(twin.input_ids)
        assert "<|im_start|>user\nQ: What is {x}? Hint: It is\n{prompt}.<|im_end|>" in read
        assert "Be brief." in read
        written = len(sample) - rollout.prompt_length
        assert sample.trained.tolist() == [False] * (rollout.prompt_length + 2) + [True] * (written - 2)
        assert sample.input_ids[sample.trained].tolist() == twin.input_ids[twin.trained].tolist()


def test_a_context_that_is_too_long_loses_its_beginning_and_no_token_of_the_completion(tmp_path):
    rows = [{"prompt": "Hi", "privileged_context": "x" * 200 + "end"}] * 4
    trainer = sdft(tmp_path, rows, model=tiny.causal_lm(max_position_embeddings=64))
    for rollout in collected(trainer):
        twin = rollout.sample.twin
        assert len(twin) == 64
        assert trainer.processing_class.decode(twin.input_ids[: -twin.num_trained]).endswith("xend")
        assert twin.num_trained == rollout.sample.num_trained == 4


def test_completions_may_be_written_to_the_teachers_prompt(tmp_path):
    asked = []
    trainer = sdft(tmp_path, generate_from_teacher=True)
    turns = trainer.collector.writer.episodes

    def watched(*given):
        made = turns(*given)
        asked.extend(trainer.processing_class.decode(turn.prompt().ids) for turn in made)
        return made

    trainer.collector.writer.episodes = watched
    rollouts = collected(trainer)
    rows = [ROWS[one.request.row] for one in rollouts]
    assert asked == [f"{row['prompt']}\n\n{row['privileged_context']}" for row in rows]
    for rollout, row in zip(rollouts, rows):
        own = rollout.sample.input_ids[: rollout.prompt_length]
        assert trainer.processing_class.decode(own) == row["prompt"]


def test_rows_without_a_context_are_refused_by_name(tmp_path):
    with pytest.raises(
        ValueError, match="The dataset train has the columns prompt; SDFTTrainer needs 'privileged_context'"
    ):
        sdft(tmp_path, [{"prompt": "Hi"}])
    with pytest.raises(ValueError, match="Row 8 has nothing in the column 'privileged_context'"):
        sdft(tmp_path, [*ROWS, {"prompt": "Hi", "privileged_context": None}])
    with pytest.raises(ValueError, match="The prompt of row 7 has no user turn"):
        shown([{"role": "system", "content": "Be brief."}], str.upper, 7)


def test_a_template_is_filled_once():
    assert fill("{a}{b}{c}", {"a": "{b}", "b": "1"}) == "{b}1{c}"


# ---- numbers -------------------------------------------------------------------------------------------------------------


def test_of_a_written_token_the_value_is_the_log_ratio_times_its_log_prob():
    """Section 3.2: log pi -1.2, log q -0.7."""
    logps = torch.tensor([-1.2], dtype=torch.float64, requires_grad=True)
    value = sampled_divergence(logps, torch.tensor([-0.7], dtype=torch.float64))
    value.sum().backward()
    assert (value.item(), logps.grad.item()) == pytest.approx((0.6, -0.5))
    found = capped_ratios(torch.tensor([-1.0, -1.0]), torch.tensor([-1.5, -3.0]), 2.0)
    assert found.tolist() == pytest.approx([1.648721, 2.0])


def test_an_empty_template_teaches_nothing_and_context_does(tmp_path):
    """The student before its first step is the teacher; only what is shown differs."""
    losses = []
    for template in ("{prompt}", "{prompt}\n\n{privileged_context}"):
        trainer = sdft(tmp_path, distillation_mode="full_logits", max_steps=1)
        trainer.args.teacher_prompt_template = template
        trainer.train()
        (entry,) = [one for one in trainer.state.log_history if "sdft/distillation_loss" in one]
        assert entry["sdft/distillation_loss"] == entry["self_distillation/distillation_loss"] == entry["loss"]
        losses.append(entry["loss"])
    assert losses[0] == pytest.approx(0, abs=1e-7)
    assert losses[1] > 1e-4


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_worker_process_writes_to_the_teachers_prompt_what_a_thread_does(tmp_path):
    options = {"generate_from_teacher": True, "async_rollouts": True, "async_order": "in_order", "async_lead": 1}
    for name, workers in (("thread", None), ("process", 1)):
        trainer = sdft(tmp_path / name, **options, rollout_workers=workers, rollout_engine="native", seed=7)
        trainer.train()
        trainer.close()
    rows = written(tmp_path / "process")
    assert rows == written(tmp_path / "thread")
    assert len(rows) == 8
    assert len({tuple(row["completion_ids"]) for row in rows}) > 4
