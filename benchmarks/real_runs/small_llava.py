"""LLaVAs with small random towers, and what they answer to pictures by transformers' own `generate`: a check that is not ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

Row = dict[str, Any]  # images, prompt, completion
UNUSED = "<empty_output>"
"""A special token that SmolLM2's tokenizer has for notebooks and its chats never hold: the placeholder of grafted models."""
PLAIN_CONTENT = "message['content'] + '<|im_end|>'"
ANSWER_TOKENS = 4
ROWS_ASKED = 256  # of one call of `generate`


# ---- building --------------------------------------------------------------------------------------------------------------


def with_images(template: str, mark: str) -> str:
    """SmolLM2's chat template, whose contents are texts only, for contents that may also be lists of texts and images."""
    if PLAIN_CONTENT not in template:
        raise ValueError(f"The chat template writes a message in another way than {PLAIN_CONTENT!r}: {template!r}")
    parts = (
        "{% macro written(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
        "{% if part.type == 'image' %}{{ '" + mark + "' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "{% endmacro %}"
    )
    return parts + template.replace(PLAIN_CONTENT, "written(message['content']) + '<|im_end|>'")


CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tower(width: int, layers: int, size: int, patch: int) -> dict[str, Any]:
    """Of CLIP. LLaVA takes the features before the last layer, so there is one more than is used."""
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 32}
    return shape | {
        "model_type": "clip_vision_model",
        "num_hidden_layers": layers + 1,
        "image_size": size,
        "patch_size": patch,
        "projection_dim": 16,
    }


def processor(
    words: Any, mark: str, template: str, vision: dict[str, Any], ground: float | None = None
) -> LlavaProcessor:
    """`ground`: brightness that becomes 0, where most of a picture is empty. None: CLIP's own means.

    Without torchvision, transformers has the image processor on Pillow under another name.
    """
    side = vision["image_size"]
    made = getattr(transformers, f"CLIPImageProcessor{'' if util.find_spec('torchvision') else 'Pil'}")
    scale = {} if ground is None else {"image_mean": [ground] * 3, "image_std": [0.3] * 3}
    return LlavaProcessor(
        made(size={"shortest_edge": side}, crop_size={"height": side, "width": side}, **scale),
        words,
        patch_size=vision["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=with_images(template, mark),
        image_token=mark,
    )


def eyed(text: Any, words: Any, mark: str, vision: dict[str, Any]) -> LlavaForConditionalGeneration:
    """A model whose language model has the weights of `text`."""
    config = LlavaConfig(
        vision_config=vision,
        text_config=text.config,
        image_token_id=words.convert_tokens_to_ids(mark),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    made = LlavaForConditionalGeneration(config)
    made.model.language_model.load_state_dict(text.model.state_dict())
    made.lm_head.load_state_dict(text.lm_head.state_dict())
    made.generation_config = text.generation_config
    return made


def saved(folder: Path, *parts: Any) -> str:
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


def grafted(model: str, vision: dict[str, Any], folder: Path, seed: int) -> str:
    """A pretrained language model that is given eyes."""
    torch.manual_seed(seed)
    words = AutoTokenizer.from_pretrained(model)
    text = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reader = processor(words, UNUSED, words.chat_template, vision)
    return saved(folder, eyed(text, words, UNUSED, vision), reader)


def words_of(texts: Iterable[str], mark: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that has every word of the texts as one token, and still writes anything else."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    )
    named = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": "<bos>"}
    special = {"im_start": "<|im_start|>", "image_token": mark}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, extra_special_tokens=special)


def from_scratch(
    texts: Iterable[str], width: int, layers: int, vision: dict[str, Any], ground: float, folder: Path, seed: int
) -> str:
    """Begins where it learns: weights of the size that the width asks for, empty cells that are 0, positions as large as contents.

    With CLIP's means, positions of 0.02 and a rate of 3e-3 a tiny one answered blindly for 1,250 steps of 64; so, and at 1e-3, it
    counted after 150. Which of the three matters was not tried.
    """
    torch.manual_seed(seed)
    words = words_of(texts, "<image>")
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=512,
        vocab_size=-(-len(words) // 64) * 64,  # as the trainer would make it
        tie_word_embeddings=True,
        initializer_range=0.5 * width**-0.5,
        **{f"{end}_token_id": getattr(words, f"{end}_token_id") for end in ("bos", "eos", "pad")},
    )
    made = eyed(transformers.LlamaForCausalLM(config), words, "<image>", vision)
    with torch.no_grad():
        made.model.vision_tower.get_parameter("embeddings.position_embedding.weight").mul_(10)
    return saved(folder, made, processor(words, "<image>", CHAT, vision, ground))


# ---- asking ----------------------------------------------------------------------------------------------------------------


def row(pictures: Sequence[Image.Image], question: str, answer: str, **columns: Any) -> Row:
    asked = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": question}]
    said = [{"role": "assistant", "content": answer}]
    return {"images": list(pictures), "prompt": [{"role": "user", "content": asked}], "completion": said, **columns}


def answer_of(given: Row) -> str:
    return given["completion"][0]["content"]


@torch.no_grad()
def are_right(model: Any, reader: Any, rows: Sequence[Row]) -> list[bool]:
    """Whether the most likely answer to each is the wanted one, word for word."""
    was_training, found = model.training, []
    model.eval()
    for start in range(0, len(rows), ROWS_ASKED):
        some = rows[start : start + ROWS_ASKED]
        texts = [reader.apply_chat_template(one["prompt"], add_generation_prompt=True) for one in some]
        pictures = [one["images"] for one in some]
        inputs = reader(text=texts, images=pictures, padding=True, padding_side="left", return_tensors="pt")
        inputs = inputs.to(model.device, model.dtype)  # pixels only: ids stay integers
        written = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        said = reader.tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        found += [text.strip() == answer_of(one) for text, one in zip(said, some)]
    model.train(was_training)
    return found


def share(found: Sequence[bool]) -> float:
    return round(sum(found) / len(found), 4)


@torch.no_grad()
def loss_on_text(model: Any, words: Any, text: str, window: int = 256) -> float:
    """Mean over the tokens of a plain text, in windows that know nothing of each other."""
    ids = words(text, return_tensors="pt")["input_ids"][0]
    windows = ids[: len(ids) // window * window].view(-1, window).to(model.device)
    was_training = model.training
    model.eval()
    losses = [float(model(input_ids=one[None], labels=one[None]).loss) for one in windows]
    model.train(was_training)
    return sum(losses) / len(losses)
