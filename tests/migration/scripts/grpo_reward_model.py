from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl import GRPOConfig, GRPOTrainer

reward_model = AutoModelForSequenceClassification.from_pretrained("model", num_labels=1)
tokenizer = AutoTokenizer.from_pretrained("model")
reward_model.config.pad_token_id = tokenizer.pad_token_id
prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"Tell me about {i}"}] for i in range(16)]})
args = GRPOConfig(
    output_dir="out", num_generations=2, per_device_train_batch_size=4, max_completion_length=6, max_steps=2, beta=0.04,
    logging_steps=1, report_to="none", use_cpu=True, save_strategy="no", loss_type="dr_grpo", scale_rewards=False,
)  # fmt: skip
trainer = GRPOTrainer("model", reward_funcs=reward_model, args=args, train_dataset=prompts)
trainer.train()
assert "kl" in trainer.state.log_history[0]
open("ended", "w").write("yes")
