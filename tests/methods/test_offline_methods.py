"""CPO, ORPO, TPO, KTO and BCO as a user meets them: rows, options, splits of a step, streams, evaluation, errors."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from posttrain.methods.table import METHODS
from tests import tiny


def rated(count=12):
    rows = []
    for row in tiny.pairs(count):
        rows += [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for side in ("chosen", "rejected")
        ]
    return rows


def triples(count=12):
    return [{**row, "reference": row["chosen"]} for row in tiny.pairs(count)]


DATA = {"tpo": triples, "kto": rated, "bco": rated, "prm": tiny.steps}


def make(method, tmp_path, rows=None, *, model=None, eval_rows=None, given=None, **changes):
    options = {
        "output_dir": str(tmp_path),
        "max_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataset_cache_dir": str(tmp_path / "cache"),
        **changes,
    }
    rows = DATA.get(method, tiny.pairs)() if rows is None else rows
    return METHODS[method].trainer_class(
        model=model or tiny.causal_lm(),
        args=METHODS[method].config_class(**options),
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        eval_dataset=Dataset.from_list(eval_rows) if isinstance(eval_rows, list) else eval_rows,
        processing_class=tiny.tokenizer(),
        **(given or {}),
    )


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


PAIRED = {
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
    "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy", "nll_loss", "num_tokens",
}  # fmt: skip
UNPAIRED = PAIRED - {"rewards/accuracies", "mean_token_accuracy", "nll_loss"}


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("cpo", PAIRED),
        ("orpo", PAIRED | {"log_odds_ratio", "log_odds_chosen"}),
        ("tpo", PAIRED),
        ("kto", UNPAIRED | {"kl"}),
        ("bco", UNPAIRED | {"delta"}),
    ],
)
def test_it_learns_and_logs_what_its_page_names(tmp_path, method, keys):
    trainer = make(
        method, tmp_path, max_steps=4, per_device_train_batch_size=24, eval_rows=DATA.get(method, tiny.pairs)(3)
    )
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0]
    assert keys <= trainer.state.log_history[0].keys()
    evaluated = trainer.evaluate()
    assert {f"eval_{key}" for key in keys - {"num_tokens"}} <= evaluated.keys()
    assert trainer.predict(Dataset.from_list(DATA.get(method, tiny.pairs)(2))).predictions is not None


def test_first_losses_are_those_of_a_policy_that_is_its_reference(tmp_path):
    kto, bco = make("kto", tmp_path / "a", max_steps=1), make("bco", tmp_path / "b", max_steps=1)
    kto.train()
    bco.train()
    assert logged(kto, "loss") == [pytest.approx(0.5, abs=1e-6)]
    assert logged(bco, "loss") == [pytest.approx(0.6931, abs=1e-4)]


# ---- the reference point -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_pass": 60}])
def test_the_reference_point_is_the_steps_whatever_its_micro_batches(tmp_path, options):
    """One row a micro-batch, as TRL refuses it, and eight in one: the same z, the same losses."""
    runs = []
    for name, size, accumulation in (("one", 1, 8), ("all", 8, 1)):
        trainer = make(
            "kto", tmp_path / name, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=3,
            **(options if name == "all" else {}),
        )  # fmt: skip
        trainer.train()
        runs.append((logged(trainer, "kl"), logged(trainer, "loss")))
    assert runs[0][0] == pytest.approx(runs[1][0], abs=1e-4)
    assert runs[0][1] == pytest.approx(runs[1][1], abs=1e-5)
    assert max(runs[0][0]) > 0


def test_a_stream_has_the_reference_point_of_the_rows_it_reads(tmp_path):
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 2}
    plain = make("kto", tmp_path / "a", train_sampling_strategy="sequential", **split)
    stream = make("kto", tmp_path / "b", Dataset.from_list(rated()).to_iterable_dataset(), **split)
    plain.train()
    stream.train()
    assert logged(stream, "kl") == pytest.approx(logged(plain, "kl"), abs=1e-6)
    assert logged(stream, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-6)


def test_one_prompt_has_no_mismatch_and_keeps_the_last_reference_point(tmp_path):
    rows = [{"prompt": "Well?", "completion": f" {i}.", "label": i % 2 == 0} for i in range(8)]
    trainer = make("kto", tmp_path, rows)
    trainer.divergence = 0.25
    trainer.train()
    assert logged(trainer, "kl") == [0.25, 0.25]


def test_an_evaluation_has_a_reference_point_of_its_own(tmp_path):
    trainer = make("kto", tmp_path, eval_rows=rated(4), max_steps=3, per_device_train_batch_size=24)
    trainer.train()
    of_training, found = trainer.divergence, []
    for size in (1, 3, 8):
        trainer.args.per_device_eval_batch_size = size
        shown = trainer.evaluate()
        found.append((shown["eval_kl"], shown["eval_loss"]))
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0] == pytest.approx(found[2], abs=1e-5)
    assert trainer.divergence == of_training


def test_precomputed_references_have_partners_that_are_known_before(tmp_path):
    trainer = make("kto", tmp_path, precompute_ref_log_probs=True, max_steps=3, eval_rows=rated(3))
    (sample,) = trainer.train_dataset[0]
    assert "reference_logps" in sample.twin.per_token
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0.5, abs=1e-5)
    assert logged(trainer, "kl")[-1] >= 0
    assert "eval_kl" in trainer.evaluate()


def test_apo_zero_needs_no_partners(tmp_path):
    trainer = make("kto", tmp_path, loss_type="apo_zero_unpaired")
    trainer.train()
    assert next(iter(trainer.get_train_dataloader())).twin is None
    assert not logged(trainer, "kl")


# ---- rows --------------------------------------------------------------------------------------------------------------------


def test_pairs_are_two_rows_each(tmp_path):
    trainer = make("kto", tmp_path, tiny.pairs(6))
    labels = [trainer.train_dataset[row][0].scalars["label"] for row in range(12)]
    assert labels == [1.0, 0.0] * 6
    separate = make("kto", tmp_path / "b", rated(6))
    for row in range(12):
        one, other = trainer.train_dataset[row][0], separate.train_dataset[row][0]
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.trained.tolist() == other.trained.tolist()
    assert list(trainer.train_dataset.unit_lengths) == [len(trainer.train_dataset[row][0]) for row in range(12)]
    streamed = make("kto", tmp_path / "c", Dataset.from_list(tiny.pairs(6)).to_iterable_dataset())
    assert [unit[0].scalars["label"] for unit in streamed.train_dataset] == labels


def test_a_class_without_rows_has_no_numbers(tmp_path):
    rows = sorted(rated(), key=lambda row: not row["label"])
    trainer = make("kto", tmp_path, rows, train_sampling_strategy="sequential")
    trainer.train()
    assert logged(trainer, "rewards/chosen")
    assert not logged(trainer, "rewards/rejected")
    assert not logged(trainer, "rewards/margins")


def test_weights_that_the_paper_would_not_take_are_named(tmp_path, caplog):
    rows = [row for row in rated() if row["label"]] + [row for row in rated() if not row["label"]][:3]
    with caplog.at_level(logging.WARNING):
        make("kto", tmp_path, rows)
    assert "12 rows are wanted and 3 are not; the paper advises `desirable_weight` between 0.25 and 0.33" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make("kto", tmp_path, rows, desirable_weight=0.3)
    assert "the paper advises" not in caplog.text


def test_orpo_trains_the_prompt_once_and_compares_answers(tmp_path):
    whole, answer = make("orpo", tmp_path / "a"), make("orpo", tmp_path / "b", prompt_nll=False)
    chosen, rejected = whole.train_dataset[0]
    plain_chosen, plain_rejected = answer.train_dataset[0]
    assert chosen.trained.all()
    assert chosen.per_token["answer"].tolist() == plain_chosen.trained.tolist()
    assert rejected.trained.tolist() == plain_rejected.trained.tolist()
    assert "answer" not in plain_chosen.per_token


def test_tpo_reads_gold_answers_unless_they_have_no_weight(tmp_path):
    assert make("tpo", tmp_path / "a").roles == ("chosen", "rejected", "reference")
    pairs = make("tpo", tmp_path / "b", tiny.pairs(8), tpo_alpha=0.0)
    assert pairs.roles == ("chosen", "rejected")
    pairs.train()
    assert not logged(pairs, "nll_loss")
    with pytest.raises(ValueError, match="this method reads triple preference"):
        make("tpo", tmp_path / "c", tiny.pairs(8))


def test_gold_answers_begin_with_the_prompt_of_the_pair(tmp_path):
    rows = [
        {"chosen": "Q: one? A: yes", "rejected": "Q: one? A: no", "reference": "Q: one? A: surely"} for _ in range(4)
    ]
    trainer = make("tpo", tmp_path / "a", rows)
    text = tiny.tokenizer()
    gold = trainer.train_dataset[0][2]
    assert text.decode(gold.input_ids[gold.trained]) == " surely<|im_end|>"
    rows[2] = {**rows[2], "reference": "Something else"}
    with pytest.raises(ValueError, match=r"row 2.*reference.*does not begin with the prompt"):
        make("tpo", tmp_path / "b", rows)
    rows[2] = {**rows[2], "reference": None}
    with pytest.raises(ValueError, match=r"row 2.*reference"):
        make("tpo", tmp_path / "c", rows)


# ---- BCO ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pooled", "classes"])
def test_delta_is_the_mean_reward_of_the_steps_before(tmp_path, kind):
    trainer = make(
        "bco", tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=3, delta_mean=kind
    )
    trainer.train()
    deltas = logged(trainer, "delta")
    rewards = list(zip(logged(trainer, "rewards/chosen"), logged(trainer, "rewards/rejected")))
    assert deltas[0] == 0
    assert deltas[1] == 0  # before the first update every reward is 0
    saved = trainer.method_state()["rewards"]
    assert saved[1] + saved[3] == 24
    if kind == "classes":
        assert trainer.rewards.mean("classes") == pytest.approx((saved[0] / saved[1] + saved[2] / saved[3]) / 2)
    assert trainer.rewards.mean(kind) != 0
    assert rewards[0] == (0, 0)


def embed(input_ids, attention_mask):
    return (input_ids * attention_mask)[:, :4].float() / 100


def test_the_density_ratio_weighs_unwanted_rows(tmp_path):
    given = {"embedding_func": embed, "embedding_tokenizer": tiny.tokenizer()}
    trainer = make("bco", tmp_path, given=given, min_density_ratio=0.2, max_density_ratio=5.0)
    weights = [trainer.train_dataset[row][0].scalars for row in range(len(trainer.train_dataset))]
    assert all(row["density_ratio"] == 1 for row in weights if row["label"])
    assert all(0.2 <= row["density_ratio"] <= 5 for row in weights if not row["label"])
    trainer.train()
    state = json.loads(json.dumps(trainer.method_state(), default=lambda tensor: tensor.tolist()))
    assert len(state["classifier"]["weights"]) == 4


def test_embeddings_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(ValueError, match="give both or neither"):
        make("bco", tmp_path, given={"embedding_func": embed})
    wrong = {
        "embedding_func": lambda input_ids, attention_mask: input_ids.float()[0],
        "embedding_tokenizer": tiny.tokenizer(),
    }
    with pytest.raises(ValueError, match=r"`embedding_func` returned a tensor of shape .* one row for each of them"):
        make("bco", tmp_path, given=wrong)


# ---- options -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("cpo", {"loss_type": "kto_pair"}, "`loss_type` is 'kto_pair'; it must be one of sigmoid, hinge, ipo, simpo"),
        (
            "cpo",
            {"loss_type": "hinge", "label_smoothing": 0.1},
            "`label_smoothing` is set, but the loss hinge does not read",
        ),
        ("cpo", {"alpha": 0.2}, "`alpha` is set, but the loss sigmoid does not read it"),
        ("cpo", {"simpo_gamma": 1.0}, "`simpo_gamma` is set, but the loss sigmoid does not read it"),
        ("cpo", {"loss_type": "alphapo", "cpo_alpha": 0.5}, "alphapo has no nll term"),
        ("cpo", {"generate_during_eval": True}, "LogCompletionsCallback"),
        ("cpo", {"max_completion_length": 5}, "`max_length` limits prompt and answer together"),
        ("orpo", {"is_encoder_decoder": True}, "Encoder-decoder models are not supported"),
        ("orpo", {"beta": -1.0}, "`beta` is -1.0"),
        ("tpo", {"loss_type": "simpo"}, "it must be one of sigmoid, hinge, ipo, tpo-l"),
        ("kto", {"loss_type": "sigmoid"}, "`loss_type` is 'sigmoid'; it must be one of kto, apo_zero_unpaired"),
        ("kto", {"desirable_weight": -1.0}, "`desirable_weight` is -1.0"),
        ("kto", {"max_prompt_length": 5}, "`max_length` limits prompt and answer together"),
        ("bco", {"delta_mean": "median"}, "`delta_mean` is 'median'"),
        ("bco", {"min_density_ratio": 20.0}, "`min_density_ratio` is 20.0"),
    ],
)
def test_options_without_a_meaning_are_refused(tmp_path, method, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        METHODS[method].config_class(output_dir=str(tmp_path), use_cpu=True, **options)


def test_alphapo_is_simpo_without_an_nll_term(tmp_path):
    config = METHODS["cpo"].config_class(output_dir=str(tmp_path), use_cpu=True, loss_type="alphapo", alpha=0.25)
    assert (config.loss_type, config.cpo_alpha, config.alpha) == ("simpo", 0.0, 0.25)


@pytest.mark.parametrize("method", ["cpo", "orpo", "tpo"])
def test_methods_without_a_reference_refuse_one(tmp_path, method):
    with pytest.raises((ValueError, TypeError), match="ref_model"):
        make(method, tmp_path, given={"ref_model": tiny.causal_lm(1)})


AT_THE_START = {"kto": 0.5, "bco": math.log(2)}
"""The loss of a new adapter on its own base, from which nothing has moved."""


@pytest.mark.parametrize("method", ["cpo", "orpo", "tpo", "kto", "bco", "prm"])
def test_an_adapter_trains_on_a_4_bit_base_that_stays_as_it_is(tmp_path, method):
    """QLoRA with bitsandbytes' CPU kernels; the reference of KTO and BCO is the quantised base itself."""
    base = tiny.process_reward_model if method == "prm" else tiny.causal_lm
    base(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "base")
    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    given = {"quantization_config": packed, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    one_batch = {"per_device_train_batch_size": 24, "max_steps": 4}
    trainer = make(method, tmp_path / "run", model=str(tmp_path / "base"), given=given, **one_batch)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert any(parameter.dtype == torch.uint8 for parameter in before.values())
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[0] == pytest.approx(AT_THE_START.get(method, losses[0]), abs=1e-5)
    assert losses[-1] < losses[0]
    frozen = {name: parameter for name, parameter in trainer.model.named_parameters() if name in before}
    assert all(torch.equal(before[name], parameter) for name, parameter in frozen.items())


def test_lora_trains_against_the_base_model(tmp_path):
    trainer = make("kto", tmp_path, given={"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, max_steps=2)
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0.5, abs=1e-6)
    assert torch.isfinite(torch.tensor(logged(trainer, "loss"))).all()
