"""Every option of TRL 1.16.0's GRPOConfig and RLOOConfig either works here or is refused with a sentence of its own."""

from __future__ import annotations

import dataclasses

import pytest

from posttrain import GRPOConfig, RLOOConfig
from posttrain.core.options import is_refused
from posttrain.trainer.options.vllm import ONLY_COLOCATED, ONLY_SERVED

SHARED = {
    # of TRL's base config
    "logging_steps": 3, "gradient_checkpointing": True, "bf16": True, "lr_scheduler_kwargs": {"num_cycles": 2},
    "use_liger_kernel": True, "torch_empty_cache_steps": 5,
    # model and data
    "learning_rate": 1e-4, "model_init_kwargs": {"revision": "main"}, "trust_remote_code": True, "router_aux_loss_coef": 0.1,
    "disable_dropout": True, "remove_unused_columns": True, "shuffle_dataset": False, "pad_to_multiple_of": 8,
    # batches
    "num_generations": 4, "num_generations_eval": 1, "max_completion_length": 16, "generation_batch_size": 16,
    "steps_per_generation": 2, "num_iterations": 2, "ds3_gather_for_generation": False,
    # sampling
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "generation_kwargs": {"stop_strings": ["."]},
    "chat_template_kwargs": {"enable_thinking": False}, "repetition_penalty": 1.1, "cache_implementation": "static",
    # vLLM
    "use_vllm": True, "vllm_mode": "server", "vllm_model_impl": "transformers", "vllm_enable_sleep_mode": True,
    "vllm_structured_outputs_regex": "[ab]+", "vllm_server_base_url": "http://here", "vllm_server_host": "here",
    "vllm_server_port": 1, "vllm_server_timeout": 1.0, "vllm_group_port": 1, "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 64, "vllm_tensor_parallel_size": 2,
    # the loss
    "beta": 0.2, "epsilon": 0.1, "epsilon_high": 0.3, "reward_weights": [0.5], "mask_truncated_completions": True,
    "sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 2,
    # the log
    "log_completions": True, "log_multimodal": False, "num_completions_to_print": 2, "log_unique_prompts": True,
    "use_transformers_continuous_batching": True, "transformers_continuous_batching_config": {"max_memory_percent": 0.2},
    "use_transformers_paged": True,
}  # fmt: skip
GRPO_ONLY = {
    "cast_lm_head_to_fp32": True, "delta": 1.5, "sapo_temperature_neg": 1.5, "sapo_temperature_pos": 1.5,
    "vespo_k_pos": 1.5, "vespo_lambda_pos": 1.5, "vespo_k_neg": 1.5, "vespo_lambda_neg": 1.5,
    "importance_sampling_level": "sequence", "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch",
    "loss_type": "grpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.1, "use_adaptive_entropy": True,
    "entropy_coef_min": 0.01, "entropy_coef_max": 0.5, "entropy_coef_delta": 0.1, "entropy_target": 1.0,
    "max_tool_calling_iterations": 3, "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5, "off_policy_mask_threshold": 0.5, "use_bias_correction_kl": False,
    "log_completions_hub_repo": "team/said", "vllm_importance_sampling_cap": 2.0,
}  # fmt: skip
RLOO_ONLY = {"normalize_advantages": True, "reward_clip_range": (-1.0, 1.0)}
"""Option -> a value that is not its default. The names are those of TRL's tables of fields."""

NEEDS = {
    "sync_ref_model": {"beta": 0.1},
    "vllm_mode": {"use_vllm": True},
    **{name: {"use_vllm": True} for name in ONLY_COLOCATED},
    **{name: {"use_vllm": True, "vllm_mode": "server"} for name in ONLY_SERVED},
    **{name: {"loss_type": "sapo"} for name in GRPO_ONLY if name.startswith("sapo")},
    **{name: {"loss_type": "vespo"} for name in GRPO_ONLY if name.startswith("vespo")},
}
"""What an option needs beside it to be accepted."""

REFUSED_ONES = {
    "ds3_gather_for_generation", "cache_implementation", "vllm_group_port", "vllm_tensor_parallel_size",
    "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged",
    "remove_unused_columns",
}  # fmt: skip
CASES = [
    *[(GRPOConfig, name, value) for name, value in (SHARED | GRPO_ONLY).items()],
    *[(RLOOConfig, name, value) for name, value in (SHARED | RLOO_ONLY).items()],
]


