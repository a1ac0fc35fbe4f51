"""LoRA on a base model without a chat template: a built-in format is set, rows are packed, and only the adapter is saved."""

from pathlib import Path

from datasets import load_dataset
from peft import AutoPeftModelForCausalLM, LoraConfig

from posttrain import SFTConfig, SFTTrainer

chats = load_dataset("json", data_files=str(Path(__file__).parent / "data/chats.jsonl"), split="train")

trainer = SFTTrainer(
    "HuggingFaceTB/SmolLM2-135M",
    args=SFTConfig(
        output_dir="runs/lora",
        chat_template_path="chatml",
        packing=True,  # blocks of `max_length` tokens; sequences in a block do not see each other
        max_length=512,
        num_train_epochs=3,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
    ),
    train_dataset=chats,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
)
trainer.train()
trainer.save_model()

merged = AutoPeftModelForCausalLM.from_pretrained("runs/lora").merge_and_unload()
merged.save_pretrained("runs/lora-merged")
trainer.processing_class.save_pretrained("runs/lora-merged")
