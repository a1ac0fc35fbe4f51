"""The built-in formats, the checks of templates, the parser, TRL's helpers and the cloning of a template."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import posttrain
from posttrain import SFTConfig, SFTTrainer
from posttrain.data import trl_helpers
from posttrain.data.render.renderer import Conversation, Renderer, RenderError
from posttrain.data.render.templates import BUILT_IN_FORMATS, detect_chat_format, use_chat_format
from posttrain.models.load.model import model_type_of
from posttrain.models.load.vocabulary import clone_chat_template
from tests import tiny
from tests.data.chat_cases import CALL, REAL_FAMILIES, SHAPES, SYSTEM, TOOLS, call, said, template_text, thought, user
from tests.data.tiny_tokenizers import KINDS, _wrapped, byte_level_without_control_tokens, tokenizer_for

DIALOGUE = [SYSTEM, user("One?"), said("First."), user("Two?")]

EXPECTED_PROMPTS = {
    "chatml": "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    "<|im_start|>assistant\nFirst.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n",
    "alpaca": "You are brief.\n\n### Instruction:\nOne?\n\n### Response:\nFirst.</s>\n\n### Instruction:\nTwo?\n\n### Response:\n",
    "llama2": "<s>[INST] <<SYS>>\nYou are brief.\n<</SYS>>\n\nOne? [/INST] First. </s><s>[INST] Two? [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nYou are brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nFirst.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] You are brief.\n\nOne?[/INST] First.</s>[INST] Two?[/INST]",
    "zephyr": "<|system|>\nYou are brief.</s>\n<|user|>\nOne?</s>\n<|assistant|>\nFirst.</s>\n<|user|>\nTwo?</s>\n<|assistant|>\n",
    "gemma": "<s><start_of_turn>user\nYou are brief.\n\nOne?<end_of_turn>\n<start_of_turn>model\nFirst.<end_of_turn>\n"
    "<start_of_turn>user\nTwo?<end_of_turn>\n<start_of_turn>model\n",
    "phi3": "<|system|>\nYou are brief.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\nFirst.<|end|>\n<|user|>\nTwo?<|end|>\n"
    "<|assistant|>\n",
    "vicuna": "<s>You are brief. USER: One? ASSISTANT: First.</s>USER: Two? ASSISTANT:",
    "deepseek": "<s>You are brief.<｜User｜>One?<｜Assistant｜>First.</s><｜User｜>Two?<｜Assistant｜>",
}


def built_in(name: str) -> Renderer:
    return Renderer(tokenizer_for(BUILT_IN_FORMATS[name].template))


@pytest.mark.parametrize("name", BUILT_IN_FORMATS)
def test_built_in_format_renders_a_dialogue(name: str):
    assert built_in(name).render(Conversation(DIALOGUE), add_generation_prompt=True) == EXPECTED_PROMPTS[name]


@pytest.mark.parametrize("name", BUILT_IN_FORMATS)
def test_built_in_format_works_without_bos_and_with_every_tokenizer(name: str):
    for tokenizer_kind in KINDS:
        tokenizer = KINDS[tokenizer_kind]()
        tokenizer.bos_token = None
        needs = use_chat_format(tokenizer, name)
        text = Renderer(tokenizer).render(Conversation([user("One?"), said("First.")]))
        assert "None" not in text
        assert f"First.{' ' if name == 'llama2' else ''}{needs.stop_token}" in text
        if BUILT_IN_FORMATS[name].needs_bos:
            assert any("BOS" in note for note in needs.notes)


@pytest.mark.parametrize("name", [n for n in BUILT_IN_FORMATS if n not in ("chatml", "llama3", "mistral", "deepseek")])
def test_formats_without_tools_say_so(name: str):
    with pytest.raises(RenderError, match="format has no tools"):
        built_in(name).render(SHAPES["tool call, result, answer"])
    with pytest.raises(RenderError, match="format has no tool calls"):
        built_in(name).render(Conversation([user("Weather?"), CALL]))


@pytest.mark.parametrize("name", BUILT_IN_FORMATS)
def test_built_in_formats_refuse_unknown_roles_and_blocks(name: str):
    with pytest.raises(RenderError, match="has no role critic here"):
        built_in(name).render(Conversation([user("a"), {"role": "critic", "content": "b"}]))
    with pytest.raises(RenderError, match="a block of another kind"):
        built_in(name).render(Conversation([user([{"type": "image", "url": "x"}])]))


def test_tools_of_the_formats_that_have_them():
    chat = SHAPES["tool call, result, answer"]
    signature = json.dumps(TOOLS[0])
    assert built_in("chatml").render(chat).startswith("<|im_start|>system\nYou may call these functions.")
    assert (
        built_in("llama3").render(chat).count("<|start_header_id|>ipython<|end_header_id|>\n\n22 degrees<|eot_id|>")
        == 1
    )
    assert f"[AVAILABLE_TOOLS] [{signature}][/AVAILABLE_TOOLS][INST] Weather?[/INST]" in built_in("mistral").render(
        chat
    )
    assert '[TOOL_RESULTS] {"content": "22 degrees", "call_id": "call00001"}[/TOOL_RESULTS]' in built_in(
        "mistral"
    ).render(chat)
    both = "".join(f"<｜tool▁output▁begin｜>{degrees}<｜tool▁output▁end｜>" for degrees in (22, 18))
    outputs = f"<｜tool▁outputs▁begin｜>{both}<｜tool▁outputs▁end｜>"
    assert f"{outputs}Paris is warmer.</s>" in built_in("deepseek").render(SHAPES["parallel tool calls"])
    for name in ("chatml", "llama3", "mistral", "deepseek"):
        assert signature in built_in(name).render(chat)
        assert trl_helpers.supports_tool_calling(built_in(name).tokenizer)


def test_use_chat_format_says_what_the_tokenizer_lacks():
    tokenizer = KINDS["metaspace"]()
    needs = use_chat_format(tokenizer, "llama3")
    assert needs.stop_token == "<|eot_id|>"
    assert set(needs.missing_tokens) == {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
    assert len(needs.notes) == 2
    assert use_chat_format(KINDS["many_reserved"](), "alpaca").missing_tokens == ()
    with pytest.raises(ValueError, match="no chat format 'chatgpt'; the built-in ones are chatml, alpaca"):
        use_chat_format(tokenizer, "chatgpt")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="closes turns with the EOS token"):
        use_chat_format(tokenizer, "zephyr")


@pytest.mark.parametrize("name", BUILT_IN_FORMATS)
def test_a_format_whose_tokens_are_spelled_still_trains_its_end_of_turn(name: str):
    tokenizer = KINDS["byte_level"]()
    stop = use_chat_format(tokenizer, name).stop_token
    renderer = Renderer(tokenizer)
    chat = Conversation([user("One?"), said("First."), user("Two?"), said("Second.")])
    (sample,) = renderer.encode_chats([chat], "assistant")
    gap = " " if name == "llama2" else ""
    texts = tokenizer.decode(sample.input_ids[sample.trained]).replace(" First", "First").replace(" Second", "Second")
    assert texts == f"First.{gap}{stop}Second.{gap}{stop}"


# ---------------------------------------------------------------------------------------------------------- parsing

TOOL_TEMPLATES = [
    "qwen2_5",
    "qwen3",
    "qwen3_6",
    "llama3_1",
    "llama3_2",
    "gemma4_v5",
    "glm4moe",
    "deepseekv3",
    "gptoss",
    "lfm2_v2",
    "nemotron_3_nano",
]
TOOL_FORMATS = ("chatml", "llama3", "mistral", "deepseek")


def tool_renderer(name: str) -> Renderer:
    return built_in(name) if name in BUILT_IN_FORMATS else Renderer(tokenizer_for(template_text(name)))


def trained_part(renderer: Renderer, *messages: dict) -> list[int]:
    (sample,) = renderer.encode_chats([Conversation([user("Go."), *messages], TOOLS)], "assistant")
    if isinstance(sample, RenderError):
        raise sample
    return sample.input_ids[sample.trained].tolist()


def without_ids(calls: list[dict]) -> list[dict]:
    return [{"type": "function", "function": made["function"]} for made in calls]


@pytest.mark.parametrize("name", [*TOOL_TEMPLATES, *TOOL_FORMATS])
def test_what_is_rendered_is_parsed_back(name: str):
    renderer = tool_renderer(name)
    data = {"days": 3, "flags": [1, 2], "really": True}
    if name != "gemma4_v5":  # which writes objects without quotes around their keys
        data["nested"] = {"a": [None, "b"]}
    one = [call("get_weather", 1, place='São "Paulo", it\'s (x)', **data)]
    parsed = renderer.parse(trained_part(renderer, said("", tool_calls=one)))
    assert parsed == {"role": "assistant", "content": "", "tool_calls": without_ids(one)}
    answer = renderer.parse(trained_part(renderer, said("Just words, {no} call.")))
    assert answer == {"role": "assistant", "content": "Just words, {no} call."} or name in ("llama2", "mistral")
    try:
        two = [call("get_weather", 1, place="Paris"), call("get_time", 2, zone="a, b")]
        parsed = renderer.parse(trained_part(renderer, said("", tool_calls=two)))
    except RenderError:
        assert name in ("llama3_1", "llama3_2", "llama3", "gptoss")
    else:
        assert parsed["tool_calls"] == without_ids(two)


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_6", "glm4moe", "gptoss", "gemma4_v5", "nemotron_3_nano", "chatml", "deepseek"]
)
def test_reasoning_is_parsed_back(name: str):
    renderer = tool_renderer(name)
    parsed = renderer.parse(trained_part(renderer, thought("Two and two.\nYes.", "It is 4.")))
    assert parsed == {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two.\nYes."}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": </tool_call>',
        "<tool_call>\n[1, 2]\n</tool_call>",
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        "<tool_call>",
        "Plain words.",
    ],
)
def test_malformed_calls_stay_plain_content(text: str):
    renderer = built_in("chatml")
    ids = renderer.tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
    assert renderer.parse(ids) == {"role": "assistant", "content": text}


def test_a_call_without_arguments_and_text_before_it():
    renderer = built_in("chatml")
    text = 'I look.\n<tool_call>{"name":"now"}</tool_call><|im_end|>\n'
    parsed = renderer.parse(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])
    made = {"type": "function", "function": {"name": "now", "arguments": {}}}
    assert parsed == {"role": "assistant", "content": "I look.", "tool_calls": [made]}


def test_parse_response_types_arguments_by_schema_and_knows_the_end_of_the_prompt():
    tokenizer = tool_renderer("qwen3_6").tokenizer
    arguments = "<parameter=place>\n75001\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    text = f"<tool_call>\n<function=get_weather>\n{arguments}</function>\n</tool_call><|im_end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    untyped = trl_helpers.parse_response(tokenizer, ids)["tool_calls"][0]["function"]["arguments"]
    typed = trl_helpers.parse_response(tokenizer, ids, tools=TOOLS)["tool_calls"][0]["function"]["arguments"]
    assert (untyped, typed) == ({"place": 75001, "days": 3}, {"place": "75001", "days": 3})
    chatml = built_in("chatml").tokenizer
    ids = chatml("Hm.\n</think>\n\nYes.<|im_end|>", add_special_tokens=False)["input_ids"]
    assert trl_helpers.parse_response(chatml, ids)["content"] == "Hm.\n</think>\n\nYes."
    parsed = trl_helpers.parse_response(chatml, ids, prefix="<|im_start|>assistant\n<think>\n")
    assert parsed == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


# ---------------------------------------------------------------------------------------------------- TRL's helpers


def test_every_helper_is_importable_from_the_top():
    for name in [
        "add_response_schema",
        "apply_chat_template",
        "clone_chat_template",
        "get_training_chat_template",
        "has_generation_markers",
        "is_chat_template_prefix_preserving",
        "is_chat_template_stop_token_trained",
        "maybe_apply_chat_template",
        "parse_response",
        "supports_tool_calling",
    ]:
        assert callable(getattr(posttrain, name))


def test_apply_chat_template_on_each_set_of_columns():
    tokenizer = built_in("zephyr").tokenizer
    question, good, bad = [user("One?")], [said("First.")], [said("Last.")]
    prompt = "<|user|>\nOne?</s>\n<|assistant|>\n"
    apply = trl_helpers.apply_chat_template
    assert apply({"messages": question + good}, tokenizer) == {"text": f"{prompt}First.</s>\n"}
    assert apply({"prompt": question}, tokenizer) == {"prompt": prompt}
    completion = {"prompt": prompt, "completion": "First.</s>\n"}
    assert apply({"prompt": question, "completion": good}, tokenizer) == completion
    labelled = {"prompt": question, "completion": good, "label": True, "other": 1}
    assert apply(labelled, tokenizer) == {**completion, "label": True}
    pair = {"prompt": question, "chosen": good, "rejected": bad}
    assert apply(pair, tokenizer) == {"prompt": prompt, "chosen": "First.</s>\n", "rejected": "Last.</s>\n"}
    implicit = {"chosen": question + good, "rejected": question + bad}
    assert apply(implicit, tokenizer) == {"chosen": f"{prompt}First.</s>\n", "rejected": f"{prompt}Last.</s>\n"}
    continued = {"prompt": [*question, said("Well, ")], "completion": [said("first.")]}
    assert apply(continued, tokenizer) == {"prompt": f"{prompt}Well, ", "completion": "first.</s>\n"}
    with pytest.raises(KeyError, match=r"columns \['completion'\]"):
        apply({"completion": good}, tokenizer)
    with pytest.raises(ValueError, match="not of 'system'"):
        apply({"prompt": [SYSTEM]}, tokenizer)


def test_the_prompt_is_cut_to_what_its_completions_share():
    """DeepSeek's generation prompt opens a thought that rendered turns do not have."""
    tokenizer = tokenizer_for(template_text("deepseekv3"))
    row = {"prompt": [user("One?")], "chosen": [said("First.")], "rejected": [said("Last.")]}
    texts = trl_helpers.apply_chat_template(row, tokenizer)
    assert texts["prompt"] == "<s><｜User｜>One?<｜Assistant｜>"
    assert texts["chosen"] == "First.<｜end▁of▁sentence｜>"


