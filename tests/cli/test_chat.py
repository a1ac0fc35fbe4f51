"""`posttrain chat`: history and commands; one prompt through a pipe; images that are shown."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from jinja2 import TemplateError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationMixin,
)

from posttrain.cli.commands import chat as chatting
from posttrain.cli.commands.chat import Chat
from posttrain.cli.running.loaded_model import OpenedModel
from tests.cli.runs import folder_with_inputs, posttrain
from tests.tiny_vision import images, vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with_inputs(tmp_path_factory.mktemp("chat"))


def test_history_and_commands():
    seen, out = [], io.StringIO()

    def say(messages):
        seen.append([(message["role"], message["content"]) for message in messages])
        return f"answer {len(seen)}"

    chat = Chat(say, "Be brief.", out)
    assert chat.handle("one")
    assert chat.handle("two")
    assert seen[1] == [("system", "Be brief."), ("user", "one"), ("assistant", "answer 1"), ("user", "two")]
    assert chat.handle("/reset")
    chat.handle("three")
    assert seen[2] == [("system", "Be brief."), ("user", "three")]
    chat.handle("/system Be long.")
    chat.handle("four")
    assert seen[3] == [("system", "Be long."), ("user", "four")]
    chat.handle("/system")
    chat.handle("/etc/passwd is a file")
    assert seen[4] == [("user", "/etc/passwd is a file")]
    assert chat.handle("/rest")
    assert "There is no command /rest" in out.getvalue()
    assert len(seen) == 5
    assert not chat.handle("/quit")


def test_what_cannot_be_answered_is_not_remembered():
    def say(messages):
        raise ValueError("too long")

    chat = Chat(say, None, io.StringIO())
    assert chat.handle("hello")
    assert chat.messages == []
    assert "too long" in chat.out.getvalue()


def piped(monkeypatch, capsys, folder, text, *words):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = posttrain("chat", str(folder / "model"), "--max-new-tokens", "6", *words)
    return code, capsys.readouterr()


def test_one_prompt_through_a_pipe_is_answered_as_by_generate(folder, monkeypatch, capsys):
    code, told = piped(monkeypatch, capsys, folder, "What is 3?\n", "--temperature", "0", "--system", "Count.")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "What is 3?"}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    said = model.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert code == 0
    assert told.out.strip() == tokenizer.decode(said, skip_special_tokens=True).strip()


def test_the_same_seed_says_the_same(folder, monkeypatch, capsys):
    words = ["--temperature", "1.0", "--seed"]
    first, again, other = (piped(monkeypatch, capsys, folder, "Hi", *words, seed)[1].out for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(
    ("text", "words", "wanted"),
    [
        ("", [], "empty"),
        ("a", ["--temperature", "-1"], "--temperature"),
        ("a", ["--adapter", "nowhere"], "adapter_config"),
        ("a", ["--device", "gpu0"], "'gpu0'"),
    ],
)
def test_words_that_cannot_be(folder, monkeypatch, capsys, text, words, wanted):
    code, told = piped(monkeypatch, capsys, folder, text, *words)
    assert code == 2
    assert wanted in told.err


def test_a_conversation_that_is_too_long_says_so(folder, monkeypatch, capsys):
    code, told = piped(monkeypatch, capsys, folder, "a" * 600)
    assert (code, told.out) == (1, "")
    assert "the model reads 512" in told.err


def test_a_template_that_refuses_is_heard_and_a_piped_command_is_a_prompt(folder, monkeypatch, capsys):
    def refuse(self, messages):
        raise TemplateError(f"no {messages[-1]['content']}")

    monkeypatch.setattr(chatting.Responder, "respond", refuse)
    code, told = piped(monkeypatch, capsys, folder, "/reset")
    assert (code, told.out) == (1, "")
    assert "no /reset" in told.err


def test_in_a_terminal_it_goes_on_until_quit(monkeypatch, capsys):
    lines = iter(["hello", "", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    heard = []
    assert chatting.converse(Chat(lambda messages: heard.append(len(messages)) or "x"), "model") == 0
    assert heard == [1]


# ---- images ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm", "gemma3", "llava_next"])
def seeing(request, tmp_path_factory):
    """A folder with `model`, which sees, and the pictures 0.png and 1.png."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny = vision_model(request.param)
    tiny.model.save_pretrained(folder / "model")
    tiny.processor.save_pretrained(folder / "model")
    for number, picture in enumerate(images((60, 40), (50, 90))):
        picture.save(folder / f"{number}.png")
    return folder


