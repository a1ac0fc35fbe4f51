"""`posttrain export`: what is written is the model that was trained, or nothing is written."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
)

from posttrain import SFTConfig, SFTTrainer
from posttrain.cli.errors import UsageError
from posttrain.cli.running.loaded_model import open_model
from posttrain.exporting import export as exporting
from posttrain.exporting import gguf_file
from tests import tiny
from tests.cli.runs import posttrain

PROBE = torch.arange(40, 90)[None]
LAYER_WEIGHT = "model.layers.1.mlp.up_proj.weight"


def bpe_tokenizer():
    """Byte-level BPE with merges, as a GGUF file needs them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|im_end|>", "<|im_start|>"]
    )
    backend.train_from_iterator([f"What is {i}? It is {i}." for i in range(50)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")
    made.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    return made


def saved_lora(folder, base, scale=0.05, **options):
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, scale)
    adapted.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / request.param
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320}
    tiny.causal_lm(family=request.param, **shape).save_pretrained(folder)
    bpe_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(base, tmp_path_factory):
    return saved_lora(tmp_path_factory.mktemp("lora") / "run", base)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=PROBE).logits.log_softmax(-1)


def trained(lora, base):
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora))


def test_merged_loads_in_transformers_and_is_the_trained_model(base, lora, tmp_path, capsys):
    before = (base / "model.safetensors").read_bytes()
    assert posttrain("export", str(lora), "--to", "merged", "--output", str(tmp_path / "m")) == 0
    assert "verified" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    torch.testing.assert_close(logits(merged), trained(lora, base), rtol=0, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.chat_template == bpe_tokenizer().chat_template
    assert tokenizer("What is 3?")["input_ids"] == AutoTokenizer.from_pretrained(lora)("What is 3?")["input_ids"]
    ends = json.loads((tmp_path / "m" / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.eos_token_id in ends
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_merged_in_another_dtype(lora, tmp_path, dtype):
    assert posttrain("export", str(lora), "--to", "merged", "--dtype", dtype, "--output", str(tmp_path / "m")) == 0
    assert {t.dtype for t in load_file(tmp_path / "m" / "model.safetensors").values()} == {getattr(torch, dtype)}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").dtype == getattr(torch, dtype)


def test_adapter_loads_in_peft_and_is_the_trained_model(base, lora, tmp_path):
    assert posttrain("export", str(lora), "--to", "adapter", "--output", str(tmp_path / "a")) == 0
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    torch.testing.assert_close(trained(tmp_path / "a", base), trained(lora, base), rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "apart"), [("float32", 1e-5), ("float16", 0.01), ("bfloat16", 0.1), ("q8_0", 0.2)])
def test_gguf_loads_in_transformers_and_is_the_trained_model(base, lora, tmp_path, kind, apart):
    assert posttrain("export", str(lora), "--to", "gguf", "--dtype", kind, "--output", str(tmp_path / "g")) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "g", gguf_file=f"model-{kind}.gguf", dtype=torch.float32)
    torch.testing.assert_close(logits(loaded), trained(lora, base), rtol=0, atol=apart)
    reader = gguf_file.the_package().GGUFReader(tmp_path / "g" / f"model-{kind}.gguf")
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    vocabulary = bpe_tokenizer().get_vocab()
    assert tokens[: len(vocabulary)] == sorted(vocabulary, key=vocabulary.get)
    assert len(tokens) == 320
    assert reader.fields["tokenizer.chat_template"].contents() == bpe_tokenizer().chat_template
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["blk.0.ffn_up.weight"] == gguf_file.TYPE_NAMES[kind]
    assert types["blk.0.attn_norm.weight"] == "F32"


def test_a_run_and_its_checkpoints(base, tmp_path, capsys):
    """Whole models; the default output; a checkpoint by number."""
    run = tmp_path / "run"
    for step in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            model.lm_head.weight.mul_(1 + step / 10)
        model.save_pretrained(run / f"checkpoint-{step}")
        AutoTokenizer.from_pretrained(base).save_pretrained(run / f"checkpoint-{step}")
    assert posttrain("export", str(run), "--to", "merged") == 0
    assert posttrain("export", str(run), "--to", "merged", "--checkpoint", "1") == 0
    for name, step in (("run-merged", 2), ("run-1-merged", 1)):
        exported, source = (
            load_file(path / "model.safetensors") for path in (tmp_path / name, run / f"checkpoint-{step}")
        )
        assert all((exported[key] == source[key]).all() for key in source)
    assert posttrain("export", str(run), "--to", "merged", "--checkpoint", "3") == 2
    assert "it has 1, 2" in capsys.readouterr().err


def test_a_reward_model_with_an_adapter(tmp_path):
    tiny.reward_model().save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_(0, 0.5)
    adapted.save_pretrained(tmp_path / "run")
    tiny.tokenizer().save_pretrained(tmp_path / "run")
    assert posttrain("export", str(tmp_path / "run"), "--to", "merged") == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run-merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=PROBE).logits, adapted.eval()(input_ids=PROBE).logits)


