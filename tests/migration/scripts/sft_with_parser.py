import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config, get_quantization_config


def main(script_args, training_args, model_args):
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    assert get_quantization_config(model_args) is None
    assert os.environ["WANDB_PROJECT"] == "recipe"
    assert training_args.learning_rate == 1e-3
    dataset = load_dataset("json", data_files=script_args.dataset_name)
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    assert os.path.exists(os.path.join(training_args.output_dir, "adapter_config.json"))


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
    open("ended", "w").write("yes")
