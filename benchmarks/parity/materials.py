"""Writes what both sides load: tokenizers, models of a few thousand weights, adapters with one saved initialisation, rows.

    python -m benchmarks.parity.materials FOLDER
    python -m benchmarks.parity.materials --fit     trains the models of fitted/ anew; then record everything (run.sh --record)

Run with posttrain's own environment (it takes the tiny models of the test suite); the folder is then read by both sides.
"""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from benchmarks.parity.one_side import set_adapter
from benchmarks.parity.rows import ROWS, rows
from benchmarks.parity.vision_cases import ADAPTED, FAMILIES
from tests import tiny, tiny_vision

HERE = Path(__file__).resolve().parent
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "lora_dropout": 0.0}
OF_LANGUAGE_MODEL = r".*language_model.*\.(q_proj|v_proj|up_proj)"
LORA_TASK = {"causal": "CAUSAL_LM", "reward": "SEQ_CLS"}
MODELS = {
    "causal": lambda: _fitted("causal"),
    "other": lambda: _fitted("other"),  # an explicit reference, near enough to be a rival
    "flat": lambda: tiny.causal_lm(seed=0),  # all tokens about as likely
    "merging": lambda: tiny.causal_lm(seed=5, vocab_size=len(tiny.merging_tokenizer())),  # a teacher with other tokens
    "llama": lambda: _fitted("llama"),
    "moe": lambda: _fitted("moe"),
    "reward": lambda: _livelier(tiny.reward_model(seed=3)),
    "steps": lambda: _livelier(tiny.process_reward_model(seed=4)),
}

FITTED: dict[str, tuple[Any, int]] = {
    "causal": (lambda: tiny.causal_lm(seed=0), 30),
    "other": (lambda: tiny.causal_lm(seed=0), 32),
    "llama": (lambda: tiny.causal_lm(seed=1, family="llama"), 30),
    "moe": (lambda: tiny.causal_lm(seed=2, family="qwen3_moe", output_router_logits=True), 30),
}
"""Model -> how it begins, and the steps of its training."""
WEIGHTS = HERE / "fitted"


def write(folder: Path) -> None:
    """Everything, unless a complete set is there already."""
    done = folder / "complete"
    if done.exists():
        return
    for name, make in MODELS.items():
        model = make()
        model.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    for family in FAMILIES if util.find_spec("torchvision") else ():  # Pillow's processors make other pixels
        seeing = tiny_vision.vision_model(family)
        seeing.model.save_pretrained(folder / family)
        seeing.processor.save_pretrained(folder / family)
        if family in ADAPTED:
            _write_seeing_adapters(family, folder)
    for name, task in LORA_TASK.items():
        _write_adapter(MODELS[name](), task, folder / f"{name}_adapter")
    tiny.tokenizer().save_pretrained(folder / "tokenizer")
    tiny.merging_tokenizer().save_pretrained(folder / "merging_tokenizer")
    marked = tiny.tokenizer()
    marked.chat_template = (HERE / "marked_chatml.jinja").read_text()
    marked.save_pretrained(folder / "marked_tokenizer")
    for name in ROWS:
        _write_rows(folder / f"{name}.jsonl", rows(name))
        _write_rows(folder / f"{name}.eval.jsonl", rows(name, count=6, start=40))
    done.touch()


def _fitted(name: str) -> Any:
    """A model after a little plain training, so that some tokens are predicted and `mean_token_accuracy` is not 0 everywhere.

    Its weights are a file: thirty steps blow up the last bit of another machine's sums, and recorded numbers would hold on one kind
    of CPU only.
    """
    make, _ = FITTED[name]
    model = make()
    model.load_state_dict(
        {key: tensor.float() for key, tensor in load_file(WEIGHTS / f"{name}.safetensors").items()}, strict=False
    )
    return model


def fit(name: str) -> None:
    """Train it, and write its weights in bfloat16."""
    make, steps = FITTED[name]
    model, tokenizer = make(), tiny.tokenizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(steps):
        ids = torch.tensor([tokenizer(row["text"])["input_ids"][:24] for row in rows("text", 8, start=100 + step)])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    # Tied ones once.
    kept = {key: tensor.detach().to(torch.bfloat16).clone() for key, tensor in model.named_parameters()}
    WEIGHTS.mkdir(exist_ok=True)
    save_file(kept, WEIGHTS / f"{name}.safetensors")


def _livelier(model: Any) -> Any:
    """Larger weights than the default initialisation, so that rewards differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


def _write_adapter(model: Any, task: str, folder: Path) -> None:
    """Both LoRA matrices random: with B = 0, as usual, the first steps would hardly depend on A."""
    torch.manual_seed(11)
    config = LoraConfig(**LORA, task_type=task, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)


def _write_seeing_adapters(family: str, folder: Path) -> None:
    """One on all modules of those names, and one on the language model's alone, with the same weights there."""
    wide = folder / f"{family}_wide_adapter"
    _write_adapter(tiny_vision.model_alone(family), "CAUSAL_LM", wide)
    config = LoraConfig(**LORA | {"target_modules": OF_LANGUAGE_MODEL}, task_type="CAUSAL_LM")
    model = get_peft_model(tiny_vision.model_alone(family), config)
    set_adapter(model, wide)
    model.save_pretrained(folder / f"{family}_adapter")


def _write_rows(path: Path, made: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--fit":
        for one in FITTED:
            fit(one)
        raise SystemExit
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write(target)
