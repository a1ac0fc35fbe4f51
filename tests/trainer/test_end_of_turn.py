"""Where an answer ends is where generation stops: a chat format's end token reaches the model's configs and the rollouts."""

from __future__ import annotations

import json

from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from tests import tiny

OTHER_END = "<|endoftext|>"


def tokenizer_with_another_end():
    tokenizer = tiny.tokenizer(None)
    tokenizer.add_special_tokens({"eos_token": OTHER_END})
    return tokenizer


def trainer_of(kind, tmp_path, tokenizer, rows, **options):
    trainer, config = {"sft": (SFTTrainer, SFTConfig), "grpo": (GRPOTrainer, GRPOConfig)}[kind]
    shared = {"output_dir": str(tmp_path), "max_steps": 1, "report_to": "none", "use_cpu": True}
    model = tiny.causal_lm(vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    more = {"reward_funcs": (lambda completions, **_: [0.0] * len(completions))} if kind == "grpo" else {}
    args = config(**shared, dataset_cache_dir=str(tmp_path / "cache"), **options)
    return trainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **more)


def test_a_built_in_format_sets_where_an_answer_ends(tmp_path, caplog):
    tokenizer = tokenizer_with_another_end()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end != tokenizer.eos_token_id
    trainer = trainer_of("sft", tmp_path, tokenizer, tiny.chats(4), chat_template_path="chatml")
    assert trainer.model.generation_config.eos_token_id == [end, tokenizer.eos_token_id]
    assert "Turns of this chat template end with '<|im_end|>'" in caplog.text
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [end, tokenizer.eos_token_id]


def test_rollouts_stop_there(tmp_path):
    tokenizer = tokenizer_with_another_end()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    rows = [{"prompt": [{"role": "user", "content": "Hi"}]}] * 4
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4}
    trainer = trainer_of("grpo", tmp_path, tokenizer, rows, chat_template_path="chatml", **options)
    assert set(trainer.stop_ids) == {end, tokenizer.eos_token_id}


def test_tokens_that_the_vocabulary_lacks_are_named(tmp_path, caplog):
    tokenizer = tiny.tokenizer(None)
    trainer_of("sft", tmp_path, tokenizer, tiny.chats(4), chat_template_path="llama3")
    assert (
        "writes <|start_header_id|>, <|end_header_id|>, <|eot_id|>, which this tokenizer spells in several tokens"
        in caplog.text
    )


def test_nothing_is_added_where_the_end_is_known(tmp_path, caplog):
    tokenizer = tiny.tokenizer()
    trainer = trainer_of("sft", tmp_path, tokenizer, tiny.chats(4))
    assert trainer.model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert "Turns of this chat template" not in caplog.text
