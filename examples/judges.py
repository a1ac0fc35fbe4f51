"""A judge as the reward of GRPO, and the win rate of the model against the one that the run began with."""

from datasets import Dataset

from posttrain import BasePairwiseJudge, GRPOConfig, GRPOTrainer, WinRateCallback

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Describe {topic}."}]} for topic in topics])


class Brief(BasePairwiseJudge):
    """The answer with fewer words is better; as many words are a tie.

    In its place may stand ChatJudge("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-7B-Instruct", orders="both"), which asks a model.
    """

    def judge(self, prompts, completions, shuffle_order=True):
        words = [[len(text.split()) for text in pair] for pair in completions]
        return [0.5 if first == second else int(second < first) for first, second in words]


trainer = GRPOTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=Brief(),
    args=GRPOConfig(
        output_dir="runs/judges",
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=2,  # two completions: one wins, or it is a tie
        max_completion_length=32,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
    ),
    train_dataset=prompts,
    eval_dataset=prompts.select(range(4)),
)
trainer.add_callback(WinRateCallback(Brief(), trainer))
trainer.train()
trainer.save_model()