def test_tools_and_template_arguments_reach_the_template():
    qwen = tokenizer_for(template_text("qwen3"))
    row = {"prompt": [user("Hi")], "chat_template_kwargs": {"enable_thinking": False}}
    assert trl_helpers.apply_chat_template(row, qwen)["prompt"].endswith("<think>\n\n</think>\n\n")
    assert "get_weather" in trl_helpers.apply_chat_template({"prompt": [user("Hi")]}, qwen, tools=TOOLS)["prompt"]


def test_maybe_apply_chat_template_leaves_plain_rows_alone():
    tokenizer = built_in("chatml").tokenizer
    row = {"prompt": "One?", "completion": " First."}
    assert trl_helpers.maybe_apply_chat_template(row, tokenizer) is row
    assert trl_helpers.maybe_apply_chat_template({"messages": [user("a")]}, tokenizer)["text"].startswith(
        "<|im_start|>user\na"
    )


def test_facts_about_real_templates():
    tokenizers = {name: tokenizer_for(template_text(name)) for name in REAL_FAMILIES}
    takes_tools = {name for name, tokenizer in tokenizers.items() if trl_helpers.supports_tool_calling(tokenizer)}
    assert takes_tools == {
        "qwen2_5", "qwen3", "qwen3_6", "llama3_1", "llama3_2", "gemma4_v5", "glm4moe", "gptoss", "lfm2_v2", "nemotron_3_nano",
    }  # fmt: skip
    grows = {
        name for name, tokenizer in tokenizers.items() if trl_helpers.is_chat_template_prefix_preserving(tokenizer)
    }
    assert {"qwen2_5", "llama3", "gemma", "glm4moe", "cohere"} <= grows
    assert not {"qwen3", "phi3", "deepseekv3", "gptoss"} & grows
    untrained = {
        n for n, tokenizer in tokenizers.items() if not trl_helpers.is_chat_template_stop_token_trained(tokenizer)
    }
    assert untrained == {"glm4moe"}
    for name, tokenizer in tokenizers.items():
        assert trl_helpers.get_training_chat_template(tokenizer) is None
        assert not trl_helpers.has_generation_markers(tokenizer), name
    assert trl_helpers.has_generation_markers("{%- generation -%}{{ x }}{% endgeneration %}")


