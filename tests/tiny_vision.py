"""Small real vision-language models: ten families with random weights and processors built offline, and images to show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import made_once
from tests.torchvision_on_cpu import make_importable

make_importable()

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
WIDE = {"hidden_size": 128, "intermediate_size": 128}
"""Of `TEXT`, where kernels want heads of at least 32 numbers, as vLLM's for the CPU do: see `widened`."""
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PILLOW = ("llava", "llava_next", "gemma3", "idefics3", "paligemma")  # built without torchvision
FAMILIES = (*QWEN, *PILLOW, "smolvlm", "internvl")
TOWERS = {"llava_siglip": ({"model_type": "siglip_vision_model"}, 0), "llava_dinov2": ({"model_type": "dinov2"}, 1)}
"""LLaVA with another tower than CLIP's -> its config, and tokens before those of its patches."""
SIZES = ((60, 40), (30, 90), (50, 50))  # height, width


Recipe = tuple[Any, Any, Callable[[], Any], str]  # class of the model, config, how to build the processor, mark


@dataclass(frozen=True)
class TinyVision:
    """A model, its processor and what the family's own template writes for an image."""

    model: Any
    processor: Any
    mark: str

    def logits(self, *pictures: Image.Image) -> torch.Tensor:
        """(tokens, vocabulary) of one conversation that shows them, by transformers' own path."""
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": "What is it?"}]
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = self.processor(text=[text], images=[list(pictures)], return_tensors="pt")
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        inputs.pop("labels", None)
        with torch.no_grad():
            return self.model(**inputs).logits[0]


def images(*sizes: tuple[int, int], seed: int = 0) -> list[Image.Image]:
    """Noise of these (height, width): no two alike, and none of one colour."""
    random = np.random.default_rng(seed)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def needs_torchvision(family: str) -> None:
    """Skip the test at hand where the family's processor cannot be built."""
    if family not in PILLOW and util.find_spec("torchvision") is None:
        pytest.skip(f"The processor of {family} cannot be built without torchvision, which is not installed here.")
    if family == "smolvlm" and util.find_spec("num2words") is None:
        pytest.skip("The processor of smolvlm cannot be built without num2words, which is not installed here.")


@contextmanager
def widened() -> Iterator[None]:
    """Models that are built inside have language models of `WIDE`."""
    narrow = dict(TEXT)
    TEXT.update(WIDE)
    try:
        yield
    finally:
        TEXT.update(narrow)


def tokenizer(merges: Sequence[tuple[str, str]] = (), **named: str) -> PreTrainedTokenizerFast:
    """One token per byte and per merge, and named control tokens, which processors read as attributes."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        bos_token="<bos>",
        extra_special_tokens={"im_start": "<|im_start|>", **named},
    )


def template(mark: str) -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}{{ '" + mark + "' }}{% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def vision_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **image_options: Any) -> TinyVision:
    """Model and processor of the family; `image_options` are options of its image processor's constructor."""
    needs_torchvision(family)
    _, _, processor, mark = BUILDERS[family](family, image_options)
    return TinyVision(_seeing_model(family, seed, dtype, image_options, dict(TEXT)), processor(), mark)


@made_once
def _seeing_model(
    family: str, seed: int, dtype: torch.dtype, image_options: dict[str, Any], text: dict[str, Any]
) -> Any:
    """`text`: the shape of its language model, which `widened` changes."""
    _, _, processor, mark = BUILDERS[family](family, image_options)
    tiny = TinyVision(model_alone(family, seed, dtype), processor(), mark)
    refuse_blind(tiny)
    return tiny.model


