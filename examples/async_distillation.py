"""AsyncDistillation: a teacher on a server is asked about completions that are written while earlier ones are trained on.

posttrain vllm-serve --model HuggingFaceTB/SmolLM2-360M-Instruct --port 8001
"""

import os

from datasets import Dataset

from posttrain import AsyncDistillationConfig, AsyncDistillationTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)

trainer = AsyncDistillationTrainer(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    args=AsyncDistillationConfig(
        output_dir="runs/async-distillation",
        teacher_server_urls={"default": os.environ.get("TEACHER_URL", "http://localhost:8001")},
        teacher_top_k=8,  # its likeliest tokens and the one that was written; all others as one more
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=32,
        learning_rate=1e-5,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
