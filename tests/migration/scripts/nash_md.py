from datasets import load_dataset
from peft import LoraConfig

from trl.experimental.nash_md import NashMDConfig, NashMDTrainer


def reward_len(completions, **kwargs):
    return [-abs(5 - len(completion)) for completion in completions]


trainer = NashMDTrainer(
    "model",
    reward_funcs=reward_len,
    args=NashMDConfig(
        output_dir="out", per_device_train_batch_size=2, max_new_tokens=6, mixture_coef=[0.5, 0.3], max_steps=2,
        logging_steps=1, report_to="none", use_cpu=True, save_strategy="no",
    ),
    train_dataset=load_dataset("json", data_files="nash_md.jsonl", split="train"),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
)  # fmt: skip
trainer.train()
open("ended", "w").write("yes")
