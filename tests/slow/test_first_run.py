"""docs/first-run.md, command by command in a shell, in an empty folder with an empty home, with the real 135M model.

`tests/docs` runs the page too, in a fork and with a tiny model in the place of the real one. Here nothing is stood in for but the
Hub, whose cache holds the model that `posttrain demo` makes. `make wheel` runs it with the commands of an environment that has the
wheel and nothing else (POSTTRAIN_BIN names its folder of commands).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.cli.commands import demo
from tests.docs.fenced_blocks import ROOT, blocks_of
from tests.docs.local_hub import REVISION

pytestmark = pytest.mark.trust
PAGE = ROOT / "docs" / "first-run.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SECONDS = 300


def hub_with(model: str, home: Path) -> None:
    """As `huggingface_hub` leaves a download behind."""
    repository = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for file in Path(model).iterdir():
        (snapshot / file.name).symlink_to(file.resolve())


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory):
    """(folder, environment, what each command printed) after all commands of the page."""
    folder, home = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("home")
    hub_with(demo.real_model(), home)
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    installed = os.environ.get("POSTTRAIN_BIN")
    environment = {
        "PATH": f"{installed or Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(home), "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "2" if installed else "1",  # the other core has tests of its own
        **({} if installed else {"PYTHONPATH": str(ROOT)}),
    }  # fmt: skip
    printed: dict[str, list[str]] = {}
    for block in blocks_of(PAGE):
        if block.language == "yaml":
            (folder / block.code.splitlines()[0][2:]).write_text(block.code, encoding="utf-8")
        for line in block.code.splitlines() if block.language == "bash" else ():
            ended = subprocess.run(
                line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
                check=False,
            )  # fmt: skip
            said = ended.stdout + ended.stderr
            assert ended.returncode == 0, f"`{line}` ended with {ended.returncode}:\n{said[-3000:]}"
            printed.setdefault(line, []).append(said)
    return folder, printed


def test_the_run_is_trained_and_done(newcomer):
    folder, printed = newcomer
    logged = [json.loads(line) for line in (folder / "runs/first/metrics.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in logged if "loss" in entry]
    assert len(losses) == 6  # the second call has found nothing left to do
    assert losses[-1] < losses[0]
    first, again = printed["posttrain sft first.yaml"]
    assert "step 6/6" in first
    assert "from step 6" in again
    assert "step 1/6" not in again


def test_what_was_looked_at_is_there(newcomer):
    folder, printed = newcomer
    assert "24 rows" in printed["posttrain check first.yaml --samples 1"][0]
    for run in ("first", "first-grpo"):
        logged = [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]
        loss = [entry["loss"] for entry in logged if "loss" in entry][-1]
        summary = printed[f"posttrain view runs/{run} --text"][0]
        (line,) = [line for line in summary.splitlines() if line.startswith("loss ")]
        assert float(line.split()[2]) == pytest.approx(loss, rel=0.05, abs=1e-9)
    judged = next(said for line, said in printed.items() if line.startswith("posttrain eval"))[0]
    assert "8 prompts, 16 answers" in judged


def test_the_export_is_a_model_that_says_what_it_learned(newcomer):
    folder, _ = newcomer
    merged = folder / "runs/first-merged"
    tokenizer, model = AutoTokenizer.from_pretrained(merged), AutoModelForCausalLM.from_pretrained(merged)
    base = AutoModelForCausalLM.from_pretrained(demo.real_model())
    rows = [json.loads(line) for line in (folder / "examples/data/chats.jsonl").read_text().splitlines()]

    def nll(one: torch.nn.Module) -> float:
        ids = [tokenizer.apply_chat_template(row["messages"], return_dict=False, return_tensors="pt") for row in rows]
        with torch.no_grad():
            return sum(float(one(input_ids=row, labels=row).loss) for row in ids) / len(ids)

    assert nll(model) < nll(base) - 0.01
