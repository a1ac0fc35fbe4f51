from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl import PPOConfig, PPOTrainer

tokenizer = AutoTokenizer.from_pretrained("model", padding_side="left")
policy, ref_policy = (AutoModelForCausalLM.from_pretrained("model") for _ in range(2))
value_model, reward_model = (
    AutoModelForSequenceClassification.from_pretrained("model", num_labels=1) for _ in range(2)
)
dataset = load_dataset("json", data_files="rloo.jsonl", split="train")
dataset = dataset.map(
    lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, remove_columns=["prompt", "answer"]
)
trainer = PPOTrainer(
    args=PPOConfig(
        output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_mini_batches=2, num_ppo_epochs=1,
        total_episodes=8, response_length=6, stop_token="eos", missing_eos_penalty=1.0, logging_steps=1, report_to="none",
        use_cpu=True, save_strategy="no",
    ),
    processing_class=tokenizer,
    model=policy,
    ref_model=ref_policy,
    reward_model=reward_model,
    value_model=value_model,
    train_dataset=dataset,
)  # fmt: skip
trainer.train()
trainer.save_model("out")
open("ended", "w").write("yes")
