from dataclasses import dataclass, field

import trl
from datasets import load_dataset

from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


@dataclass
class GRPOScriptArguments(ScriptArguments):
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "Names of rewards."})


def main(script_args, training_args, model_args):
    assert script_args.reward_funcs is None
    assert training_args.scale_rewards == "group"

    def distinct_letters(completions, **kwargs):
        return [float(len(set(text))) for text in completions]

    dataset = load_dataset("json", data_files=script_args.dataset_name)[script_args.dataset_train_split]
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[distinct_letters, trl.rewards.accuracy_reward],
        args=training_args,
        train_dataset=dataset.rename_column("answer", "solution"),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    assert "rewards/accuracy_reward/mean" in trainer.state.log_history[0]


if __name__ == "__main__":
    parser = TrlParser((GRPOScriptArguments, GRPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
    open("ended", "w").write("yes")
