"""A*-PO: what each prompt is worth is estimated first, from the model as it is; then one answer to each prompt is enough."""

from datasets import Dataset

from posttrain import A2POConfig, A2POTrainer

topics = ["the telephone", "the bicycle", "the telescope", "the radio", "the zipper", "the compass", "glass", "paper"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Tell me one fact about {topic}."}]} for topic in topics]
)


def has_a_digit(completions, **kwargs):
    """1 for an answer with a number in it, 0 for any other."""
    return [float(any(letter.isdigit() for letter in answer[-1]["content"])) for answer in completions]


trainer = A2POTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_funcs=has_a_digit,
    args=A2POConfig(
        output_dir="runs/a2po",
        max_steps=4,
        per_device_train_batch_size=8,
        num_value_samples=4,
        filter_all_incorrect=False,  # with so few samples of so few prompts, all may fail
        max_completion_length=32,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