def processed(folder, messages, pictures):
    """What transformers' own processor makes of a conversation."""
    processor = AutoProcessor.from_pretrained(folder / "model")
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    return processor(text=[text], images=[pictures], return_tensors="pt")


def same(given, wanted):
    return all(torch.equal(given[name], tensor) for name, tensor in wanted.items())


def png():
    written = io.BytesIO()
    images((40, 40))[0].save(written, "PNG")
    return written.getvalue()


def asked_with(number, text):
    return {"role": "user", "content": [*[{"type": "image"}] * number, {"type": "text", "text": text}]}


@pytest.mark.parametrize("number", [1, 2])
def test_images_are_shown_with_the_first_message_as_by_generate(seeing, monkeypatch, capsys, number):
    words = [word for name in range(number) for word in ("--image", str(seeing / f"{name}.png"))]
    original, given = GenerationMixin.generate, {}

    def generate(self, **options):
        given.update(options)
        return original(self, **options)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    code, told = piped(monkeypatch, capsys, seeing, "What is it?", "--temperature", "0", *words)
    assert (code, told.err) == (0, "")
    wanted = processed(seeing, [asked_with(number, "What is it?")], images((60, 40), (50, 90))[:number])
    assert same(given, wanted)
    model = AutoModelForImageTextToText.from_pretrained(seeing / "model")
    said = original(model, **wanted, max_new_tokens=6, do_sample=False)[0, wanted["input_ids"].shape[1] :]
    assert (
        told.out.strip()
        == AutoTokenizer.from_pretrained(seeing / "model").decode(said, skip_special_tokens=True).strip()
    )


def test_a_conversation_remembers_its_images_and_is_shown_another(seeing, monkeypatch, capsys):
    lines = iter(["One?", f"/image {seeing / '1.png'}", "Two?", "/image nowhere.png", "/reset", "Three?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked = []

    class Keeping(chatting.Responder):
        def respond(self, messages):
            asked.append(self._prompt(messages))
            return "It is one."

    monkeypatch.setattr(chatting, "Responder", Keeping)
    assert posttrain("chat", str(seeing / "model"), "--image", str(seeing / "0.png")) == 0
    told = capsys.readouterr().out
    assert "1.png is shown with your next message." in told
    assert "nowhere.png cannot be opened (No such file or directory)." in told
    first, second = images((60, 40), (50, 90))
    turns = [asked_with(1, "One?"), {"role": "assistant", "content": [{"type": "text", "text": "It is one."}]}]
    assert same(asked[1], processed(seeing, [*turns, asked_with(1, "Two?")], [first, second]))
    assert same(asked[2], processed(seeing, [asked_with(1, "Three?")], [first]))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [(None, "cannot be opened"), (b"", "is empty"), (b"not a picture", "0.png"), (png()[:-200], "0.png")],
)
def test_a_bad_image_is_refused_before_the_model_is_loaded(folder, tmp_path, monkeypatch, capsys, content, wanted):
    monkeypatch.setattr(OpenedModel, "load", None)
    if content is not None:
        (tmp_path / "0.png").write_bytes(content)
    code, told = piped(monkeypatch, capsys, folder, "What?", "--image", str(tmp_path / "0.png"))
    assert (code, told.out) == (2, "")
    assert wanted in told.err


def test_a_model_that_cannot_be_shown_images_is_not_loaded(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(OpenedModel, "load", None)
    images((40, 40))[0].save(tmp_path / "0.png")
    words = ("What?", "--image", str(tmp_path / "0.png"))
    code, told = piped(monkeypatch, capsys, folder, *words)
    assert (code, "reads texts only" in told.err) == (2, True)
    tiny = vision_model("llava")
    tiny.model.save_pretrained(tmp_path / "model")
    tiny.processor.tokenizer.save_pretrained(tmp_path / "model")
    code, told = piped(monkeypatch, capsys, tmp_path, *words)
    assert (code, "has no processor (no processor_config.json)" in told.err) == (2, True)


def test_a_chat_without_images_says_how_they_are_shown():
    chat = Chat(lambda messages: "x", None, io.StringIO())
    assert chat.handle("/image 0.png")
    assert "start the chat with --image FILE" in chat.out.getvalue()


@pytest.mark.slow
def test_through_a_real_pipe(folder):
    command = [
        sys.executable,
        "-m",
        "posttrain.cli.main",
        "chat",
        str(folder / "model"),
        "--max-new-tokens",
        "4",
        "--seed",
        "0",
    ]
    done = subprocess.run(command, input="What is 3?", capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
