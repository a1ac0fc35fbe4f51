"""Supervised fine-tuning on conversations. Only what the assistant said is trained, end-of-turn token included."""

from pathlib import Path

from datasets import load_dataset

from posttrain import SFTConfig, SFTTrainer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

chats = load_dataset("json", data_files=str(Path(__file__).parent / "data/chats.jsonl"), split="train")
parts = chats.train_test_split(test_size=4, seed=0)

trainer = SFTTrainer(
    MODEL,
    args=SFTConfig(
        output_dir="runs/sft",
        assistant_only_loss=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        eval_strategy="epoch",
        logging_steps=1,
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
)
trainer.train()
trainer.save_model()

tokenizer = trainer.processing_class
question = [{"role": "user", "content": "How many minutes are in 5 hours?"}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(trainer.model.device)
answer = trainer.model.generate(**inputs, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