def model_alone(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model without its processor: needs no torchvision."""
    torch.manual_seed(seed)
    model_class, config, _, _ = BUILDERS[family](family, {})
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():  # at the default initialisation images hardly move the logits
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        if family == "gemma3":  # starts at zero: the model would be blind
            weight = model.model.multi_modal_projector.mm_input_projection_weight
            weight.copy_(0.2 * torch.randn(weight.shape))  # the same numbers in every precision
    return model


def refuse_blind(tiny: TinyVision) -> None:
    """No test may run on a model that does not see its images: another image must move the logits, and so must a swap."""
    first, second, other = images((60, 60), (60, 60), (60, 60))
    shown = tiny.logits(first, second)
    for name, logits in (("another image", tiny.logits(other, second)), ("a swap", tiny.logits(second, first))):
        moved = (logits - shown).abs().max().item()
        assert moved > 0.1, f"{name} moves the logits of this {type(tiny.model).__name__} by {moved:.2g} only"


def tiny_processor(family: str, **image_options: Any) -> Any:
    """The processor alone."""
    needs_torchvision(family)
    return BUILDERS[family](family, image_options)[2]()


def _head() -> int:
    return TEXT["hidden_size"] // TEXT["num_attention_heads"]


def _text(tok: Any, **changes: Any) -> dict[str, Any]:
    ends = {"pad_token_id": tok.pad_token_id, "eos_token_id": tok.eos_token_id, "bos_token_id": tok.bos_token_id}
    return {**TEXT, "vocab_size": len(tok), **ends, **changes}


def _sections(*parts: int) -> list[int]:
    """Of rotary frequencies for time, rows and columns: all of half a head, in these proportions."""
    return [part * _head() // (2 * sum(parts)) for part in parts]


def _qwen(family: str, options: dict[str, Any]) -> Recipe:
    import transformers

    tok = tokenizer(
        vision_start="<|vision_start|>",
        vision_end="<|vision_end|>",
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    tower: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": _sections(1, 1, 2), "rope_theta": 1e4}
    pixels, text, videos = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}, {}, "Qwen2VLVideoProcessor"
    if family == "qwen2_vl":
        tower |= {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": TEXT["hidden_size"]}
    else:
        tower |= {"intermediate_size": 64, "out_hidden_size": TEXT["hidden_size"]}
    if family == "qwen2_5_vl":
        tower |= {"fullatt_block_indexes": [1], "window_size": 56}
    if family == "qwen3_vl":
        tower |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        rope |= {"mrope_section": _sections(2, 1, 1), "mrope_interleaved": True}
        pixels = {"min_pixels": 64 * 64, "max_pixels": 128 * 128, "patch_size": 16}
        text, videos = {"head_dim": _head()}, "Qwen3VLVideoProcessor"
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(tok, rope_parameters=rope, **text),
        vision_config=tower,
        **{
            f"{key}_token_id": tok.convert_tokens_to_ids(f"<|{word}|>")
            for key, word in (
                ("image", "image_pad"),
                ("video", "video_pad"),
                ("vision_start", "vision_start"),
                ("vision_end", "vision_end"),
            )
        },
    )
    mark = "<|vision_start|><|image_pad|><|vision_end|>"

    def processor() -> Any:
        return getattr(transformers, f"{name}Processor")(
            transformers.Qwen2VLImageProcessor(**{**pixels, **options}),
            tok,
            getattr(transformers, videos)(),
            template(mark),
        )

    return getattr(transformers, f"{name}ForConditionalGeneration"), config, processor, mark


def _llava(family: str, options: dict[str, Any]) -> Recipe:
    import transformers

    tok = tokenizer(image_token="<image>")
    name = "LlavaNext" if family == "llava_next" else "Llava"
    points = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]} if family == "llava_next" else {}
    own, first_tokens = TOWERS.get(family, ({"model_type": "clip_vision_model", "projection_dim": 16}, 1))
    selected = {"vision_feature_select_strategy": "default" if first_tokens else "full"}
    tower = TOWER | {"num_hidden_layers": 3, "image_size": 28, "patch_size": 14}
    config = getattr(transformers, f"{name}Config")(
        vision_config=tower | own,
        text_config=_text(tok, model_type="llama"),
        image_token_id=tok.image_token_id,
        vision_feature_layer=-2,
        **selected,
        **points,
    )

    def processor() -> Any:
        return getattr(transformers, f"{name}Processor")(
            _image_class("LlavaNext" if family == "llava_next" else "CLIP")(
                **{"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}, **points, **options}
            ),
            tok,
            patch_size=14,
            **selected,
            num_additional_image_tokens=first_tokens,
            chat_template=template("<image>"),
        )

    return getattr(transformers, f"{name}ForConditionalGeneration"), config, processor, "<image>"


def _gemma3(family: str, options: dict[str, Any]) -> Recipe:
    import transformers

    tok = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    layers = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(
        text_config=_text(tok, head_dim=_head(), sliding_window=16, query_pre_attn_scalar=_head(), layer_types=layers),
        vision_config=TOWER | {"image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_index=tok.image_token_id,
        boi_token_index=tok.boi_token_id,
        eoi_token_index=tok.eoi_token_id,
    )

    def processor() -> Any:
        return transformers.Gemma3Processor(
            _image_class("Gemma3")(**{"size": {"height": 56, "width": 56}, **options}),
            tok,
            image_seq_length=4,
            chat_template=template("<start_of_image>"),
        )

    return transformers.Gemma3ForConditionalGeneration, config, processor, "<start_of_image>"


def _idefics(family: str, options: dict[str, Any]) -> Recipe:
    import transformers

    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
    tiles = {f"row_{r}_col_{c}": f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)}
    tok = tokenizer(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
        video_token="<video>",
        **tiles,
    )
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(tok, model_type="llama", vocab_size=len(tok) + 8),
        vision_config=TOWER | {"image_size": 56, "patch_size": 14},
        image_token_id=tok.image_token_id,
        scale_factor=2,
        pad_token_id=tok.pad_token_id,
    )
    videos = (lambda: {"video_processor": transformers.SmolVLMVideoProcessor()}) if family == "smolvlm" else dict
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}

    def processor() -> Any:
        return getattr(transformers, f"{name}Processor")(
            _image_class(name)(**{**sizes, **options}),
            tok,
            image_seq_len=4,
            chat_template=template("<image>"),
            **videos(),
        )

    return getattr(transformers, f"{name}ForConditionalGeneration"), config, processor, "<image>"


def _internvl(family: str, options: dict[str, Any]) -> Recipe:
    import transformers

    tok = tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    config = transformers.InternVLConfig(
        text_config=_text(tok, model_type="qwen2"),
        vision_config=TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tok.context_image_token_id,
        image_seq_length=4,
        downsample_ratio=0.5,
    )

    def processor() -> Any:
        return transformers.InternVLProcessor(
            transformers.GotOcr2ImageProcessor(**{"size": {"height": 56, "width": 56}, "max_patches": 4, **options}),
            tok,
            transformers.InternVLVideoProcessor(),
            image_seq_length=4,
            chat_template=template("<IMG_CONTEXT>"),
        )

    return transformers.InternVLForConditionalGeneration, config, processor, "<IMG_CONTEXT>"


def _paligemma(family: str, options: dict[str, Any]) -> Recipe:
    import transformers

    tok = tokenizer(image_token="<image>")
    config = transformers.PaliGemmaConfig(
        text_config=_text(tok, model_type="gemma", head_dim=_head(), vocab_size=len(tok) + 1152),
        vision_config=TOWER
        | {
            "model_type": "siglip_vision_model",
            "image_size": 56,
            "patch_size": 14,
            "projection_dim": TEXT["hidden_size"],
        },
        image_token_index=tok.image_token_id,
        projection_dim=TEXT["hidden_size"],
        hidden_size=TEXT["hidden_size"],
    )

    def processor() -> Any:
        image_processor = _image_class("Siglip")(**{"size": {"height": 56, "width": 56}, **options})
        image_processor.image_seq_length = 16
        return transformers.PaliGemmaProcessor(image_processor, tok, chat_template=template("<image>"))

    return transformers.PaliGemmaForConditionalGeneration, config, processor, "<image>"


def _image_class(name: str) -> Any:
    """Its class: the one on torchvision where that is installed, as transformers chooses, else the one on Pillow."""
    import transformers

    return getattr(transformers, f"{name}ImageProcessor{'' if util.find_spec('torchvision') else 'Pil'}")


BUILDERS = {
    **dict.fromkeys(QWEN, _qwen),
    **dict.fromkeys(("llava", "llava_next", *TOWERS), _llava),
    **dict.fromkeys(("idefics3", "smolvlm"), _idefics),
    "gemma3": _gemma3,
    "internvl": _internvl,
    "paligemma": _paligemma,
}
