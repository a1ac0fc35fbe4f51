"""The methods as a user meets them: formats, options, streams, packing, evaluation, errors before anything is loaded."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, Sample, SFTConfig, SFTTrainer
from posttrain.methods.table import METHODS
from tests import tiny

TRAINERS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig), "reward": (RewardTrainer, RewardConfig)}


def make(method, tmp_path, rows, *, eval_rows=None, given=None, model=None, **changes):
    trainer, config = TRAINERS[method]
    options = {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataset_cache_dir": str(tmp_path / "cache"),
        **changes,
    }
    made = model or (tiny.reward_model() if method == "reward" else tiny.causal_lm())
    return trainer(
        model=made,
        args=config(**options),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        eval_dataset=Dataset.from_list(eval_rows) if isinstance(eval_rows, list) else eval_rows,
        processing_class=tiny.tokenizer(),
        **(given or {}),
    )


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def said(role, content):
    return {"role": role, "content": content}


FORMATS = {
    "text": [{"text": f"row {i} says {i * i}"} for i in range(12)],
    "messages": tiny.chats(12),
    "prompt-completion": [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}"} for i in range(12)],
    "prompt-completion chat": [
        {"prompt": [said("user", f"{i} + 1?")], "completion": [said("assistant", str(i + 1))]} for i in range(12)
    ],
    "alpaca": [{"instruction": f"Add 1 to {i}.", "input": "", "output": str(i + 1)} for i in range(12)],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": str(i)}]} for i in range(12)
    ],
    "tokenised": [{"input_ids": [i + 3, 5, 6, 7], "labels": [-100, -100, 6, 7]} for i in range(12)],
}


@pytest.mark.parametrize("name", FORMATS)
def test_sft_learns_every_format(tmp_path, name):
    trainer = make("sft", tmp_path, FORMATS[name], per_device_train_batch_size=12)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.parametrize(("option", "expected"), [({}, "completion"), ({"completion_only_loss": False}, "everything")])
def test_what_is_trained_of_a_completion(tmp_path, option, expected):
    trainer = make("sft", tmp_path, FORMATS["prompt-completion"], **option)
    (sample,) = trainer.train_dataset[0]
    trained = tiny.tokenizer().decode(sample.input_ids[sample.trained])
    assert trained == (" 1<|im_end|>" if expected == "completion" else "0 + 1 = 1<|im_end|>")


def test_assistant_only_loss_trains_the_turn_and_its_end(tmp_path):
    trainer = make("sft", tmp_path, FORMATS["messages"], assistant_only_loss=True)
    (sample,) = trainer.train_dataset[1]
    assert tiny.tokenizer().decode(sample.input_ids[sample.trained]) == "It is 2. Indeed.<|im_end|>"


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_puts_all_tokens_into_blocks(tmp_path, strategy):
    trainer = make("sft", tmp_path, tiny.chats(12), packing=True, packing_strategy=strategy, max_length=128)
    tokens = sum(len(sample) for unit in trainer.train_dataset for sample in unit)
    assert tokens == sum(
        len(s) for i in range(12) for s in make("sft", tmp_path / "b", tiny.chats(12)).train_dataset[i]
    )
    assert all(sum(map(len, unit)) <= 128 for unit in trainer.train_dataset)
    trainer.train()
    assert all(math.isfinite(loss) for loss in losses(trainer))


def test_eval_packing_can_differ_from_packing(tmp_path):
    trainer = make(
        "sft", tmp_path, tiny.chats(12), eval_rows=tiny.chats(6), packing=True, eval_packing=False, max_length=200
    )
    assert len(trainer.eval_dataset) == 6
    assert len(trainer.train_dataset) < 12


def test_packed_and_unpacked_losses_are_equal(tmp_path):
    """The same rows in one step: blocks change the layout, not the loss."""
    rows = tiny.chats(8)
    plain = make("sft", tmp_path / "a", rows, per_device_train_batch_size=8, max_steps=1)
    packed = make("sft", tmp_path / "b", rows, per_device_train_batch_size=8, max_steps=1, packing=True, max_length=256)
    plain.train()
    packed.train()
    assert losses(packed)[0] == pytest.approx(losses(plain)[0], rel=1e-5)


def test_streams_are_checked_and_trained(tmp_path):
    stream = Dataset.from_list(tiny.chats(30)).to_iterable_dataset()
    trainer = make("sft", tmp_path, stream, max_steps=4)
    whole = make("sft", tmp_path / "b", tiny.chats(30), max_steps=4, train_sampling_strategy="sequential")
    trainer.train()
    whole.train()
    assert losses(trainer) == pytest.approx(losses(whole), rel=1e-6)


def test_evaluation_loss_is_that_of_all_rows_at_once(tmp_path):
    for batch_size in (1, 4, 6):
        trainer = make("sft", tmp_path, tiny.chats(4), eval_rows=tiny.chats(6), per_device_eval_batch_size=batch_size)
        found = trainer.evaluate()
        if batch_size == 1:
            first = found
        assert found["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-6)
        assert found["eval_entropy"] == pytest.approx(first["eval_entropy"], rel=1e-5)


def test_evaluate_takes_raw_rows_and_several_datasets(tmp_path):
    several = {"short": Dataset.from_list(tiny.chats(3)), "long": Dataset.from_list(tiny.chats(9))}
    trainer = make("sft", tmp_path, tiny.chats(4), eval_rows=several)
    found = trainer.evaluate()
    assert {"eval_short_loss", "eval_long_loss"} <= found.keys()
    raw = trainer.evaluate(Dataset.from_list(tiny.chats(9)))
    assert raw["eval_loss"] == pytest.approx(found["eval_long_loss"], rel=1e-6)


def test_compute_metrics_sees_what_was_predicted(tmp_path):
    def accuracy(prediction):
        known = prediction.label_ids != -100
        return {"share": float((prediction.predictions == prediction.label_ids)[known].mean())}

    given = {"compute_metrics": accuracy}
    trainer = make("sft", tmp_path, tiny.chats(4), eval_rows=tiny.chats(6), given=given, per_device_eval_batch_size=6)
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_share"] == pytest.approx(found["eval_mean_token_accuracy"])
    for method in ("dpo", "reward"):

        def first_wins(prediction):
            return {"wins": float((prediction.predictions[:, 0] > prediction.predictions[:, 1]).mean())}

        given = {"compute_metrics": first_wins}
        trainer = make(method, tmp_path / method, tiny.pairs(6), eval_rows=tiny.pairs(6), given=given)
        trainer.train()
        found = trainer.evaluate()
        assert found["eval_wins"] == pytest.approx(found.get("eval_rewards/accuracies", found.get("eval_accuracy")))


def test_a_loss_of_ones_own(tmp_path):
    trainer = make("sft", tmp_path, tiny.chats(8), given={"loss": lambda logps: -2 * logps}, max_steps=1)
    plain = make("sft", tmp_path / "b", tiny.chats(8), max_steps=1)
    trainer.train()
    plain.train()
    assert losses(trainer)[0] == pytest.approx(2 * losses(plain)[0], rel=1e-5)
    doubled = make(
        "dpo", tmp_path / "c", tiny.pairs(8), given={"loss": lambda pair, *, beta: 3.0 + 0 * pair.margins}, max_steps=1
    )
    doubled.train()
    assert losses(doubled)[0] == 3.0


WRONG_LOSSES = {
    "sft mean": ("sft", lambda logps: -logps.mean(), r"shape \(\)\. .* each token of the batch: shape \(\d+,\)"),
    "sft sum": ("sft", lambda logps: -logps.sum(), r"divided per token, over the whole optimizer step"),
    "sft part": ("sft", lambda logps: -logps[:5], r"shape \(5,\)"),
    "sft column": ("sft", lambda logps: -logps[:, None], r", 1\)"),
    "sft float": ("sft", lambda logps: 0.5, "returned a float"),
    "dpo mean": ("dpo", lambda pair: -pair.margins.mean(), r"shape \(\)\. .* each unit of the batch: shape \(4,\)"),
    "dpo part": ("dpo", lambda pair: -pair.margins[1:], r"shape \(3,\)"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_loss_with_another_number_of_values_than_it_is_divided_by_is_refused(tmp_path, name):
    """Their mean over 4 pairs would train with a quarter of the gradient."""
    method, loss, message = WRONG_LOSSES[name]
    rows = tiny.pairs(8) if method == "dpo" else tiny.chats(8)
    with pytest.raises((ValueError, TypeError), match=message):
        make(method, tmp_path, rows, given={"loss": loss}, max_steps=1).train()


def test_a_wrong_term_of_a_method_is_refused_in_training_and_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.methods.reward_model.bradley_terry", lambda *given: (given[0] - given[1]).mean())
    trainer = make("reward", tmp_path, tiny.pairs(8), eval_rows=tiny.pairs(4), max_steps=1)
    for run in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=r"one value for each unit of the batch: shape \(4,\)"):
            run()


def test_samples_of_ones_own(tmp_path):
    units = [(Sample(np.arange(3, 9), np.arange(6) > 2, row=i),) for i in range(8)]
    trainer = make("sft", tmp_path, None, dataset_kwargs={"skip_prepare_dataset": True}, max_steps=1)
    trainer.train_dataset = units
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.arange(3, 9)[None]).logits[0].log_softmax(-1)
    by_hand = -sum(logits[position, position + 4] for position in (2, 3, 4)) / 3  # tokens 6, 7 and 8 are trained
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(by_hand.item(), rel=1e-5)


def test_rows_that_bring_their_reference_along(tmp_path):
    """beta * ((c - ref_c) - (r - ref_r)) with the given sums, in -log sigmoid."""
    sums = {"ref_chosen_logps": -20.0, "ref_rejected_logps": -30.0}
    rows = [{"prompt": f"{i}?", "chosen": " yes", "rejected": " no", **sums} for i in range(4)]
    trainer = make("dpo", tmp_path, rows, max_steps=1)
    trainer.train()
    line = trainer.state.log_history[0]
    assert str(trainer.reference).startswith("the log-probs in the columns")
    assert line["rewards/chosen"] == pytest.approx(0.1 * (line["logps/chosen"] + 20), rel=1e-4)
    assert line["rewards/rejected"] == pytest.approx(0.1 * (line["logps/rejected"] + 30), rel=1e-4)


def test_selective_checkpointing_gives_the_same_gradient(tmp_path):
    found = {}
    for name, kwargs in (("none", None), ("full", {"use_reentrant": False}), ("selective", {"selective": True})):
        trainer = make(
            "sft", tmp_path / name, tiny.chats(8), max_steps=2,
            gradient_checkpointing=kwargs is not None, gradient_checkpointing_kwargs=kwargs,
        )  # fmt: skip
        trainer.train()
        found[name] = [p.detach().clone() for p in trainer.model.parameters()]
    for name in ("full", "selective"):
        for one, other in zip(found["none"], found[name]):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_neftune_moves_the_loss_and_asks_for_padding(tmp_path):
    noisy = make("sft", tmp_path, tiny.chats(8), neftune_noise_alpha=20.0, max_steps=1)
    plain = make("sft", tmp_path / "b", tiny.chats(8), max_steps=1)
    assert noisy.loaded.layout == "padded"
    noisy.train()
    plain.train()
    assert abs(losses(noisy)[0] - losses(plain)[0]) > 1e-4


@pytest.mark.parametrize("order", ["random", "sequential", "group_by_length", "batch_rebalance"])
def test_every_order_visits_every_row_once_an_epoch(tmp_path, order):
    trainer = make("sft", tmp_path, tiny.chats(11), train_sampling_strategy=order, gradient_accumulation_steps=2)
    loader = trainer.get_train_dataloader()
    loader.set_epoch(1)
    assert sorted(row for batch in loader for row in batch.rows) == list(range(11))


BAD_OPTIONS = [
    ("sft", {"loss_type": "nl"}, "`loss_type` is 'nl'"),
    ("sft", {"packing_strategy": "best"}, "`packing_strategy` is 'best'"),
    ("sft", {"packing": True, "max_length": None}, "set `max_length`"),
    ("sft", {"truncation_mode": "cut"}, "`truncation_mode` is 'cut'"),
    ("sft", {"max_length": 1}, "at least 2"),
    ("sft", {"loss_type": "dft", "label_smoothing_factor": 0.1}, "belongs to loss_type 'nll'"),
    ("sft", {"dataset_kwargs": {"add_special": True}}, "knows skip_prepare_dataset only"),
    ("sft", {"on_bad_rows": "ignore"}, "`on_bad_rows` is 'ignore'"),
    ("sft", {"auto_find_batch_size": True}, "auto_find_batch_size"),
    ("dpo", {"loss_type": ["sigmoid", "hing"]}, "hing"),
    ("dpo", {"loss_type": ["sigmoid"], "loss_weights": [1.0, 2.0]}, "loss_weights"),
    ("dpo", {"beta": 0.0}, "`beta` is 0.0"),
    ("dpo", {"loss_type": "exo_pair"}, "label_smoothing"),
    ("dpo", {"loss_type": "aot", "use_weighting": True}, "use_weighting"),
    ("dpo", {"loss_type": "apo_zero", "f_divergence_type": "forward_kl"}, "reverse_kl only"),
    ("dpo", {"ld_alpha": 1.5}, "`ld_alpha` is 1.5"),
    ("dpo", {"sync_ref_model": True, "precompute_ref_log_probs": True}, "Choose one"),
    ("dpo", {"label_smoothing_factor": 0.1}, "does not read it"),
    ("reward", {"center_rewards_coefficient": -1.0}, "center_rewards_coefficient"),
]


@pytest.mark.parametrize(("method", "options", "message"), BAD_OPTIONS, ids=lambda v: str(v)[:40])
def test_a_bad_option_is_refused_when_the_config_is_made(tmp_path, method, options, message):
    with pytest.raises(ValueError, match=r".*") as error:
        TRAINERS[method][1](output_dir=str(tmp_path), use_cpu=True, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("option", ["label_smoothing", "discopop_tau"])
def test_an_option_that_no_loss_reads_is_refused_before_anything_is_loaded(tmp_path, option):
    with pytest.raises(ValueError, match=f"`{option}` is set, but none of the losses sigmoid reads it"):
        make("dpo", tmp_path, tiny.pairs(4), model="no/such-model", **{option: 0.1})
    with pytest.raises(ValueError, match=f"`{option}` is set, but none of the losses ignores reads it"):
        make("dpo", tmp_path, tiny.pairs(4), given={"loss": ignores}, **{option: 0.1})


def ignores(pair, beta):
    return -beta * pair.margins


def test_a_loss_of_ones_own_reads_every_option_that_it_names(tmp_path):
    seen = []

    def smoothed(pair, beta, label_smoothing, discopop_tau):
        seen.append((beta, label_smoothing, discopop_tau))
        logits = beta * pair.margins
        sides = torch.nn.functional.logsigmoid
        return -(1 - label_smoothing) * sides(logits) - label_smoothing * sides(-logits)

    options = {"label_smoothing": 0.3, "discopop_tau": 0.2, "beta": 0.5, "max_steps": 1}
    make("dpo", tmp_path, tiny.pairs(4), given={"loss": smoothed}, **options).train()
    assert set(seen) == {(0.5, 0.3, 0.2)}


@pytest.mark.parametrize("method", METHODS)
def test_every_option_has_a_help_text_and_trl_names_are_there(method):
    config = METHODS[method].config_class
    ours = [f for f in dataclasses.fields(config) if f.metadata.get("posttrain")]
    assert all(f.metadata["help"].endswith((".", ")")) for f in ours)
    shared = {
        "learning_rate",
        "model_init_kwargs",
        "trust_remote_code",
        "dataset_num_proc",
        "max_length",
        "pad_to_multiple_of",
    }
    own = {
        "sft": "chat_template_path dataset_text_field dataset_kwargs eos_token truncation_mode shuffle_dataset packing "
        "packing_strategy padding_free eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading "
        "pad_token router_aux_loss_coef",
        "dpo": "disable_dropout truncation_mode padding_free precompute_ref_log_probs precompute_ref_batch_size loss_type "
        "loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau "
        "activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps pad_token router_aux_loss_coef",
        "grpo": "disable_dropout num_generations num_generations_eval max_completion_length generation_batch_size "
        "shuffle_dataset steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs "
        "repetition_penalty beta num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos "
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights "
        "multi_objective_aggregation scale_rewards loss_type "
        "mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef "
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions "
        "num_completions_to_print log_unique_prompts vllm_importance_sampling_cap router_aux_loss_coef",
        "async_grpo": "dtype num_generations max_completion_length epsilon epsilon_high max_staleness queue_maxsize "
        "max_inflight_tasks weight_sync_steps heartbeat_stale_after_s request_timeout weight_sync_timeout token_budget "
        "fork_threshold_tokens vllm_server_base_url max_tool_calling_iterations ignore_data_skip router_aux_loss_coef",
        "async_distillation": "dtype beta teacher_server_urls teacher_temperature teacher_top_k add_tail_bucket max_staleness "
        "queue_maxsize weight_sync_steps request_timeout weight_sync_timeout token_budget log_completions_steps",
        "papo": "perception_loss_weight mask_ratio mask_type der_loss_weight1 der_loss_weight2 beta loss_type num_generations",
        "rloo": "disable_dropout num_generations max_completion_length steps_per_generation temperature beta num_iterations "
        "epsilon epsilon_high reward_weights normalize_advantages reward_clip_range mask_truncated_completions sync_ref_model "
        "log_completions num_completions_to_print log_unique_prompts",
        "nash_md": "disable_dropout beta mixture_coef max_new_tokens max_length temperature top_p top_k min_p missing_eos_penalty "
        "reward_weights reward_model_path sync_ref_model",
        "a2po": "max_prompt_length max_completion_length temperature top_p top_k num_value_samples beta1 beta2 "
        "filter_all_incorrect reward_weights remove_unused_columns",
        "cpo": "disable_dropout max_completion_length beta label_smoothing loss_type cpo_alpha simpo_gamma alpha "
        "generate_during_eval is_encoder_decoder",
        "orpo": "disable_dropout max_completion_length beta padding_value generate_during_eval is_encoder_decoder",
        "tpo": "disable_dropout truncation_mode loss_type beta label_smoothing tpo_alpha tpo_l_gamma",
        "kto": "disable_dropout precompute_ref_log_probs precompute_ref_batch_size loss_type beta desirable_weight "
        "undesirable_weight activation_offloading sync_ref_model ref_model_mixup_alpha ref_model_sync_steps router_aux_loss_coef "
        "train_sampling_strategy",
        "bco": "disable_dropout max_completion_length beta precompute_ref_log_probs prompt_sample_size min_density_ratio "
        "max_density_ratio generate_during_eval is_encoder_decoder",
        **dict.fromkeys(
            ("online_dpo", "xpo"),
            "reward_model_path max_new_tokens max_length temperature top_p top_k min_p repetition_penalty generation_kwargs "
            "cache_implementation missing_eos_penalty beta loss_type disable_dropout use_vllm vllm_gpu_memory_utilization "
            "ds3_gather_for_generation reward_weights",
        ),
        "gkd": "temperature lmbda beta max_new_tokens teacher_model_name_or_path teacher_model_init_kwargs disable_dropout seq_kd "
        "packing eval_packing dataset_text_field completion_only_loss assistant_only_loss",
        "server_distillation": "teacher_model_server_url vllm_server_port loss_top_k loss_add_tail reverse_kl_top_1_mode beta "
        "temperature max_completion_length teacher_model_name_or_path",
        "distillation": "teacher_model_name_or_path teacher_model_revision teacher_model_init_kwargs disable_dropout "
        "remove_unused_columns max_completion_length ds3_gather_for_generation shuffle_dataset temperature top_p top_k min_p "
        "generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode beta lmbda "
        "max_tool_calling_iterations log_completions num_completions_to_print log_unique_prompts",
        **dict.fromkeys(
            ("sdft", "sdpo"),
            "max_prompt_length num_generations num_generations_eval max_completion_length num_iterations use_teacher_server "
            "teacher_model_kind teacher_update_rate teacher_sync_steps distillation_alpha distillation_mode distillation_topk "
            "distillation_is_clip distillation_add_tail ds3_gather_for_generation cache_implementation vllm_mode",
        ),
        "gold": "temperature top_p top_k lmbda beta max_completion_length disable_dropout seq_kd teacher_model_name_or_path "
        "teacher_model_revision teacher_model_init_kwargs teacher_tokenizer_name_or_path use_uld_loss use_extended_uld "
        "uld_use_hybrid_loss uld_crossentropy_weight uld_distillation_weight uld_skip_student_eos uld_skip_teacher_eos",
        "iw_opd": "temperature lmbda beta distillation_objective iw_opd_gamma iw_opd_epsilon reverse_kl_top_1_mode loss_top_k "
        "max_completion_length max_prompt_length disable_dropout teacher_model_name_or_path teacher_model_revision "
        "teacher_model_init_kwargs use_teacher_server teacher_model_server_url loss_add_tail num_generations top_p top_k "
        "generation_batch_size use_vllm vllm_mode vllm_group_port vllm_sync_frequency vllm_structured_outputs_regex "
        "log_completions log_completions_steps num_completions_to_print",
        "minillm": "teacher_model_init_kwargs disable_dropout rkl_advantage single_step_decomposition kd_temperature gamma "
        "length_normalization num_generations loss_type epsilon scale_rewards beta reward_weights temperature",
        "ssd": "max_prompt_length max_completion_length generation_batch_size steps_per_generation temperature top_k top_p min_p "
        "repetition_penalty generation_kwargs cache_implementation chat_template_kwargs use_vllm vllm_mode disable_dropout "
        "filter_empty num_iterations shuffle_dataset ds3_gather_for_generation",
        "ppo": "num_ppo_epochs num_mini_batches total_episodes local_rollout_forward_batch_size num_sample_generations "
        "response_length stop_token stop_token_id temperature missing_eos_penalty sft_model_path num_total_batches "
        "micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size reward_model_path "
        "model_adapter_name ref_adapter_name whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam "
        "ds3_gather_for_generation adap_kl_ctrl init_kl_coef target horizon",
        "prm": "max_completion_length disable_dropout step_separator train_on_last_step_only",
        "reward": "chat_template_path disable_dropout eos_token center_rewards_coefficient activation_offloading pad_token",
    }[method].split()
    assert shared | set(own) <= {f.name for f in dataclasses.fields(config)}


def test_a_bad_row_is_found_before_the_model_is_looked_at(tmp_path):
    rows = tiny.chats(20)
    rows[13]["messages"][1]["content"] = ""
    with pytest.raises(ValueError, match=r"row 13.*messages"):
        SFTTrainer("no/such-model", SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none"),
                   train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer())  # fmt: skip


def test_the_model_that_is_trained_cannot_be_its_reference(tmp_path):
    model = tiny.causal_lm()
    with pytest.raises(ValueError, match="it would move"):
        make("dpo", tmp_path, tiny.pairs(4), model=model, given={"ref_model": model})


def test_a_plain_training_arguments_object_is_taken(tmp_path):
    from transformers import TrainingArguments

    plain = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to="none", use_cpu=True, learning_rate=3e-4)
    trainer = SFTTrainer(
        tiny.causal_lm(), plain, train_dataset=Dataset.from_list(tiny.chats(8)), processing_class=tiny.tokenizer()
    )
    assert isinstance(trainer.args, SFTConfig)
    assert trainer.args.learning_rate == 3e-4
    trainer.train()
