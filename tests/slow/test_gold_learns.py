"""GOLD's learning proof: a student learns a grammar from a teacher with another tokenizer, and nothing where there is nothing."""

from __future__ import annotations

import random
import re

import pytest
import torch
from datasets import Dataset

from posttrain import GOLDConfig, GOLDTrainer, SFTConfig, SFTTrainer
from tests import tiny

NOUNS, VERBS = (
    ["cat", "dog", "horse", "river", "stone", "teacher", "farmer", "garden"],
    ["sees", "finds", "follows", "likes", "paints", "hears"],
)
VALID = re.compile(rf" the ({'|'.join(NOUNS)}) ({'|'.join(VERBS)}) the ({'|'.join(NOUNS)})\.")
PROMPT = "Say something:"
ASKED = 128


def rows():
    dice = random.Random(0)
    said = [f" the {dice.choice(NOUNS)} {dice.choice(VERBS)} the {dice.choice(NOUNS)}." for _ in range(512)]
    return [{"prompt": PROMPT, "completion": sentence} for sentence in said]


def valid_share(model, tokenizer):
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]] * ASKED)
    torch.manual_seed(0)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    written = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=24, **ends)[:, ids.shape[1] :]
    return sum(bool(VALID.fullmatch(tokenizer.decode(one, skip_special_tokens=True))) for one in written) / ASKED


@pytest.mark.trust
@pytest.mark.parametrize("knows", [True, False], ids=["trained", "untrained"])
def test_a_student_learns_what_its_teacher_knows(tmp_path, knows):
    data, texts = Dataset.from_list(rows()), [PROMPT, *(row["completion"] for row in rows())]
    own, theirs = (tiny.merging_tokenizer(texts, words, None) for words in (331, 310))
    assert own.get_vocab() != theirs.get_vocab()
    shape = {"hidden_size": 64, "intermediate_size": 128}
    teacher = tiny.causal_lm(1, vocab_size=len(theirs), **shape)
    shared = {
        "report_to": "none", "use_cpu": True, "save_strategy": "no", "verbosity": "quiet", "learning_rate": 3e-3,
        "per_device_train_batch_size": 32, "lr_scheduler_type": "constant",
    }  # fmt: skip
    if knows:
        args = SFTConfig(str(tmp_path / "teacher"), max_steps=150, **shared)
        SFTTrainer(teacher, args, train_dataset=data, processing_class=theirs).train()
        assert valid_share(teacher, theirs) > 0.9
    args = GOLDConfig(
        str(tmp_path / "student"), max_steps=200, use_uld_loss=True, uld_use_hybrid_loss=True, beta=0.0, lmbda=0.3,
        uld_skip_student_eos=False, uld_skip_teacher_eos=False, max_completion_length=24, top_p=1.0, temperature=1.0, **shared,
    )  # fmt: skip
    student = tiny.causal_lm(2, vocab_size=len(own), **shape)
    assert valid_share(student, own) == 0
    given = {"processing_class": own, "teacher_processing_class": theirs}
    trainer = GOLDTrainer(student, teacher, args, train_dataset=data, **given)
    trainer.train()
    share = valid_share(trainer.model, own)
    assert share > 0.8 if knows else share < 0.05
