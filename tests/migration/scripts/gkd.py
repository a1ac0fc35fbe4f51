from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl.experimental.gkd import GKDConfig, GKDTrainer

tokenizer = AutoTokenizer.from_pretrained("model")
student, teacher = (AutoModelForCausalLM.from_pretrained("model") for _ in range(2))
rows = load_dataset("json", data_files="gkd.jsonl", split="train").map(
    lambda row: {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
    },
    remove_columns=["prompt", "completion"],
)
args = GKDConfig(
    output_dir="out", per_device_train_batch_size=2, max_new_tokens=6, lmbda=0.5, beta=0.5, max_steps=2, logging_steps=1,
    report_to="none", use_cpu=True, save_strategy="no",
)  # fmt: skip
trainer = GKDTrainer(student, teacher, args, processing_class=tokenizer, train_dataset=rows)
trainer.train()
open("ended", "w").write("yes")
