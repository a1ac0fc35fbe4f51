"""posttrain: post-train language models. Everything public is importable from here, and imported only when it is used."""

from __future__ import annotations

import importlib
from typing import Any

from posttrain.core import __version__
from posttrain.methods.table import METHODS

_HOMES = {
    "posttrain.core.batch": ("StepTotals", "TokenBatch"),
    "posttrain.core.results": ("LossOutput", "LossTerm", "TokenScores"),
    "posttrain.core.sample": ("Sample",),
    "posttrain.data.render.templates": ("BUILT_IN_FORMATS", "use_chat_format"),
    "posttrain.data.collate": ("Collator", "collate"),
    "posttrain.data.trl_helpers": (
        "add_response_schema",
        "apply_chat_template",
        "extract_prompt",
        "get_dataset_column_names",
        "get_training_chat_template",
        "has_generation_markers",
        "is_chat_template_prefix_preserving",
        "is_chat_template_stop_token_trained",
        "is_conversational",
        "is_conversational_from_value",
        "maybe_apply_chat_template",
        "maybe_convert_to_chatml",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "pack_dataset",
        "parse_response",
        "prepare_multimodal_messages",
        "supports_tool_calling",
        "truncate_dataset",
        "unpair_preference_dataset",
    ),
    "posttrain.data.render.renderer": ("Conversation", "RenderError", "Renderer"),
    "posttrain.evaluation.spec": ("EvalSpec",),
    "posttrain.exporting.model_merging": ("MergeConfig", "merge_models"),
    "posttrain.migration.grpo_relatives": (
        "DPPOConfig",
        "DPPOTrainer",
        "GFPOConfig",
        "GFPOTrainer",
        "GMPOConfig",
        "GMPOTrainer",
        "GRPOWithReplayBufferConfig",
        "GRPOWithReplayBufferTrainer",
    ),
    "posttrain.migration.script_arguments": (
        "DatasetMixtureConfig",
        "ModelConfig",
        "ScriptArguments",
        "get_dataset",
        "init_zero_verbose",
    ),
    "posttrain.migration.trl_parser": ("TrlParser",),
    "posttrain.models.load.vocabulary": ("clone_chat_template",),
    "posttrain.models.load.options": ("get_kbit_device_map", "get_peft_config", "get_quantization_config"),
    "posttrain.models.load.reference": ("create_reference_model",),
    "posttrain.rewards.builtin.accuracy": ("accuracy_reward", "reasoning_accuracy_reward"),
    "posttrain.rewards.builtin.format": ("answer_format_reward", "think_format_reward"),
    "posttrain.rewards.builtin.length": (
        "get_cosine_scaled_reward",
        "get_repetition_penalty_reward",
        "get_soft_overlong_punishment",
    ),
    "posttrain.rewards.judges": (
        "AllTrueJudge",
        "BaseBinaryJudge",
        "BaseJudge",
        "BasePairwiseJudge",
        "BaseRankJudge",
        "ChatJudge",
        "HfPairwiseJudge",
        "OpenAIPairwiseJudge",
        "PairRMJudge",
        "RewardModelJudge",
        "judge_reward",
    ),
    "posttrain.rewards.process_reward": ("ProcessReward",),
    "posttrain.trainer.base": ("BaseTrainer",),
    "posttrain.trainer.checkpoints.hub": ("upload_model_to_hf",),
    "posttrain.trainer.checkpoints.merge_callback": ("MergeModelCallback",),
    "posttrain.trainer.online.log_completions": ("LogCompletionsCallback",),
    "posttrain.trainer.online_trainer": ("OnlineTrainer",),
    "posttrain.trainer.options.base": ("BaseConfig", "option"),
    "posttrain.trainer.options.online": ("OnlineConfig",),
    "posttrain.trainer.references.bema": ("BEMACallback",),
    "posttrain.trainer.references.setup": ("SyncRefModelCallback",),
    "posttrain.trainer.report.progress": ("RichProgressCallback",),
    "posttrain.trainer.online.task_evals": ("TaskEvals",),
    "posttrain.trainer.online.win_rate": ("WinRateCallback",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_HOME_OF |= {name: method.module for method in METHODS.values() for name in (method.config, method.trainer)}

__all__ = ["METHODS", "__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
