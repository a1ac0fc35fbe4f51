"""Secrets are found by name and by look, at any depth; what only sounds like one is left alone."""

from __future__ import annotations

import os

import pytest

from posttrain import SFTConfig
from posttrain.core.secrets import HIDDEN, hidden_text, named_secret, private_opener, published, without_secrets

FAKE = "Zx81" * 6


@pytest.mark.parametrize(
    "name",
    ["hub_token", "token", "HF-TOKEN", "hfToken", "mytoken", "openaiKey", "x-api-key", "JUDGE_KEY", "db.password", "clientSecret",
     "slack_webhook", "Authorization", "sentry_dsn", "credentials", "aws_secret_access_key", "pat", "session_cookie"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert without_secrets({"deep": [{name: FAKE}]}) == {"deep": [{name: HIDDEN}]}


@pytest.mark.parametrize(
    ("name", "value"),
    [("eos_token", "</s>"), ("pad_token", "x"), ("think_token", "<think>"), ("text_key", "text"), ("auth", "none"),
     ("max_tokens_per_pass", 4096), ("vllm_server_token_file", "a/b"), ("tokenizer_name_or_path", "me/model2"), ("token", None),
     ("monkey", "a monkey"), ("use_token", True), ("compass", "north-1234"), ("hub_token", "")],
)  # fmt: skip
def test_other_names_are_left_alone(name, value):
    assert not named_secret(name, value)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"see hf_{FAKE}, please", f"see {HIDDEN}, please"),
        (f"sk-proj-{FAKE}", HIDDEN),
        (f"ghp_{FAKE}", HIDDEN),
        (f"github_pat_{FAKE}", HIDDEN),
        ("AKIAIOSFODNN7EXAMPLE", HIDDEN),
        ("xoxb-123456789012-abcdef", HIDDEN),
        (f"Bearer {FAKE}", f"Bearer {HIDDEN}"),
        (f"eyJhbGciOiJI.eyJzdWIiOiIx.{FAKE}", HIDDEN),
        ("postgres://me:pw@host:5432/db", f"postgres://{HIDDEN}@host:5432/db"),
        ("https://hooks.slack.com/services/T00/B00/xyz", f"https://hooks.slack.com/{HIDDEN}"),
        ("https://discord.com/api/webhooks/123/abc", f"https://discord.com/api/webhooks/{HIDDEN}"),
        ("https://judge.example/score?api_key=1234&n=2", f"https://judge.example/score?api_key={HIDDEN}&n=2"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY-----", HIDDEN),
    ],
)
def test_looks_of_secrets(text, left):
    assert hidden_text(text) == left


@pytest.mark.parametrize(
    "text",
    ["hf_transfer", "sk-learn", "https://huggingface.co/a/b", "Qwen/Qwen3-0.6B", "a bearer of news", "basic needs", "me@home",
     "0123456789abcdef0123456789abcdef01234567"],
)  # fmt: skip
def test_other_texts_are_left_alone(text):
    assert hidden_text(text) == text


def test_values_of_the_environment_and_of_named_secrets_are_found_in_other_texts(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "odd-looking thing")
    tree = {"run_name": "with odd-looking thing", "kwargs": {"token": "named.thing"}, "note": ["say named.thing!"]}
    assert without_secrets(tree) == {
        "run_name": f"with {HIDDEN}", "kwargs": {"token": HIDDEN}, "note": [f"say {HIDDEN}!"]
    }  # fmt: skip


def test_all_below_a_name_of_secrets_is_hidden_and_numbers_of_passwords_too():
    told = without_secrets({"credentials": {"path": "x", "user": "me"}, "password": 1234, "tokens": [1, 2], "keys": 5})
    assert told == {"credentials": {"path": HIDDEN, "user": HIDDEN}, "password": HIDDEN, "tokens": [1, 2], "keys": 5}


def test_published_values_have_digests_of_local_paths():
    told = published(
        {"a": "/home/me/my models/x.jinja", "b": "json:/home/me/rows.jsonl", "c": "https://a.b/c/d", "d": "/think"}
    )
    assert told["a"].startswith("x.jinja (at ")
    assert told["b"].startswith("json:rows.jsonl (at ")
    assert (told["c"], told["d"]) == ("https://a.b/c/d", "/think")
    assert published(told) == told
    assert published("/home/me/a/x")[:6] == "x (at " != published("/home/me/b/x")


def test_a_config_shows_no_secret(tmp_path):
    args = SFTConfig(
        output_dir=str(tmp_path), hub_token="plain-odd", model_init_kwargs={"token": FAKE}, eos_token="</s>"
    )
    for told in (repr(args), str(args), args.to_json_string()):
        assert "plain-odd" not in told
        assert FAKE not in told
        assert "</s>" in told
    assert args.model_init_kwargs == {"token": FAKE}


def test_a_private_file_is_private_also_where_others_could_read_it_before(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    with open(path, "w", opener=private_opener) as file:
        file.write("new")
    assert (path.read_text(), os.stat(path).st_mode & 0o777) == ("new", 0o600)
