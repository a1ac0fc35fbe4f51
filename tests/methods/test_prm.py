"""Process reward models: where a step is judged, what its loss is, and what is saved."""

from __future__ import annotations

import random

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import AutoPeftModelForTokenClassification, LoraConfig
from transformers import AutoModelForTokenClassification

from posttrain import PRMConfig, PRMTrainer, ProcessReward
from posttrain.core.batch import PADDED, RAGGED
from posttrain.losses.reward import step_cross_entropy, step_metrics
from posttrain.models.load.saved_model import find_saved
from posttrain.models.scoring.heads import TOKEN_LABELS
from tests import tiny

TOKENISED = {"input_ids": [65, 66, 10, 67, 10], "labels": [-100, -100, 1, -100, 0]}


def made(tmp_path, rows=None, model=None, peft_config=None, evaluated=None, **options):
    options = {"max_steps": 2, "learning_rate": 1e-2, **options}
    args = PRMConfig(
        output_dir=str(tmp_path / "run"), report_to="none", use_cpu=True, dataset_cache_dir=str(tmp_path), **options
    )
    rows = tiny.steps() if rows is None else rows
    return PRMTrainer(
        model or tiny.process_reward_model(),
        args,
        train_dataset=Dataset.from_list(rows) if isinstance(rows, list) else rows,
        eval_dataset=Dataset.from_list(tiny.steps() if evaluated is None else evaluated),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


def test_golden_numbers():
    """Worked by hand: logits (0.2, 1.4)."""
    logits = torch.tensor([[0.2, 1.4], [0.2, 1.4]], dtype=torch.float64)
    found = step_cross_entropy(logits, torch.tensor([1, 0]))
    torch.testing.assert_close(found, torch.tensor([0.263282, 1.463282], dtype=torch.float64), atol=5e-7, rtol=0)


def test_loss_against_the_plain_formula():
    draw = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(50, 2, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 2, (50,), generator=draw)
    expected = [-torch.log(torch.exp(z[y]) / (torch.exp(z[0]) + torch.exp(z[1]))) for z, y in zip(logits, labels)]
    torch.testing.assert_close(step_cross_entropy(logits, labels), torch.stack(expected), atol=1e-9, rtol=0)


def test_a_classifier_that_knows_nothing_has_loss_ln_2():
    assert step_cross_entropy(torch.zeros(1, 2), torch.tensor([1])).item() == pytest.approx(0.693147, abs=1e-6)


def test_accuracy_of_all_steps_and_of_each_class():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    found = {name: v.nanmean().item() for name, v in step_metrics(logits, torch.tensor([1, 0, 0, 1])).items()}
    assert found == {"accuracy": 0.75, "accuracy/bad": 0.5, "accuracy/good": 1.0}


@pytest.mark.parametrize("layout", [RAGGED, PADDED])
def test_a_step_is_read_at_its_separators_own_token(layout, tmp_path):
    """The position before it, which would predict it, has another answer; the plain model says which is which."""
    trainer = made(tmp_path, padding_free=layout == RAGGED)
    trainer.model.eval()
    units = [trainer.train_dataset[i] for i in range(5)]
    batch = trainer.data_collator(units)
    with torch.no_grad():
        found = trainer.score(trainer.model, batch, ()).labels
        rows = [torch.tensor(unit[0].input_ids.astype("int64"))[None] for unit in units]
        plain = [trainer.model(input_ids=ids).logits[0] for ids in rows]
    own = torch.cat([logits[unit[0].trained] for logits, unit in zip(plain, units)])
    before = torch.cat([logits[:-1][unit[0].trained[1:]] for logits, unit in zip(plain, units)])
    torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-5)
    assert (found - before).abs().max() > 1e-3
    newline = trainer.processing_class("\n").input_ids
    assert batch.targets.tolist() == newline * len(batch.targets)


def test_the_saved_folder_gives_equal_logits_in_plain_transformers(tmp_path):
    trainer = made(tmp_path)
    trainer.train()
    trainer.save_model()
    folder = tmp_path / "run"
    assert find_saved(folder).task == TOKEN_LABELS
    loaded = AutoModelForTokenClassification.from_pretrained(folder)
    ids = torch.tensor(trainer.train_dataset[0][0].input_ids.astype("int64"))[None]
    trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, trainer.model(input_ids=ids).logits, atol=0, rtol=0)


def test_the_head_is_trained_and_saved_with_an_adapter(tmp_path):
    before = tiny.process_reward_model()
    before.save_pretrained(tmp_path / "base")
    trainer = made(tmp_path, model=str(tmp_path / "base"), peft_config=LoraConfig(r=2, target_modules=["q_proj"]))
    trainer.train()
    trainer.save_model()
    assert find_saved(tmp_path / "run").task == TOKEN_LABELS
    loaded = AutoPeftModelForTokenClassification.from_pretrained(tmp_path / "run", num_labels=2)
    ids = torch.tensor([[70, 71, 10]])
    trainer.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, trainer.model(input_ids=ids).logits)
        assert (loaded(input_ids=ids).logits - before.eval()(input_ids=ids).logits).abs().max() > 1e-4


def test_the_last_step_alone_is_trained_and_all_are_evaluated(tmp_path):
    trainer = made(tmp_path, train_on_last_step_only=True)
    assert trainer.train_dataset.report.trained_tokens == 20
    assert trainer.eval_dataset.report.trained_tokens == 50


