"""Reference log-probs by row: what was seen before is not computed again, whatever dataset it is in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from posttrain import DPOConfig, DPOTrainer
from posttrain.core.batch import PADDED, RAGGED
from posttrain.data.store.row_store import RowStore
from posttrain.models.load.adapters import adapter_in_use, freeze_copy_of_adapter
from posttrain.models.load.reference import PRECOMPUTED, ModelReference
from posttrain.models.load.weights import weights_fingerprint
from posttrain.trainer.references import cache as reference_cache
from posttrain.trainer.references.cache import Work, batches_of
from tests import tiny
from tests.forked import Child, start_group, wait_for_group

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


class Counted:
    """Samples that the reference was asked about, and how many tokens each batch had."""

    def __init__(self, monkeypatch):
        self.samples, self.batches = 0, []
        original = ModelReference.scores

        def scores(reference, batch):
            self.samples += len(batch.rows)
            self.batches.append(batch)
            assert not torch.is_inference_mode_enabled()
            found = original(reference, batch)
            assert not found.logps.requires_grad
            return found

        monkeypatch.setattr(ModelReference, "scores", scores)

    def since(self):
        count, self.samples = self.samples, 0
        return count


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def rows(first, last):
    return tiny.pairs(last)[first:last]


def dpo(tmp_path, data, model=None, evaluation=None, peft_config=None, **settings):
    options = {
        "output_dir": str(tmp_path / "run"), "dataset_cache_dir": str(tmp_path / "cache"), "max_steps": 1, "use_cpu": True,
        "per_device_train_batch_size": 4, "report_to": "none", **settings,
    }  # fmt: skip
    return DPOTrainer(
        model or tiny.causal_lm(), args=DPOConfig(precompute_ref_log_probs=True, **options), processing_class=tiny.tokenizer(),
        train_dataset=Dataset.from_list(data), eval_dataset=None if evaluation is None else Dataset.from_list(evaluation),
        peft_config=peft_config,
    )  # fmt: skip


def numbers(trainer):
    return [s.per_token[PRECOMPUTED] for i in range(len(trainer.train_dataset)) for s in trainer.train_dataset[i]]


def test_only_rows_that_are_new_are_computed(tmp_path, counted, capsys):
    data = tiny.pairs(40)
    distinct = {row["chosen"][-1]["content"] if isinstance(row["chosen"], list) else row["chosen"] for row in data}
    assert len(distinct) == 40, "the rows of this test must differ"
    first = numbers(dpo(tmp_path, data[:20]))
    assert counted.since() == 40  # 20 pairs
    assert "0 of 20 train rows were in the cache" in capsys.readouterr().out
    again = numbers(dpo(tmp_path, data[:20]))
    assert counted.since() == 0
    assert "20 of 20 train rows were in the cache" in capsys.readouterr().out
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    dpo(tmp_path, data[:30])
    assert counted.since() == 20  # ten new pairs
    dpo(tmp_path, data[10:30][::-1], evaluation=data[:10])
    assert counted.since() == 0  # another order, another split
    dpo(tmp_path, data[:5], max_length=40)
    assert counted.since() == sum(len(s) == 40 for s in samples(tmp_path, data[:5], 40))


def samples(tmp_path, data, max_length):
    prepared = dpo(tmp_path, data, max_length=max_length).train_dataset
    return [s for i in range(len(prepared)) for s in prepared[i]]


def test_numbers_are_those_of_the_live_reference(tmp_path, counted):
    for settings in ({}, {"padding_free": False}, {"precompute_ref_batch_size": 3}):
        made = dpo(tmp_path / str(settings), rows(0, 12), **settings)
        live = ModelReference(made.model, "live")
        for index in range(12):
            unit = made.train_dataset[index]
            batch = made.data_collator([unit])
            expected = live.scores(batch).logps.numpy()
            stored = np.concatenate([s.per_token[PRECOMPUTED][1:][s.trained[1:]] for s in unit])
            np.testing.assert_allclose(stored, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["module", "folder", "adapter", "given"])
def test_rows_that_come_later_are_computed_when_they_are_evaluated_on(tmp_path, counted, kind):
    """After a step, on rows that the trainer was not given: the loss is that of a run whose reference stayed in memory."""
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    found = []
    for precomputes in (False, True):
        options = {
            "output_dir": str(tmp_path / "run"), "dataset_cache_dir": str(tmp_path / "cache"), "max_steps": 1, "use_cpu": True,
            "per_device_train_batch_size": 4, "report_to": "none", "learning_rate": 1e-2, "save_strategy": "no",
        }  # fmt: skip
        trainer = DPOTrainer(
            str(tmp_path / "model") if kind == "folder" else tiny.causal_lm(),
            ref_model=tiny.causal_lm(seed=1) if kind == "given" else None,
            args=DPOConfig(precompute_ref_log_probs=precomputes, **options),
            processing_class=tiny.tokenizer(),
            train_dataset=Dataset.from_list(rows(0, 4)),
            peft_config=LORA if kind == "adapter" else None,
        )
        trainer.train()
        counted.since()
        found.append(trainer.evaluate(Dataset.from_list(rows(4, 9)))["eval_loss"])
    assert counted.since() == 10  # five pairs, once
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    trainer.evaluate(Dataset.from_list(rows(4, 9)))
    assert counted.since() == 0


@pytest.mark.parametrize("kind", ["module", "folder"])
def test_the_policy_itself_answers_before_training(tmp_path, monkeypatch, kind):
    """No second model is made on the device; of a module, which will have moved, one stays in host memory."""
    monkeypatch.setattr("posttrain.trainer.references.setup.create_reference_model", lambda *_: pytest.fail("a copy"))
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    made = dpo(tmp_path, rows(0, 8), model=str(tmp_path / "model") if kind == "folder" else None)
    assert made.model.training or not any(isinstance(part, torch.nn.Dropout) for part in made.model.modules())
    assert all(parameter.requires_grad for parameter in made.model.parameters())
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    kept = made.reference._annotate.reference
    if kind == "folder":
        assert kept is None
    else:
        wanted = tiny.causal_lm().state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in kept.model.state_dict().items())
        assert not any(parameter.requires_grad for parameter in kept.model.parameters())


def test_changed_weights_compute_everything(tmp_path, counted):
    dpo(tmp_path, rows(0, 8))
    counted.since()
    model = tiny.causal_lm()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    dpo(tmp_path, rows(0, 8), model)
    assert counted.since() == 16
    dpo(tmp_path, rows(0, 8))
    assert counted.since() == 0  # the first reference is still there


def test_an_adapter_that_is_off_leaves_the_plain_models_cache_in_use(tmp_path, counted):
    dpo(tmp_path, rows(0, 6))
    counted.since()
    for seed in (1, 2):
        dpo(tmp_path, rows(0, 6), peft_config=LORA, seed=seed)
        assert counted.since() == 0


def test_a_damaged_cache_is_noticed_and_computed_again(tmp_path, counted, caplog):
    expected = numbers(dpo(tmp_path, rows(0, 8)))
    dpo(tmp_path, rows(0, 12))
    counted.since()
    segments = sorted((tmp_path / "cache" / "reference_logps").rglob("*.rows"), key=lambda path: -path.stat().st_size)
    assert len(segments) == 2
    content = bytearray(segments[0].read_bytes())
    content[len(content) // 2] ^= 16
    segments[0].write_bytes(content)
    found = numbers(dpo(tmp_path, rows(0, 8)))
    assert counted.since() == 16
    assert "is damaged (its checksum does not hold)" in caplog.text
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_two_processes_at_once(tmp_path, counted):
    """Two runs fill one cache at the same time; a third finds everything."""

    def run(first, last):
        dpo(tmp_path / f"{first}", rows(first, last), dataset_cache_dir=str(tmp_path / "cache"))

    children = [Child(lambda part=part: run(*part), tmp_path / f"{part}.log") for part in ((0, 12), (6, 18))]
    assert [child.wait() for child in children] == [0, 0], "\n".join(child.output() for child in children)
    dpo(tmp_path, rows(0, 18))
    assert counted.since() == 0


def test_the_processes_of_one_run_share_the_work(tmp_path, counted):
    """Two ranks compute each row once between them, see the same numbers, and a single process finds them all."""
    ranks = start_group(2, lambda rank: one_rank(tmp_path, rank), tmp_path / "rank")
    assert wait_for_group(ranks) == [0, 0], "\n".join(rank.output() for rank in ranks)
    asked, sums = zip(*((tmp_path / f"rank{rank}").read_text().split() for rank in (0, 1)))
    assert asked == ("8", "6")  # 7 pairs: four on the one, three on the other
    made = dpo(tmp_path, rows(0, 7))
    assert counted.since() == 0
    assert {*sums} == {f"{sum(float(part.sum()) for part in numbers(made)):.9f}"}


def one_rank(tmp_path, rank):
    """A process of a run of two: writes how many samples its reference was asked about, and the sum of all numbers."""
    counted = Counted(pytest.MonkeyPatch())
    made = dpo(tmp_path, rows(0, 7), precompute_ref_batch_size=2)
    real = sum(int((batch.counts > 0).sum()) for batch in counted.batches)
    (tmp_path / f"rank{rank}").write_text(f"{real} {sum(float(part.sum()) for part in numbers(made)):.9f}")
    torch.distributed.destroy_process_group()


def test_a_long_pass_says_where_it_is_and_saves_as_it_goes(tmp_path, counted, capsys, monkeypatch):
    monkeypatch.setattr(reference_cache, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(reference_cache, "SECONDS_BETWEEN_SAVES", 0)
    dpo(tmp_path, rows(0, 9), precompute_ref_batch_size=3)
    said = capsys.readouterr().out
    assert "Reference log-probs: 3 of 9 train rows, " in said
    assert "Reference log-probs of 9 train rows were computed in" in said
    assert len(list((tmp_path / "cache" / "reference_logps").rglob("*.rows"))) == 3
    assert [len(batch.rows) for batch in counted.batches] == [6, 6, 6]


def test_a_kill_in_the_middle_costs_what_was_not_saved(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(reference_cache, "SECONDS_BETWEEN_SAVES", 0)
    original = ModelReference.scores
    asked = []

    def fails_late(reference, batch):
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return original(reference, batch)

    monkeypatch.setattr(ModelReference, "scores", fails_late)
    with pytest.raises(KeyboardInterrupt):
        dpo(tmp_path, rows(0, 9), precompute_ref_batch_size=3)
    monkeypatch.setattr(ModelReference, "scores", original)
    counted.since()
    dpo(tmp_path, rows(0, 9), precompute_ref_batch_size=3)
    assert counted.since() == 6  # the last three of nine pairs


def test_batches_are_made_by_tokens_longest_first():
    work = [Work(i, (0, 1), longest, 2 * longest) for i, longest in enumerate((50, 40, 40, 10, 5, 5))]
    assert [[w.unit for w in b] for b in batches_of(work, RAGGED, 120, None)] == [[0], [1], [2, 3, 4, 5]]
    assert [[w.unit for w in b] for b in batches_of(work, PADDED, 200, None)] == [[0, 1], [2, 3], [4, 5]]
    assert [[w.unit for w in b] for b in batches_of(work, RAGGED, 1, 4)] == [[0, 1, 2, 3], [4, 5]]
    assert [len(b) for b in batches_of(work, RAGGED, 1, None)] == [1] * 6


def test_a_log_prob_that_is_not_finite_is_not_kept(tmp_path):
    model = tiny.causal_lm()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        dpo(tmp_path, rows(0, 4), model)
    assert not list((tmp_path / "cache").rglob("*.rows"))


# ---- fingerprints -------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_content_and_of_what_is_in_use():
    plain = weights_fingerprint(tiny.causal_lm())
    assert plain == weights_fingerprint(tiny.causal_lm())
    assert plain != weights_fingerprint(tiny.causal_lm(seed=1))
    assert plain != weights_fingerprint(tiny.causal_lm(dtype=torch.bfloat16))
    other = tiny.causal_lm()
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 5e5}
    assert plain != weights_fingerprint(other)
    model = get_peft_model(tiny.causal_lm(), LORA)
    adapted = weights_fingerprint(model)
    assert adapted != plain
    with adapter_in_use(model, None):
        assert weights_fingerprint(model) == plain
    name = freeze_copy_of_adapter(model)
    assert weights_fingerprint(model) == adapted  # another adapter that is not in use
    with adapter_in_use(model, name):
        assert weights_fingerprint(model) != plain
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if f".{name}." in n).mul_(2)
    assert weights_fingerprint(model) == adapted


def test_the_cache_survives_as_a_store(tmp_path):
    made = dpo(tmp_path, rows(0, 5))
    (folder,) = (tmp_path / "cache" / "reference_logps").iterdir()
    assert len(RowStore(folder)) == 10
    assert made.train_dataset.store.folder == folder
