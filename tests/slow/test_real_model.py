"""The real pretrained 135M model, on real data. Marked slow: CI runs these in its second step."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from posttrain import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from posttrain.cli.commands import demo
from posttrain.data.collate import collate
from posttrain.models.load.model import LoadOptions, load_model, load_tokenizer
from posttrain.models.scoring.token_scores import score_tokens
from tests.forked import Child
from tests.slow import gsm8k

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder():
    """Out of its GGUF file on the first call (this is the test of loading one), from the cache afterwards."""
    return demo.real_model()


def shortest(count: int, split: str = "train"):
    """Of 50 to 100 tokens: a step takes seconds instead of ten."""
    return sorted(
        gsm8k.rows(split), key=lambda row: len(row["prompt"][0]["content"] + row["completion"][0]["content"])
    )[:count]


def rows(count: int, split: str = "train"):
    return Dataset.from_list(shortest(count, split))


def losses_by_row(trainer) -> list[float]:
    """Mean nll of each held-out answer, so that the change has an error bar."""
    found: list[float] = []
    model = trainer.model.eval()
    with torch.no_grad():
        for batch in trainer.get_eval_dataloader():
            found += (-batch.sequence_mean(score_tokens(model, batch).logps)).tolist()
    return found


def test_the_demo_teaches_the_form_even_where_time_allows_the_fewest_steps_only(folder, tmp_path):
    words = ["--model", folder, "--output", str(tmp_path / "run"), "--seconds", "0"]
    child = Child(lambda: sys.exit(demo.main(words)), tmp_path / "log")
    assert child.wait(1200) == 0, child.output()
    said = child.output()
    before, after = map(int, re.search(r"right to the letter: (\d) of 8 before, (\d) of 8 after", said).groups())
    assert before == 0
    assert after >= 7, said


def test_the_model_is_the_real_one(folder):
    """Greedy, it knows the capital of France; ragged, padded and full logits agree on what it says."""
    loaded = load_model(folder, LoadOptions())
    tokenizer = load_tokenizer(folder, None, False)
    assert loaded.layout == "ragged"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    said = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "The capital of France is Paris." in tokenizer.decode(said[0])
    trainer = SFTTrainer(loaded.model, train_dataset=rows(3), processing_class=tokenizer)
    units = [trainer.train_dataset[i] for i in range(3)]
    with torch.no_grad():
        ragged, padded = (
            score_tokens(loaded.model.eval(), collate(units, ("text",), layout)).logps
            for layout in ("ragged", "padded")
        )
        torch.testing.assert_close(ragged, padded, rtol=1e-4, atol=1e-4)
        ids = torch.tensor(units[0][0].input_ids).long()
        full = loaded.model(input_ids=ids[None]).logits[0].log_softmax(-1)
        wanted = torch.from_numpy(units[0][0].trained)
        by_hand = full[:-1].gather(-1, ids[1:, None])[:, 0][wanted[1:]]
        torch.testing.assert_close(ragged[: len(by_hand)], by_hand, rtol=1e-4, atol=1e-4)


def test_sft_lowers_the_held_out_loss_by_more_than_its_error(folder, tmp_path):
    """GSM8K answers, LoRA, 6 steps of 4 rows: the change of each held-out row's loss gives the error bar."""
    args = SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, per_device_eval_batch_size=4, learning_rate=1e-3, max_steps=6,
        save_strategy="no", report_to="none", logging_steps=1,
    )  # fmt: skip
    trainer = SFTTrainer(
        folder, args, train_dataset=rows(40), eval_dataset=rows(8, "test"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )  # fmt: skip
    before = torch.tensor(losses_by_row(trainer))
    trainer.train()
    gain = before - torch.tensor(losses_by_row(trainer))
    error = gain.std() / len(gain) ** 0.5
    assert gain.mean() > 2 * error, (gain.mean(), error)
    assert gain.mean() > 0.15


def test_dpo_starts_at_ln_2_and_raises_the_chosen_answers(folder, tmp_path):
    """Right answers against wrong ones (the last number changed): after 4 steps the margin on the same pairs is positive."""
    pairs = []
    for row in shortest(4):
        right = row["completion"][0]["content"].rsplit("#### ", 1)[1]
        pairs.append(
            {
                "prompt": row["prompt"],
                "chosen": [{"role": "assistant", "content": f"The answer is {right}."}],
                "rejected": [{"role": "assistant", "content": "I do not know, sorry. Ask somebody else."}],
            }
        )
    args = DPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, learning_rate=5e-4, max_steps=4, save_strategy="no",
        report_to="none", logging_steps=1, warmup_steps=0,
    )  # fmt: skip
    trainer = DPOTrainer(
        folder, args=args, train_dataset=Dataset.from_list(pairs), eval_dataset=Dataset.from_list(pairs),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert lines[0]["loss"] == pytest.approx(0.693147, abs=1e-3)
    found = trainer.evaluate()
    assert found["eval_rewards/accuracies"] > 0.8
    assert found["eval_rewards/margins"] > 0.1
