from datasets import Dataset
from transformers import EarlyStoppingCallback, TrainerCallback

from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import SFTTrainer as SameTrainer

assert SameTrainer is SFTTrainer


class Seen(TrainerCallback):
    def __init__(self):
        self.logs, self.steps = [], 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


chats = [
    {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i} it is"}]}
    for i in range(24)
]
data = Dataset.from_list(chats).train_test_split(test_size=4, seed=0)
seen = Seen()
trainer = SFTTrainer(
    model="model",
    args=SFTConfig(
        output_dir="out", max_steps=4, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=2, save_steps=2,
        logging_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss", report_to="none", use_cpu=True,
        assistant_only_loss=True,
    ),
    train_dataset=data["train"],
    eval_dataset=data["test"],
    callbacks=[seen, EarlyStoppingCallback(early_stopping_patience=3)],
)  # fmt: skip
trainer.train()
assert seen.steps == 4
assert any("eval_loss" in logs for logs in seen.logs)
open("ended", "w").write("yes")
