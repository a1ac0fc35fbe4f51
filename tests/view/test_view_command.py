"""`posttrain view` as a command: its start, its faults, the terminal summary and the reports."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from html.parser import HTMLParser

import pytest
from rich.console import Console

from posttrain.cli.main import main
from posttrain.trainer.checkpoints.step_file import StepFile
from posttrain.view.report import distinct_labels
from posttrain.view.run_folder import open_runs
from posttrain.view.summary import print_summary, sparkline

PYTHON = [sys.executable, "-m", "posttrain.cli.main", "view"]


def test_marks_of_an_axis_are_told_apart():
    assert distinct_labels([1.0, 2.0, 3.0]) == ["1", "2", "3"]
    assert distinct_labels([1.00001, 1.00002, 1.00003]) == ["1.00001", "1.00002", "1.00003"]
    assert distinct_labels([1.001e-5, 1.002e-5]) == ["1.001e-5", "1.002e-5"]


def test_it_starts_without_torch_pandas_or_transformers(run_folder):
    script = (
        "import sys; from posttrain.cli.main import main; main(['view', sys.argv[1], '--text']); "
        "sys.exit(', '.join({'torch', 'transformers', 'pandas', 'datasets', 'matplotlib'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(run_folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # duckdb complains when the process ends with a connection open


def test_the_address_is_printed_and_control_c_ends_it(run_folder):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*PYTHON, str(run_folder), "--no-browser"], **pipes) as process:
        assert process.stdout.readline() == "grpo-tiny\n"
        url = process.stdout.readline().strip()
        base, token = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/#token=([\w-]{32,})", url).groups()
        request = urllib.request.Request(f"{base}/api/runs", headers={"X-Posttrain-Token": token})
        assert json.load(urllib.request.urlopen(request, timeout=10))["runs"][0]["name"] == "grpo-tiny"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["{run}", "--data", "nowhere.jsonl"], "--data nowhere.jsonl: there is no such file"),
        (["{run}", "--tokenizer", "nowhere"], r"--tokenizer nowhere: no tokenizer\.json"),
        (["{run}", "--report", "{tmp}/report.pdf"], r"has to end in \.html or \.png"),
    ],
)
def test_faults_are_one_sentence(run_folder, tmp_path, capsys, words, sentence):
    assert main(["view", *(word.format(run=run_folder, tmp=tmp_path) for word in words)]) == 2
    told = capsys.readouterr().err
    assert re.search(sentence, told)
    assert told.startswith("posttrain view: ")
    assert told.count("\n") == 1


def test_a_port_that_is_taken(run_folder, capsys):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["view", str(run_folder), "--no-browser", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


# ---- the terminal --------------------------------------------------------------------------------------------------------


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 8, 8], 2) == ""
    assert sparkline([0.0, 0, 0, 0, 8, 8, 8, 8], 4) == "▁▁██"
    assert sparkline([3.0] * 5, 5) == "▁▁▁▁▁"


def summary_of(folder, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    print_summary(open_runs([str(folder)]), console)
    return console.export_text()


def test_the_summary_has_last_values_rewards_and_extremes(run_folder):
    text = summary_of(run_folder)
    last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert re.search(rf"reward +\S+ +{last['reward']:.4g} +[▁▂▃▄▅▆▇█]+", text)
    assert "480 rollouts" in text
    assert text.count("best  reward 1.2  step 6") == 3
    assert text.count("worst  reward 0") == 3
    assert "alert  step 3: entropy fell" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_summary_of_a_run_without_rollouts_and_of_one_without_anything(tmp_path):
    StepFile(tmp_path / "sft/metrics.jsonl").append(1, {"loss": 2.0, "grad_norm": None})
    text = summary_of(tmp_path / "sft")
    assert "loss" in text
    assert "rollouts" not in text
    (tmp_path / "new").mkdir()
    (tmp_path / "new/.posttrain.lock").touch()
    assert "Nothing has been logged yet." in summary_of(tmp_path / "new")


def test_what_models_say_commands_no_terminal(tmp_path):
    from posttrain.rollout.store import RolloutStore

    with RolloutStore(tmp_path) as store:
        store.write(1, [{"prompt": "?", "completion": "a\x1b[2Jb\x9bc[bold]d", "reward": 1.0, "group": 0, "sample": 0}])
    text = summary_of(tmp_path)
    assert "a�[2Jb�c[bold]d" in text


# ---- reports -------------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.loaded = [], []

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href")]


def test_the_html_report_stands_alone(run_folder, tmp_path):
    path = tmp_path / "deep/report.html"
    assert main(["view", str(run_folder), "--report", str(path)]) == 0
    tags = Tags()
    tags.feed(path.read_text())
    assert tags.loaded == []
    assert "script" not in tags.names
    assert tags.names.count("svg") >= 15
    assert tags.names.count("tr") == 11
    assert path.stat().st_size < 200_000


def test_what_models_say_is_no_markup(tmp_path):
    from posttrain.rollout.store import RolloutStore

    said = {
        "prompt": "<script>alert(1)</script>",
        "completion": "<img src=x onerror=alert(2)>",
        "reward": 1.0,
        "group": 0,
        "sample": 0,
    }
    with RolloutStore(tmp_path / "<b>run") as store:
        store.write(1, [said])
    main(["view", str(tmp_path / "<b>run"), "--report", str(tmp_path / "report.html")])
    text = (tmp_path / "report.html").read_text()
    assert "<script>" not in text
    assert "<img" not in text
    assert "<b>run" not in text


def test_the_picture(run_folder, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    assert main(["view", str(run_folder), "--report", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_do(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["view", str(run_folder), "--report", str(tmp_path / "report.png")]) == 2
    assert "pip install 'posttrain[view]'" in capsys.readouterr().err


def test_twenty_thousand_rollouts_are_indexed_quickly(tmp_path):
    """CPU seconds, because the machine of the tests may be busy; the browser test measures what a person waits."""
    from posttrain.view.rollout_index import RolloutIndex
    from tests.view.made_up import make_tokenizer, write_step

    records = write_step(tmp_path, make_tokenizer(tmp_path), 1, 250, prompts=10, samples=8)
    source = tmp_path / "rollouts/step=000001/process-0.parquet"
    assert len(records) == 80
    for step in range(2, 251):
        folder = tmp_path / f"rollouts/step={step:06d}"
        folder.mkdir()
        (folder / source.name).write_bytes(source.read_bytes())
    index, started = RolloutIndex(tmp_path), time.process_time()
    index.refresh(wait=None)
    assert len(index) == 20_000
    assert time.process_time() - started < 2.0  # 0.6 on the machine that this was written on