# ---- refusals --------------------------------------------------------------------------------------------------------------

LAYER = "model.layers.1.self_attn.v_proj"


def one_adapter_skipped(base):
    original = exporting.exported_weights

    def skipping(model, dtype=None):
        plain = load_file(base / "model.safetensors")
        for name, tensor in original(model, dtype):
            yield name, plain[name].to(dtype) if name == f"{LAYER}.weight" else tensor

    return skipping


def one_tensor_scaled(base):
    original = exporting.exported_weights

    def scaling(model, dtype=None):
        for name, tensor in original(model, dtype):
            yield name, tensor * 1.02 if name == "model.layers.1.input_layernorm.weight" else tensor

    return scaling


@pytest.mark.parametrize(
    ("fault", "named"), [(one_adapter_skipped, LAYER), (one_tensor_scaled, "model.layers.1.input_layernorm")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_merge_is_refused_and_nothing_is_left(base, lora, tmp_path, monkeypatch, capsys, fault, named, dtype):
    monkeypatch.setattr(exporting, "exported_weights", fault(base))
    assert posttrain("export", str(lora), "--to", "merged", "--dtype", dtype, "--output", str(tmp_path / "m")) == 1
    told = capsys.readouterr().err
    assert f"{named} is the first layer whose outputs differ" in told
    assert "the bound on the average is" in told
    assert list(tmp_path.iterdir()) == []


def test_a_changed_file_is_refused(lora, tmp_path, monkeypatch, capsys):
    original = exporting.write_weights

    def changing(folder, weights, **options):
        sums = original(folder, weights, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][3] += 1e-6
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return sums

    monkeypatch.setattr(exporting, "write_weights", changing)
    assert posttrain("export", str(lora), "--to", "merged", "--output", str(tmp_path / "m")) == 1
    assert "does not hold the numbers of model.norm.weight" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_with_heads_in_the_wrong_order_is_refused(base, lora, tmp_path, monkeypatch, capsys):
    if base.name != "llama":
        pytest.skip("only Llama's heads are in another order")
    monkeypatch.setitem(gguf_file.FAMILIES, "llama", gguf_file.Family("llama", gguf_file._as_it_is))
    assert posttrain("export", str(lora), "--to", "gguf", "--output", str(tmp_path / "g")) == 1
    assert "q_proj is the first layer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_is_loaded_as_another_is_refused(base, lora, tmp_path, capsys):
    """transformers makes a Qwen2 tokenizer, with its own way to cut text, of any that stands beside a Qwen2 config."""
    if base.name != "qwen2":
        pytest.skip("only beside a Qwen2 config")
    shutil.copytree(lora, tmp_path / "run")
    bpe_tokenizer().save_pretrained(tmp_path / "run")
    assert posttrain("export", str(tmp_path / "run"), "--to", "merged") == 1
    assert "into other tokens than that of the run" in capsys.readouterr().err
    assert not (tmp_path / "run-merged").exists()


def test_a_bound_of_ones_own(lora, tmp_path, capsys):
    words = [
        "export",
        str(lora),
        "--to",
        "merged",
        "--dtype",
        "bfloat16",
        "--output",
        str(tmp_path / "m"),
        "--bound",
        "1e-9",
    ]
    assert posttrain(*words) == 1
    assert "the bound on the average is 1e-09" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["nowhere/at/all", "--to", "merged"], ["nowhere/at/all"]),
        (["{base}", "--to", "adapter"], ["no adapter"]),
        (["{base}", "--to", "exl2"], ["exl2", "merged"]),
        (["{base}"], ["--to"]),
        (["{lora}", "--to", "merged", "--dtype", "q8_0"], ["q8_0", "bfloat16"]),
        (["{lora}", "--to", "merged", "--output", "{base}"], ["exists already", "--output"]),
    ],
)
def test_words_that_cannot_be(base, lora, capsys, words, wanted):
    assert posttrain("export", *[word.format(base=base, lora=lora) for word in words]) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in wanted), told


def test_an_adapter_of_a_quantised_base_is_not_merged(lora, tmp_path, capsys):
    shutil.copytree(lora, tmp_path / "run")
    (tmp_path / "run" / "posttrain.yaml").write_text("method: sft\nload_in_4bit: true\n")
    assert posttrain("export", str(tmp_path / "run"), "--to", "merged") == 2
    assert "load_in_4bit" in capsys.readouterr().err
    assert posttrain("export", str(tmp_path / "run"), "--to", "adapter") == 0


