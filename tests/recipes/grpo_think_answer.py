"""GRPO as the field's tutorials write it for TRL, with only the import of the trainer changed. `test_recipes.py` runs it."""

import os
import re

from datasets import load_dataset
from math_verify import LatexExtractionConfig, parse, verify
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from posttrain import GRPOConfig, GRPOTrainer

model_id, data_file = os.environ["RECIPE_MODEL"], os.environ["RECIPE_DATA"]
SYSTEM_PROMPT = "Reason between <think> and </think>, then answer between <answer> and </answer>."

dataset = load_dataset("json", data_files=data_file, split="train")


def make_conversation(example):
    return {
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": example["problem"]}],
    }


dataset = dataset.map(make_conversation)
dataset = dataset.remove_columns(["problem"])

model = AutoModelForCausalLM.from_pretrained(model_id, dtype="auto", device_map="auto")
lora_config = LoraConfig(
    task_type="CAUSAL_LM", r=8, lora_alpha=32, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]
)
model = get_peft_model(model, lora_config)
model.print_trainable_parameters()


def format_reward(completions, **kwargs):
    pattern = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)
    contents = [completion[0]["content"] for completion in completions]
    letters = [sum(character.isalpha() for character in content) / 160 for content in contents]
    return [1.0 if pattern.fullmatch(content.strip()) else some for content, some in zip(contents, letters)]


def accuracy_reward(completions, **kwargs):
    rewards = []
    for completion, solution in zip(completions, kwargs["solution"]):
        gold = parse(solution, extraction_mode="first_match", extraction_config=[LatexExtractionConfig()])
        answer = parse(completion[0]["content"], extraction_mode="first_match")
        if len(gold) == 0:
            rewards.append(1.0)
            continue
        try:
            rewards.append(float(verify(answer, gold)))
        except Exception:
            rewards.append(0.0)
    return rewards


training_args = GRPOConfig(
    output_dir=os.environ["RECIPE_OUTPUT"],
    learning_rate=1e-5,
    remove_unused_columns=False,  # the accuracy reward reads the column `solution`
    gradient_accumulation_steps=16,
    num_train_epochs=1,
    max_completion_length=16,
    num_generations=8,
    max_prompt_length=256,
    report_to=["trackio"],
    project="think-and-answer",
    trackio_space_id="team/think-and-answer",
    logging_steps=1,
    push_to_hub=True,
    hub_model_id="team/think-and-answer",
    save_strategy="steps",
    save_steps=int(os.environ["RECIPE_STEPS"]) - 1,
    max_steps=int(os.environ["RECIPE_STEPS"]),
    use_vllm=True,
    vllm_mode=os.environ["RECIPE_MODE"],
    **({"vllm_server_port": int(os.environ["RECIPE_PORT"])} if "RECIPE_PORT" in os.environ else {}),
)
trainer = GRPOTrainer(
    model=model, reward_funcs=[format_reward, accuracy_reward], args=training_args, train_dataset=dataset
)
trainer.train()
trainer.save_model(training_args.output_dir)
trainer.push_to_hub(dataset_name="someone/maths")
