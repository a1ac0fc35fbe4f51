from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser, get_kbit_device_map

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, RewardConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.gradient_checkpointing_kwargs = dict(use_reentrant=False)
    assert get_kbit_device_map() is None or isinstance(get_kbit_device_map(), dict)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, use_fast=True)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    dataset = load_dataset("json", data_files=script_args.dataset_name)
    trainer = RewardTrainer(
        model=model,
        processing_class=tokenizer,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    open("ended", "w").write("yes")
