"""Distillation from a teacher on a server, which another terminal has started:

posttrain vllm-serve --model HuggingFaceTB/SmolLM2-360M-Instruct --port 8000
"""

import os

from datasets import Dataset

from posttrain import ServerDistillationConfig, ServerDistillationTrainer

topics = ["the sea", "a clock", "bread", "the moon", "a bridge", "rain", "a map", "winter"]
prompts = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"Describe {topic} briefly."}]} for topic in topics]
)

trainer = ServerDistillationTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=ServerDistillationConfig(
        output_dir="runs/server-distillation",
        teacher_model_server_url=os.environ.get("TEACHER_URL", "http://127.0.0.1:8000"),
        beta=0.0,  # KL(teacher, student) on the teacher's eight likeliest tokens, and all others as one more
        loss_top_k=8,
        teacher_max_unanswered=0.25,  # of the completions of a generation; above it the run stops
        max_steps=4,
        per_device_train_batch_size=4,
        max_completion_length=32,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=prompts,
)
trainer.train()
trainer.save_model()
