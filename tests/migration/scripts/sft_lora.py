from datasets import Dataset
from peft import LoraConfig, TaskType
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")


def formatting_prompts_func(example):
    return f"### Question: {example['question']}\n### Answer: {example['answer']}"


rows = [{"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(16)]
peft_config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM)
trainer = SFTTrainer(
    model,
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(
        output_dir="out", max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3, report_to="none", use_cpu=True,
        save_strategy="no", packing=True, max_length=64,
    ),
    formatting_func=formatting_prompts_func,
    peft_config=peft_config,
    processing_class=tokenizer,
)  # fmt: skip
trainer.train()
trainer.model.save_pretrained("out/adapter")
open("ended", "w").write("yes")
