"""PPO: a critic says what to expect of a prompt and its first tokens; what turns out better is made more likely."""

from datasets import Dataset

from posttrain import PPOConfig, PPOTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)


def brevity(completion_ids, **kwargs):
    """Fewer tokens are better."""
    return [-len(ids) / 32 for ids in completion_ids]


trainer = PPOTrainer(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=brevity,  # or reward_model="runs/reward"
    args=PPOConfig(
        output_dir="runs/ppo",
        total_episodes=16,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,  # a generation has 8 completions,
        num_mini_batches=2,  # which make two optimizer steps,
        num_ppo_epochs=2,  # twice
        response_length=32,
        missing_eos_penalty=1.0,
        adap_kl_ctrl=True,
        kl_coef=0.2,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()  # the critic beside it, in value_head.safetensors
