"""GOLD with two tokenizers: where the models are compared, and what is refused."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from posttrain import GOLDConfig, GOLDTrainer
from posttrain.methods.gold import BOUNDARY, words_of_both
from tests import tiny
from tests.trainer.test_distilling import CHATS, ROWS, collected


def gold(folder, rows=ROWS, tokenizer=None, **options):
    tokenizer = tokenizer or tiny.merging_tokenizer()
    args = GOLDConfig(
        output_dir=str(folder), report_to="none", use_cpu=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=4, max_completion_length=6, learning_rate=1e-3, disable_tqdm=True,
        **{"use_uld_loss": True, "max_steps": 2} | options,
    )  # fmt: skip
    teacher = tiny.causal_lm(1, vocab_size=len(tokenizer) + 5)
    return GOLDTrainer(
        tiny.causal_lm(), teacher, args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer(),
        teacher_processing_class=tokenizer,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [ROWS, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize("lmbda", [0.0, 1.0], ids=["of the dataset", "of the student"])
def test_both_models_have_read_the_same_text_wherever_they_are_compared(tmp_path, rows, lmbda):
    trainer = gold(tmp_path, rows, lmbda=lmbda, uld_skip_student_eos=False, uld_skip_teacher_eos=False)
    ends = 0
    for rollout in collected(trainer):
        sample, twin = rollout.sample, rollout.sample.twin
        own, theirs = (torch.tensor(one.per_token[BOUNDARY]).nonzero().squeeze(-1).tolist() for one in (sample, twin))
        assert len(own) == len(theirs) > 0
        start = int(twin.trained.argmax())
        for a, b in zip(own, theirs):
            said = trainer.processing_class.decode(
                sample.input_ids[rollout.prompt_length : a], skip_special_tokens=True
            )
            assert said == trainer.teacher.tokenizer.decode(twin.input_ids[start:b], skip_special_tokens=True)
        assert own[0] == rollout.prompt_length
        ends += sample.input_ids[own[-1]] == trainer.processing_class.eos_token_id
        prompt = trainer.teacher.tokenizer.decode(twin.input_ids[:start])
        asked = rollout.prompt if isinstance(rollout.prompt, str) else rollout.prompt[-1]["content"]
        assert asked in prompt
    if lmbda == 0:  # the dataset's completions end, and where they do is compared
        assert ends == len(collected(trainer))


def test_a_run_logs_the_losses_of_both_authors_and_falls_towards_its_teacher(tmp_path):
    trainer = gold(tmp_path, lmbda=0.5, max_steps=12, uld_use_hybrid_loss=True, steps_per_generation=1)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert any("on_policy_loss" in entry for entry in logs)
    assert any("off_policy_loss" in entry for entry in logs)
    assert all({"matched_loss", "unmatched_loss"} <= entry.keys() for entry in logs)
    first, last = (sum(entry["matched_loss"] for entry in part) for part in (logs[:4], logs[-4:]))
    assert last < first


def test_the_server_that_writes_is_where_trl_looks_for_it():
    assert GOLDConfig.vllm_server_port == 8001


def test_the_loss_of_an_author_is_a_mean_over_completions_as_the_loss_is(tmp_path):
    rows = [{**row, "completion": row["completion"] * (1 + i % 3)} for i, row in enumerate(ROWS)]
    trainer = gold(tmp_path, rows, lmbda=0.0, max_steps=1)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["off_policy_loss"] == pytest.approx(entry["loss"], rel=1e-5)


def test_words_are_matched_by_bytes():
    ours, theirs = {0: b"a", 1: b" the", 2: b"", 5: b"x"}, {0: b"", 3: b" the", 7: b"a", 8: b"a"}
    assert words_of_both(ours, theirs) == ([1, 0], [3, 7])


def test_one_tokenizer_is_gkd_at_the_sampling_temperature(tmp_path):
    trainer = gold(tmp_path, tokenizer=tiny.tokenizer(), use_uld_loss=False, temperature=0.8)
    assert trainer.scoring_temperature == trainer.teacher.asked.temperature == 0.8
    assert all(rollout.sample.twin is None for rollout in collected(trainer))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"uld_token_merge_strategy": "bayesian"}, "must be 'observed'"),
        ({"uld_skip_student_eos": False}, "both are skipped or neither"),
        ({"uld_hybrid_matched_weight": 0.5}, "Give both of `uld_hybrid_matched_weight`"),
        ({"seq_kd": True}, "cannot continue the student's prompts"),
        ({"fsdp": True}, "reads both heads again in the backward"),
        ({"use_uld_loss": False}, "GOLD is for two"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        gold(tmp_path, **options)