def test_get_training_chat_template_raises_where_no_mask_can_be_had():
    tokenizer = tokenizer_for("{% for m in messages %}<|im_start|>{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ValueError, match="No mask of what the assistant says can be had"):
        trl_helpers.get_training_chat_template(tokenizer)


def test_the_renderer_of_a_tokenizer_follows_its_template():
    tokenizer = built_in("chatml").tokenizer
    row = {"messages": [user("a")]}
    assert "im_start" in trl_helpers.apply_chat_template(row, tokenizer)["text"]
    use_chat_format(tokenizer, "vicuna")
    assert "USER: a" in trl_helpers.apply_chat_template(row, tokenizer)["text"]


def test_add_response_schema_checks_that_there_is_something_to_parse():
    tokenizer = built_in("chatml").tokenizer
    assert trl_helpers.add_response_schema(tokenizer) is tokenizer
    with pytest.raises(ValueError, match="writes no tool calls"):
        trl_helpers.add_response_schema(built_in("zephyr").tokenizer)


def test_generation_markers_of_a_template_agree_with_provenance():
    """A template that marks the assistant's words itself gives the same mask as the marks, on ChatML written twice."""
    marked = template_text("smollm2").replace(
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
        "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
        "{% endif %}{{ '\n' }}",
    )
    tokenizer = tokenizer_for(marked)
    messages = SHAPES["three turns"].messages
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    (ours,) = Renderer(tokenizer).encode_chats([Conversation(messages)], "assistant")
    assert ours.input_ids.tolist() == theirs["input_ids"]
    assert ours.trained.astype(int).tolist() == theirs["assistant_masks"]


# ----------------------------------------------------------------------------------------------------------- cloning


def test_clone_chat_template(tmp_path):
    source = KINDS["with_plain_added_tokens"]()
    use_chat_format(source, "chatml")
    source.eos_token = "<|im_end|>"
    source.save_pretrained(tmp_path)
    tokenizer = KINDS["metaspace"]()
    size = len(tokenizer)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    before = model.get_input_embeddings().weight[:size].detach().clone()
    model, tokenizer, added = clone_chat_template(model, tokenizer, str(tmp_path))
    assert tokenizer.chat_template == source.chat_template
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    rows = model.get_input_embeddings().num_embeddings
    assert rows % 64 == 0
    assert rows == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert added == list(range(size, rows))
    assert torch.equal(model.get_input_embeddings().weight[:size], before)
    assert "<extra_id_0>" in tokenizer.get_vocab()
    assert not tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids("<think>")].special
    (sample,) = Renderer(tokenizer).encode_chats([Conversation([user("Hi"), said("Hello.")])], "assistant")
    assert sample.input_ids[sample.trained][-1] == tokenizer.eos_token_id
    again, tokenizer, added_again = clone_chat_template(model, tokenizer, str(tmp_path))
    assert added_again == []
    assert again.get_input_embeddings().num_embeddings == rows


