"""`posttrain chat`: history and commands; one prompt through a pipe."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from jinja2 import TemplateError

from posttrain.cli.commands import chat as chatting
from posttrain.cli.commands.chat import Chat
from tests.cli.runs import folder_with_inputs, posttrain


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
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
