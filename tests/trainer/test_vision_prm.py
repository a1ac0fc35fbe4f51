"""Process reward models that see: steps are judged after images, and a saved model judges as it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from posttrain.core.batch import PADDED
from posttrain.models.load.model import TOKEN_LABELS, LoadOptions, innermost_model, load_model
from posttrain.models.load.saved_model import classifier_task
from posttrain.models.scoring.heads import score_labels
from tests.trainer.vision_runs import PICTURES, rows_of, trainer_of

FAMILIES = ("qwen2_5_vl", "smolvlm", "gemma3")
PLAIN = [{"image": PICTURES[0], "prompt": "{} What is it?", "completions": ["A cat.", "No."], "labels": [True, False]}]


@pytest.mark.parametrize("kind", ["conversational", "plain"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_judged_behind_images(kind, family, tmp_path):
    if kind == "plain":
        mark = {"qwen2_5_vl": "<|image_pad|>", "gemma3": "<start_of_image>"}.get(family, "<image>")
        rows = [{**row, "prompt": row["prompt"].format(mark)} for row in PLAIN]
    else:
        rows = rows_of("prm")[:1]
    trainer = trainer_of("prm", family, tmp_path, train_dataset=rows, per_device_train_batch_size=1)
    ((sample,),) = [trainer.train_dataset[0]]
    assert len(sample.images) == 1
    judged = np.flatnonzero(sample.trained)
    assert trainer.vision.processor.tokenizer.decode(sample.input_ids[judged]) == "\n\n"
    assert sample.per_token["labels"][judged].tolist() == [1, 0]
    assert judged[0] > sample.images[-1].stop
    assert (sample.positions is not None) == (family == "qwen2_5_vl")
    answers(trainer, sample)
    trainer.train()


def answers(trainer: Any, sample: Any) -> None:
    """What is said at the steps is the head's answer to transformers' own hidden states there."""
    innermost, family = innermost_model(trainer.model), trainer.vision.family
    batch = trainer.data_collator([(sample,)])
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **batch.images.encoder}
    is_image = (ids == family.placeholder_id).long()
    if family.three_axis_positions:
        kwargs["mm_token_type_ids"] = is_image
    elif family.token_types_key:
        kwargs[family.token_types_key] = is_image
    with torch.no_grad():
        hidden = innermost.model(**kwargs, use_cache=False).last_hidden_state[0]
        expected = innermost.score(hidden[torch.from_numpy(sample.trained)])
        for layout in {PADDED, trainer.loaded.layout}:
            trainer.data_collator.layout = layout
            found = score_labels(trainer.model, trainer.data_collator([(sample,)])).labels
            assert (found - expected).abs().max() < 1e-6, layout


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_saved_model_judges_as_it_did(family, tmp_path):
    trainer = trainer_of("prm", family, tmp_path, torch.float32)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert classifier_task(tmp_path / "saved") == TOKEN_LABELS
    options = LoadOptions(task=TOKEN_LABELS, dtype=torch.float32, vision=trainer.vision.family)
    loaded = load_model(str(tmp_path / "saved"), options)
    trainer.data_collator.layout = PADDED
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(5)])
    with torch.no_grad():
        found, wanted = (score_labels(model.eval(), batch).labels for model in (loaded.model, trainer.model))
    assert (found - wanted).abs().max() < 1e-5


def test_a_prefix_lm_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="'paligemma' read what comes before the first judged token in both directions"
    ):
        trainer_of("prm", "paligemma", tmp_path)