def quantised_run(base, folder, bits):
    """SFT of an adapter on a base in 4 or 8 bits."""
    packed = {4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 8: {"load_in_8bit": True}}[bits]
    args = SFTConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=8, learning_rate=1e-2, report_to="none", use_cpu=True,
        verbosity="quiet", save_strategy="no",
    )  # fmt: skip
    trainer = SFTTrainer(
        str(base),
        args,
        train_dataset=Dataset.from_list(tiny.chats(24)),
        quantization_config=BitsAndBytesConfig(**packed),
        peft_config=LoraConfig(r=4),
    )
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.mark.parametrize("bits", [4, 8])
def test_a_run_on_a_quantised_base_is_opened_as_it_was_trained(base, tmp_path, bits, monkeypatch):
    """By `chat` and `eval`; with a dtype, on the whole base."""
    trained = logits(quantised_run(base, tmp_path / "run", bits).model)

    def opened(dtype):
        named = argparse.Namespace(model=str(tmp_path / "run"), dtype=dtype, device="cpu", trust_remote_code=False)
        return open_model(named).load()

    torch.testing.assert_close(logits(opened(None)), trained, rtol=0, atol=1e-5)
    whole = opened("float32")
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    assert (logits(whole) - trained).abs().max() > 1e-3
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs bitsandbytes"):
        opened(None)


@pytest.mark.parametrize("to", ["merged", "gguf"])
def test_an_adapter_of_a_4_bit_base_is_merged_onto_the_dequantised_one(base, tmp_path, to):
    trainer = quantised_run(base, tmp_path / "run", 4)
    ours = logits(trainer.model)
    words = ["export", str(tmp_path / "run"), "--to", to, "--dtype", "float32", "--output", str(tmp_path / "out")]
    assert posttrain(*words) == 0
    if to == "gguf":
        return  # verified by the export itself
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), ours, atol=1e-4, rtol=1e-4)
    onto_plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    assert (logits(onto_plain) - ours).abs().mean() > 10 * (logits(merged) - ours).abs().mean()


def test_a_merge_onto_other_weights_than_the_dequantised_ones_is_refused(base, tmp_path, monkeypatch, capsys):
    quantised_run(base, tmp_path / "run", 4)
    plain = dict(AutoModelForCausalLM.from_pretrained(base).state_dict())
    written = exporting.exported_weights

    def onto_plain(model, dtype=None):
        for name, tensor in written(model, dtype):
            yield name, plain[name] if name == LAYER_WEIGHT else tensor

    monkeypatch.setattr(exporting, "exported_weights", onto_plain)
    assert posttrain("export", str(tmp_path / "run"), "--to", "merged", "--dtype", "float32") == 1
    assert LAYER_WEIGHT.removesuffix(".weight") in capsys.readouterr().err


def test_an_adapter_of_an_8_bit_base_is_not_merged(base, tmp_path, capsys):
    quantised_run(base, tmp_path / "run", 8)
    assert posttrain("export", str(tmp_path / "run"), "--to", "merged") == 2
    assert "whose products round their inputs as well" in capsys.readouterr().err
    assert posttrain("export", str(tmp_path / "run"), "--to", "adapter") == 0


def test_families_and_tokenizers_that_gguf_does_not_know(tmp_path, capsys):
    tiny.causal_lm(family="qwen3_moe").save_pretrained(tmp_path / "moe")
    tiny.tokenizer().save_pretrained(tmp_path / "moe")
    assert posttrain("export", str(tmp_path / "moe"), "--to", "gguf") == 2
    assert "'qwen3_moe'" in capsys.readouterr().err
    tiny.causal_lm(family="llama").save_pretrained(tmp_path / "llama")
    tiny.tokenizer().save_pretrained(tmp_path / "llama")  # no merges
    assert posttrain("export", str(tmp_path / "llama"), "--to", "gguf") == 2
    assert "byte-level BPE" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_adapter_that_moves_less_than_rounding_does_is_missed_all_the_same(
    base, tmp_path, monkeypatch, capsys, dtype
):
    lora = saved_lora(tmp_path / "run", base, scale=2e-4)
    words = ["export", str(lora), "--to", "merged", "--dtype", dtype, "--output"]
    assert posttrain(*words, str(tmp_path / "good")) == 0
    monkeypatch.setattr(exporting, "exported_weights", one_adapter_skipped(base))
    assert posttrain(*words, str(tmp_path / "bad")) == 1
    assert f"{LAYER} is the first layer whose outputs differ, its adapter is in them to" in capsys.readouterr().err