def test_tokenised_rows(tmp_path):
    trainer = made(tmp_path, [TOKENISED] * 4)
    (sample,) = trainer.train_dataset[0]
    assert sample.trained.tolist() == [False, False, True, False, True]
    assert sample.per_token["labels"].tolist() == [0, 0, 1, 0, 0]
    trainer = made(
        tmp_path, [TOKENISED] * 4 + [{**TOKENISED, "labels": [-100, -100, 0, -100, 1]}], train_on_last_step_only=True
    )
    assert trainer.train_dataset[0][0].trained.tolist() == [False] * 4 + [True]


ROW = {"prompt": "P", "completions": ["abcd", "efgh", "ij"], "labels": [True, True, False]}


@pytest.mark.parametrize("stream", [False, True])
def test_steps_that_are_cut_off_are_counted(stream, tmp_path):
    rows = [ROW, {**ROW, "completions": ["ab", "c", "d\ne"]}]
    given = IterableDataset.from_generator(lambda: iter(rows)) if stream else rows
    trainer = made(tmp_path, given, evaluated=rows, max_completion_length=10, max_length=6)
    units = list(trainer.train_dataset) if stream else [trainer.train_dataset[0], trainer.train_dataset[1]]
    assert [unit[0].num_trained for unit in units] == [1, 2]
    said = trainer.train_dataset.report.summary()
    assert "Noted: 1 steps cut off by max_completion_length" in said
    assert "Noted: 1 steps with the step separator inside of them" in said
    assert "and the labels of 2 steps lost" in said


def test_a_row_without_any_step_left_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"column 'completions': has no step to judge within its first 3 tokens"):
        made(tmp_path, [ROW] * 3, max_completion_length=3)


def test_what_is_logged_and_given_to_compute_metrics(tmp_path):
    seen = []

    def shapes(given):
        seen.append((given.predictions.shape, given.label_ids.shape, (given.label_ids == -100).sum()))
        return {"rows": len(given.label_ids)}

    trainer = made(tmp_path, per_device_eval_batch_size=20)
    trainer.compute_metrics = shapes
    found = trainer.evaluate()
    assert seen == [((20, 3, 2), (20, 3), 10)]
    right = found["eval_accuracy/good"] * 30 + found["eval_accuracy/bad"] * 20
    assert found["eval_accuracy"] == pytest.approx(right / 50)
    trainer.train()
    assert {"accuracy", "accuracy/good", "accuracy/bad"} <= trainer.state.log_history[0].keys()


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"leave `model_init` out"):
        PRMTrainer(None, PRMConfig(output_dir=str(tmp_path), use_cpu=True), model_init=tiny.process_reward_model)
    with pytest.raises(ValueError, match=r"A process reward model has two outputs; .* has num_labels=3"):
        made(tmp_path, model=tiny.process_reward_model().__class__(tiny.config(num_labels=3)))
    with pytest.raises(
        ValueError, match=r"formatting_func writes one text .* this method reads stepwise supervision or tok"
    ):
        PRMTrainer(
            tiny.process_reward_model(), PRMConfig(output_dir=str(tmp_path), use_cpu=True), None, [ROW],
            processing_class=tiny.tokenizer(), formatting_func=str,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"`step_separator` is empty"):
        PRMConfig(output_dir=str(tmp_path), step_separator="")


def test_the_head_has_its_dropout_where_it_is_asked_for(tmp_path):
    trainer = made(tmp_path, disable_dropout=False)
    batch = trainer.data_collator([trainer.train_dataset[0]])
    trainer.model.train()
    two = [trainer.score(trainer.model, batch, ()).labels for _ in range(2)]
    assert not torch.equal(*two)
    trainer.model.eval()
    assert torch.equal(*[trainer.score(trainer.model, batch, ()).labels for _ in range(2)])


# ---- does it learn? --------------------------------------------------------------------------------------------------------


def chain(draw, random_labels=False):
    """Three steps of four letters, of which a z makes a step bad, wherever it stands. A third of them are bad."""
    labels = [draw.random() < 2 / 3 for _ in range(3)]
    steps = ["".join(draw.choice("abcde") for _ in range(4)) for _ in labels]
    for number, good in enumerate(labels):
        place = draw.randrange(4)
        steps[number] = steps[number] if good else f"{steps[number][:place]}z{steps[number][place + 1 :]}"
    drawn = [draw.random() < 2 / 3 for _ in range(3)]
    return {"prompt": "P\n", "completions": steps, "labels": drawn if random_labels else labels}


def learnt(tmp_path, random_labels):
    draw = random.Random(0)
    rows = [chain(draw, random_labels) for _ in range(640)]
    options = {"max_steps": 60, "per_device_train_batch_size": 32, "learning_rate": 1e-2, "logging_steps": 30}
    trainer = made(tmp_path, rows, evaluated=[chain(draw) for _ in range(100)], **options)
    trainer.train()
    return trainer, trainer.evaluate()


def test_bad_steps_are_found_in_rows_that_were_not_trained_on_and_the_best_of_eight_chains_is_picked(tmp_path):
    trainer, found = learnt(tmp_path, random_labels=False)
    assert found["eval_accuracy"] > 0.9  # the majority is 0.67
    assert found["eval_accuracy/bad"] > 0.8
    judge = ProcessReward(trainer.model, trainer.processing_class, aggregate="min")
    draw, gains = random.Random(1), []
    for _ in range(60):
        chains = [chain(draw) for _ in range(8)]
        values = judge(["P\n"] * 8, ["\n".join(one["completions"]) + "\n" for one in chains])
        right = [all(one["labels"]) for one in chains]
        gains.append(right[values.index(max(values))] - right[0])
    gains = torch.tensor(gains, dtype=torch.float64)
    assert gains.mean() > 3 * gains.std() / len(gains) ** 0.5


def test_from_random_labels_nothing_is_learnt(tmp_path):
    _, found = learnt(tmp_path, random_labels=True)
    assert found["eval_accuracy"] < 0.75