def made(config, folder, **options):
    shape = {"per_device_train_batch_size": 8, "num_generations": 2}
    return config(**{"output_dir": str(folder), "use_cpu": True, **shape, **options})


def told(config, folder, name, value):
    """What is said about an option, or None where it is accepted and kept."""
    try:
        found = made(config, folder, **NEEDS.get(name, {}), **{name: value})
    except ValueError as error:
        return str(error)
    assert getattr(found, name) == value
    return None


def test_the_lists_are_whole():
    assert (len(SHARED | GRPO_ONLY), len(SHARED | RLOO_ONLY)) == (79 + 6, 53 + 6)


@pytest.mark.parametrize(("config", "name", "value"), CASES)
def test_an_option_works_or_is_refused_by_name(config, name, value, tmp_path):
    sentence = told(config, tmp_path, name, value)
    if name in REFUSED_ONES:
        assert sentence.startswith(f"`{name}` is {value!r}")
        assert len(sentence.split()) > 8, "a reason is missing"
    else:
        assert sentence is None


def test_no_two_options_are_refused_with_the_same_words():
    fields = [field for field in dataclasses.fields(GRPOConfig) if is_refused(field)]
    sentences = [field.metadata["help"] for field in fields]
    assert len(sentences) >= 7
    assert len(set(sentences)) == len(sentences)


# ---- what some of them do ------------------------------------------------------------------------------------------------


def test_a_regular_expression_reaches_the_engine(tmp_path):
    assert made(GRPOConfig, tmp_path, vllm_structured_outputs_regex="[ab]+").sampling(()).regex == "[ab]+"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"vllm_mode": "server"}, "`vllm_mode` is set, but `use_vllm` is not"),
        ({"use_vllm": True, "vllm_server_port": 1}, "`vllm_server_port` says how servers are reached"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 64}, "is said when the server is started"),
        ({"use_vllm": True, "rollout_engine": "transformers"}, "choose one"),
        ({"use_vllm": True, "vllm_mode": "far away"}, "must be one of colocate, server"),
        ({"use_vllm": True, "vllm_gpu_memory_utilization": 1.5}, "must be > 0 and <= 1"),
    ],
)
def test_options_of_vllm_that_would_have_no_effect_are_refused(options, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        made(GRPOConfig, tmp_path, **options)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ["http://127.0.0.1:8000"]),
        ({"vllm_server_host": "far", "vllm_server_port": 9}, ["http://far:9"]),
        ({"vllm_server_base_url": "http://a:1/, http://b:2"}, ["http://a:1", "http://b:2"]),
        ({"vllm_server_base_url": ["http://a:1", "http://b:2"]}, ["http://a:1", "http://b:2"]),
    ],
)
def test_addresses_of_servers(given, found, tmp_path):
    assert made(GRPOConfig, tmp_path, use_vllm=True, vllm_mode="server", **given).vllm_addresses() == found


def test_an_old_name_means_the_new_one(tmp_path):
    assert made(GRPOConfig, tmp_path, vllm_importance_sampling_cap=2.0).vllm_importance_sampling_clip_max == 2.0


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [("max_prompt_length", "max_length", 64), ("vllm_guided_decoding_regex", "vllm_structured_outputs_regex", "[ab]+")],
)
def test_names_that_trl_has_given_up_still_mean_something(old, new, value, tmp_path):
    config = made(GRPOConfig, tmp_path, **{old: value})
    assert getattr(config, new) == value
    assert config.truncation_mode == ("keep_end" if new == "max_length" else "keep_start")
    other = 65 if new == "max_length" else "c"
    with pytest.raises(ValueError, match="give one of them"):
        made(GRPOConfig, tmp_path, **{old: value, new: other})


def test_generation_kwargs_override_but_for_the_temperature(tmp_path):
    kwargs = '{"max_new_tokens": 3, "seed": 9, "stop_token_ids": [5], "temperature": 1.0}'
    params = made(GRPOConfig, tmp_path, generation_kwargs=kwargs, top_k=4).sampling((1,))
    assert (params.max_tokens, params.seed, params.stop_ids, params.top_k) == (3, 9, (1, 5), 4)
    with pytest.raises(ValueError, match="set that one, for both"):
        made(GRPOConfig, tmp_path, generation_kwargs={"temperature": 0.5})


@pytest.mark.parametrize("name", ["num_generations", "max_completion_length"])
def test_a_number_that_is_missing_is_asked_for(name, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}` is None"):
        made(GRPOConfig, tmp_path, **{name: None})
