from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import DPOConfig, DPOTrainer, create_reference_model, extract_prompt

model = AutoModelForCausalLM.from_pretrained("model")
tokenizer = AutoTokenizer.from_pretrained("model")
ref_model = create_reference_model(model)
rows = [
    {
        "chosen": [{"role": "user", "content": f"Name {i}"}, {"role": "assistant", "content": f"{i}"}],
        "rejected": [{"role": "user", "content": f"Name {i}"}, {"role": "assistant", "content": "no"}],
    }
    for i in range(12)
]
dataset = Dataset.from_list(rows).map(extract_prompt)
args = DPOConfig(
    output_dir="out", max_steps=2, per_device_train_batch_size=2, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2],
    report_to="none", use_cpu=True, save_strategy="no", logging_steps=1,
)  # fmt: skip
trainer = DPOTrainer(model=model, ref_model=ref_model, args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
open("ended", "w").write("yes")