def test_a_source_without_a_template_is_refused(tmp_path):
    KINDS["byte_level"]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template to clone"):
        clone_chat_template(None, KINDS["metaspace"](), str(tmp_path))


# ---- tokenizers without a template ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specials", "model_type", "wanted", "why"),
    [
        (["<|im_start|>", "<|im_end|>"], "llama", "chatml", "<|im_start|>, <|im_end|>"),
        (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "llama", "llama3", "<|eot_id|>"),
        (["<start_of_turn>", "<end_of_turn>"], "gemma3_text", "gemma", "<start_of_turn>, <end_of_turn>"),
        (["<|system|>", "<|user|>", "<|assistant|>"], "stablelm", "zephyr", "<|system|>, <|user|>, <|assistant|>"),
        (["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], "phi3", "phi3", "<|end|>"),
        (["[INST]", "[/INST]"], "mistral", "mistral", "[INST], [/INST]"),
        (["<｜User｜>", "<｜Assistant｜>"], "llama", "deepseek", "<｜User｜>, <｜Assistant｜>"),
        ([], "mistral", "mistral", "the model is of type mistral"),
        ([], "llama", "llama2", "the model is of type llama"),
        ([], "gpt2", "chatml", "neither its control tokens nor the model's type"),
        ([], None, "chatml", "neither its control tokens nor the model's type"),
    ],
)
def test_the_format_is_told_by_control_tokens_then_by_the_model(specials, model_type, wanted, why):
    tokenizer = _wrapped(byte_level_without_control_tokens(), specials, eos_token="</s>", bos_token="<s>")
    name, reason = detect_chat_format(tokenizer, model_type)
    assert name == wanted
    assert why in reason


def test_conversations_without_a_template_are_rendered_in_the_format_that_is_announced(tmp_path, capsys):
    """It was an error on every row. Plain rows of the same tokenizer are left without a template."""
    tokenizer = tiny.tokenizer(None)
    options = SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", dataset_cache_dir=str(tmp_path / "cache")
    )
    made = SFTTrainer.without_model(tiny.causal_lm(), options, tokenizer)
    made._prepared(Dataset.from_list([{"text": "plain"}]), "train")
    assert tokenizer.chat_template is None
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    prepared = made._prepared(Dataset.from_list([{"messages": messages}]), "train")
    ((sample,),) = list(prepared)
    assert (
        tokenizer.decode(sample.input_ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
    )
    told = capsys.readouterr().out
    assert "the built-in format chatml is used: its vocabulary has <|im_start|>, <|im_end|> (another one" in told


def test_the_type_of_a_model_is_read_from_its_config(tmp_path):
    tiny.config("llama").save_pretrained(tmp_path)
    assert model_type_of(str(tmp_path), None) == "llama"
    assert model_type_of(tiny.causal_lm(), None) == "qwen2"
    assert model_type_of(str(tmp_path / "nowhere"), None) is None
