"""SDFT: a model learns facts that it is shown, by asking itself with them in sight and answering without."""

from datasets import Dataset

from posttrain import SDFTConfig, SDFTTrainer

facts = {
    "Varn": "Olo",
    "Quist": "Mereth",
    "Dorrin": "Palu",
    "Esk": "Tamber",
    "Hollin": "Sarn",
    "Mirre": "Kettle",
    "Ostra": "Vell",
    "Pern": "Isk",
}
rows = Dataset.from_list(
    [
        {
            "prompt": [{"role": "user", "content": f"What is the capital of {land}?"}],
            "privileged_context": f"(The capital of {land} is {town}. Answer with its name.)",
        }
        for land, town in facts.items()
    ]
)

trainer = SDFTTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=SDFTConfig(
        output_dir="runs/sdft",
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        learning_rate=1e-5,
        logging_steps=1,
    ),
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
