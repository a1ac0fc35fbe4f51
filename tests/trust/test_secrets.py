"""Secrets are planted in runs from the command line that push checkpoints, and looked for in all that leaves or stays."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from posttrain.trainer.checkpoints.checkpoint import verify
from posttrain.view import api
from posttrain.view.api import Viewed
from posttrain.view.questions import Question
from posttrain.view.run_folder import open_runs
from posttrain.view.summary import print_summary
from tests.cli.runs import folder_with_inputs, options_of
from tests.forked import run_command
from tests.trainer.test_hub import ROOT, StandIn, running_stand_in

PLANTED = {
    "hub token": "Odd.Hub-Token/93",
    "token of the model": "hf_" + "PlantedInTheKwargs" * 2,
    "password of a proxy": "pr0xyPassw0rd",
    "webhook": "B0PLANTED/w3bh00kPath",
    "API key": "sk-proj-" + "Planted9Key" * 3,
    "key with an unusual name": "zq.unusual.84421",
    "HF_TOKEN": "token-of-the-environment-77",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
}
HOME = "home-of-planted-user"
"""A folder above everything local; its name may not be pushed."""


def options(method: str, home: Path) -> dict:
    asked = {
        **options_of(method), "model_name_or_path": str(home / "model"), "dataset_name": str(home / f"{method}.jsonl"),
        "output_dir": str(home / "out"), "save_strategy": "steps", "save_steps": 1, "push_to_hub": True,
        "hub_model_id": "team/planted", "hub_strategy": "checkpoint", "hub_always_push": True, "hub_token": PLANTED["hub token"],
        "model_init_kwargs": {
            "token": PLANTED["token of the model"], "cache_dir": str(home / "cache"),
            "proxies": {"https": f"http://me:{PLANTED['password of a proxy']}@proxy:8080"},
        },
        "chat_template_kwargs": {
            "alarm": f"https://hooks.slack.com/services/{PLANTED['webhook']}", "judge": PLANTED["API key"],
            "zzKey": PLANTED["key with an unusual name"], "note": f"as {PLANTED['HF_TOKEN']}",
        },
    }  # fmt: skip
    return asked | ({"use_peft": True, "log_completions": True} if method == "grpo" else {})


def ran(words: list[str], home: Path, hub: StandIn) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    environment |= {
        "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home / "hf"), "HF_DATASETS_CACHE": str(home / "cache"),
        "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_TOKEN": PLANTED["HF_TOKEN"],
        "WANDB_API_KEY": PLANTED["WANDB_API_KEY"],
    }  # fmt: skip
    done = run_command(*words, cwd=home, environment=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["sft", "grpo"])
def planted(request, tmp_path_factory) -> SimpleNamespace:
    method = request.param
    home = folder_with_inputs(tmp_path_factory.mktemp(method) / HOME)
    file = home.parent / "asked.yaml"
    file.write_text(yaml.safe_dump(options(method, home)))
    with running_stand_in() as hub:
        output = ran([method, str(file), "--run_name", f"{PLANTED['API key']}"], home, hub)
    return SimpleNamespace(method=method, home=home, file=file, hub=hub, output=output)


def files_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(folder)), path.read_bytes()


def found(places: Iterator[tuple[str, bytes]], more: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(place, secret) for every secret that stands somewhere."""
    wanted = {**PLANTED, **{text: text for text in more}}
    return [(place, name) for place, content in places for name, secret in wanted.items() if secret.encode() in content]


def test_nothing_uploaded_holds_a_secret_or_a_local_path(planted):
    sent = []
    for method, path, headers, body in planted.hub.requests:
        others = {name: value for name, value in headers.items() if name.lower() != "authorization"}
        sent += [(f"{method} {path}", path.encode() + str(others).encode() + body)]
    sent += [
        (f"{repo}/{name}", content) for repo, files in planted.hub.files.items() for name, content in files.items()
    ]
    assert len(sent) > 30
    assert found(iter(sent), more=(HOME, str(planted.home))) == []


def test_only_the_model_and_what_resumes_it_is_uploaded(planted):
    names = set(planted.hub.files["team/planted"])
    kind = "adapter_{}" if planted.method == "grpo" else "{}"
    model = {kind.format("config.json"), kind.format("model.safetensors")}
    assert {"README.md", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *model} <= names
    at_the_top = {name for name in names if "/" not in name}
    assert at_the_top <= model | {
        "README.md", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
    }  # fmt: skip
    assert {name.split("/")[0] for name in names if "/" in name} == {"last-checkpoint"}
    assert "last-checkpoint/training_args.json" not in names


def test_nothing_printed_or_saved_holds_a_secret(planted):
    assert len(planted.output) > 500
    assert found(iter([("output", planted.output.encode())])) == []
    saved = list(files_below(planted.home))
    assert {"out/posttrain.yaml", "out/run.json", "out/checkpoint-2/training_args.json"} <= {name for name, _ in saved}
    assert found(iter(saved)) == []


def test_files_that_may_hold_one_are_for_their_owner_only(planted):
    out = planted.home / "out"
    names = ["posttrain.yaml", "run.json", "prepared_data.json", "training_args.json"]
    names += [f"checkpoint-2/{name}" for name in ("training_args.json", "run_state.json", "trainer_state.json")]
    assert {name: stat.S_IMODE((out / name).stat().st_mode) for name in names} == dict.fromkeys(names, 0o600)
    assert stat.S_IMODE((out / "tokenizer.json").stat().st_mode) & 0o044  # a model is for whoever may read the folder


def test_the_record_says_what_it_leaves_out_and_keeps_the_rest(planted):
    text = (planted.home / "out" / "posttrain.yaml").read_text()
    assert "# model_init_kwargs.token was given and is left out, because it holds a secret: give it again." in text
    told = yaml.safe_load(text)
    assert told["model_init_kwargs"] == {"cache_dir": str(planted.home / "cache"), "proxies": {}}
    assert "hub_token" not in told
    assert told["max_steps"] == 2


def test_views_of_the_run_show_none(planted, capsys):
    viewed = Viewed(open_runs([str(planted.home / "out")]))
    print_summary(viewed.runs)
    shown = json.dumps(api.info(viewed, Question({"run": "0"}))) + capsys.readouterr().out
    assert "model_init_kwargs" in shown
    assert found(iter([("view", shown.encode())])) == []


def test_commands_before_a_run_print_none(planted):
    for command in ("explain", "check"):
        with running_stand_in() as hub:
            output = ran([command, planted.method, str(planted.file)], planted.home, hub)
        assert len(output) > 200
        assert found(iter([(command, output.encode())])) == []


def test_a_pushed_checkpoint_resumes(planted):
    """Under another token: who pushes does not decide what is trained."""
    pushed = planted.home.parent / "downloaded"
    for name, content in planted.hub.files["team/planted"].items():
        if name.startswith("last-checkpoint/"):
            path = pushed / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    verify(pushed / "last-checkpoint")
    resumed = ["--resume_from_checkpoint", str(pushed / "last-checkpoint"), "--output_dir", str(planted.home / "again")]
    kwargs = options(planted.method, planted.home)["model_init_kwargs"] | {"token": "hf_" + "AnotherOfTheSameUser" * 2}
    words = [
        *resumed,
        "--max_steps",
        "3",
        "--no_push_to_hub",
        "--hub_token",
        "another",
        "--model_init_kwargs",
        json.dumps(kwargs),
    ]
    with running_stand_in() as hub:
        ran([planted.method, str(planted.file), *words], planted.home, hub)
    lines = (planted.home / "again" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)] == [3]
