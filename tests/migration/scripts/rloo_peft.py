from datasets import load_dataset
from peft import LoraConfig

from trl import RLOOConfig, RLOOTrainer


def reward_len(completions, **kwargs):
    return [-abs(5 - len(completion)) for completion in completions]


trainer = RLOOTrainer(
    model="model",
    reward_funcs=reward_len,
    train_dataset=load_dataset("json", data_files="rloo.jsonl", split="train"),
    args=RLOOConfig(
        output_dir="out", num_generations=2, per_device_train_batch_size=4, max_completion_length=6, max_steps=2,
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no",
    ),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
)  # fmt: skip
trainer.train()
open("ended", "w").write("yes")
