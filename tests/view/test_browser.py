"""The page in a real browser, on 20,000 rollouts: what a person does with it, how long it takes, and who is asked meanwhile.

POSTTRAIN_WRITE_SCREENSHOTS=1 writes the pictures of docs/view.md anew; else they are taken and thrown away.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from posttrain.trainer.checkpoints.step_file import StepFile
from tests.trainer.resumable_run import checksum
from tests.trainer.test_online import trainer as online_trainer
from tests.trainer.vision_runs import PICTURES as PICTURES_SHOWN
from tests.trainer.vision_runs import chats, trainer_of
from tests.view.chromium import Chromium, find_chromium
from tests.view.made_up import make_async_run, make_run, make_tokenizer, write_log, write_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no chromium is installed (Debian: apt-get install chromium)"),
]
ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/images"
OPEN_SECONDS = 3.0
ROWS = "document.querySelectorAll('table.rollouts tbody tr').length"
STEPS = 250
FIRST_ROW = "document.querySelector('table.rollouts tbody tr').dataset.id"


class Viewer:
    """`posttrain view` in a process of its own."""

    def __init__(self, *folders: Path) -> None:
        words = [sys.executable, "-m", "posttrain.cli.main", "view", *map(str, folders), "--no-browser"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.process.stdout.readline()
        self.url = self.process.stdout.readline().strip()
        self.base = self.url.split("#")[0]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture(scope="module")
def big_run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("big") / "grpo-math", steps=STEPS)


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """Metrics alone, of a run with other luck."""
    folder = tmp_path_factory.mktemp("other") / "grpo-math-lr3e-6"
    folder.mkdir()
    for step in range(1, 181):
        reward = 0.3 + 0.8 / (1 + math.exp(-6 * (step / 180 - 0.7))) + 0.03 * math.sin(step)
        write_log(folder, step, 220, [{"reward": reward - 0.3}, {"reward": reward + 0.3}], seed=1)
    return folder


@pytest.fixture(scope="module")
def viewer(big_run, other_run):
    with Viewer(big_run, other_run) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def page(viewer, downloads, tmp_path_factory):
    with Chromium(find_chromium(), tmp_path_factory.mktemp("chromium") / "profile") as page:
        page.dark(False)
        page.call("Browser.setDownloadBehavior", session=None, behavior="allow", downloadPath=str(downloads))
        yield page
        strangers = [url for url in page.requests if not url.startswith((viewer.base, f"blob:{viewer.base}", "about:"))]
        assert strangers == []
        assert page.problems == []


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    folder = PICTURES if os.environ.get("POSTTRAIN_WRITE_SCREENSHOTS") else tmp_path_factory.mktemp("pictures")

    def take(page, name):
        time.sleep(0.4)  # for what fades
        page.picture(folder / f"view-{name}.png")

    return take


def open_rollouts(page, viewer):
    """The table, unfiltered."""
    page.open(viewer.url.replace("/#", f"/?{time.monotonic()}#"))
    page.click("nav a:nth-child(2)")
    page.until(f"{ROWS} === 100")


# The tests of this file go through the page in their order, as a person would.


def open_and_time(run, profile) -> float:
    """Seconds from the address to the newest rollouts on the screen, with a browser and a viewer that know nothing yet."""
    with Viewer(run) as viewer, Chromium(find_chromium(), profile) as page:
        started = time.monotonic()
        page.open(viewer.url)
        page.click("nav a:nth-child(2)")
        page.until(f"{ROWS} === 100 && document.querySelector('#total').textContent === '20,000'", seconds=30)
        took = time.monotonic() - started
        assert page.run(FIRST_ROW).startswith(f"{STEPS}/")
        return took


@pytest.mark.trust
def test_twenty_thousand_rollouts_open_within_three_seconds(big_run, tmp_path):
    times = []
    while not times or (min(times) >= OPEN_SECONDS and len(times) < 3):  # other work on the machine only ever adds time
        times.append(open_and_time(big_run, tmp_path / f"profile-{len(times)}"))
    assert min(times) < OPEN_SECONDS, f"{times} s"


def test_curves_of_two_runs(page, viewer, picture):
    page.open(viewer.url)
    page.until("document.querySelectorAll('.u-over').length >= 8")
    assert page.run("location.href") == viewer.base  # the token is not in the address any more
    titles = page.run("[...document.querySelectorAll('.section h2')].map((e) => e.textContent)")
    assert titles == ["Main", "completions", "eval", "rewards", "rollouts", "sampling"]
    reward = "document.querySelector('.chart')"
    assert page.run(f"{reward}.querySelectorAll('.value').length") == 2
    page.run(f"window.box = {reward}.querySelector('.u-over').getBoundingClientRect()")
    place = page.run("[box.x + box.width / 2, box.y + 40]")
    page.point(*place)
    page.until(f"/step 1\\d\\d/.test({reward}.querySelector('.readout').textContent)")
    picture(page, "curves")
    page.click(".chip.run")
    page.until(f"{reward}.querySelectorAll('.value').length === 1")
    page.click(".chip.run")
    page.press("l")
    page.until("document.querySelector('.toolbar input[type=checkbox]').checked")
    page.press("l")
    page.press("/")
    page.write("length")
    page.until("document.querySelectorAll('.chart').length === 2")
    page.press("Escape")
    page.click(".chart-title")
    page.until("document.querySelector('[role=dialog] .u-over')")
    page.press("Escape")
    page.until("!document.querySelector('[role=dialog]')")


def test_filter_and_sort(page, viewer, picture):
    open_rollouts(page, viewer)
    page.press("/")
    page.write("marbles")
    page.until("document.querySelector('#total').textContent !== '20,000'")
    texts = page.run("[...document.querySelectorAll('td.col-prompt')].map((e) => e.textContent)")
    assert all("marbles" in text for text in texts)
    page.press("Escape")
    page.click("button[data-sort=reward]")
    page.until("document.querySelector('th[aria-sort=descending] button')?.dataset.sort === 'reward'")
    page.until("document.querySelector('table.rollouts tbody b').textContent === '1.20'")
    page.click("button[data-sort=reward]")
    page.until("document.querySelector('table.rollouts tbody b').textContent === '0.00'")
    page.click("button[data-sort=mismatch]")
    page.until(
        "parseFloat(document.querySelector('table.rollouts tbody tr td:nth-child(10)').textContent) > 0.05", seconds=20
    )
    picture(page, "rollouts")
    page.click(".chips .chip:nth-child(4)")  # tool errors
    page.until("[...document.querySelectorAll('td.col-end')].every((e) => e.textContent.includes('tool error'))")


def test_a_group_with_its_tokens(page, viewer, picture):
    page.press("Escape")
    page.press("Enter")  # the first of the marbles whose tool failed
    page.until("document.querySelectorAll('.completion').length === 8")
    assert page.run("document.querySelectorAll('.calls .failed').length") >= 1
    assert "calculate" in page.run("document.querySelector('.calls .failed .call').textContent")
    assert page.run("document.querySelector('.completion .extra').textContent").startswith("answer_parsed ")
    active = page.run("document.querySelector('.completion.active .calls .failed') !== null")
    assert active, "the completion of the row that was opened is the one that is marked"
    for colour, name in (("logp", "t-logp-"), ("advantage", "t-"), ("mask", "t-trained"), ("mismatch", "t-apart-")):
        page.click(f"[data-colour={colour}]")
        page.until(f"document.querySelector('.tokens span[class^={name}]')")
    assert page.run("document.querySelectorAll('.completion.active .t-context').length") > 0  # what the tool said
    page.press("c")
    page.until("document.querySelector('[data-colour=none]').getAttribute('aria-checked') === 'true'")
    page.press("c")
    page.run("document.querySelector('.completion.active .tokens').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.until("/id \\d+ · trained · sampler -?[\\d.]+/.test(document.querySelector('.reading').textContent)")
    picture(page, "group")
    page.press("?")
    page.until("document.querySelector('[role=dialog]')")
    page.press("Escape")
    page.until("!document.querySelector('[role=dialog]') && document.querySelectorAll('.completion').length === 8")


def test_a_dialog_hears_escape_from_the_moment_it_is_drawn(page):
    """Keys can come before the browser paints; that Escape is not for the view behind."""
    keys = """(async () => {
        const down = (key) => new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true });
        const press = (key) => document.activeElement.dispatchEvent(down(key));
        press("?");
        for (let i = 0; i < 5; i++) await Promise.resolve();
        const isDrawn = document.querySelector("[role=dialog]") !== null;
        press("Escape");
        return [isDrawn, location.hash.split("?")[0]];
    })()"""
    assert page.run(keys) == [True, "#/group"]
    page.until("!document.querySelector('[role=dialog]') && document.querySelectorAll('.completion').length === 8")


def test_a_late_answer_does_not_replace_a_newer_one(page):
    said = "document.querySelector('.group-view .said').textContent"
    title = "document.querySelector('.group-view h2').textContent"
    here = page.run(title)
    page.press("[")
    page.until(f"{title} !== {json.dumps(here)}")
    time.sleep(0.3)
    before, its_prompt = page.run(title), page.run(said)
    page.press("]")
    page.until(f"{title} === {json.dumps(here)}")
    time.sleep(0.3)
    page.run(
        """void (window.realFetch = fetch, window.asked = 0, window.fetch = async (...words) => {
            const answer = await realFetch(...words);
            if (String(words[0]).startsWith("/api/group") && asked++ === 0) await new Promise((ok) => setTimeout(ok, 500));
            return answer;
        })"""
    )
    page.press("]")  # is answered last
    page.press("[")
    page.until(f"{title} === {json.dumps(before)} && asked === 2")
    time.sleep(1)
    assert page.run(said) == its_prompt
    page.run("void (window.fetch = realFetch)")
    page.press("]")
    page.until(f"{title} === {json.dumps(here)} && document.querySelectorAll('.completion').length === 8")


def test_the_same_prompt_across_steps(page, viewer, picture):
    page.run("document.activeElement.blur()")
    page.press("p")
    page.until("document.querySelectorAll('table.steps tbody tr').length === 25")
    steps = page.run("[...document.querySelectorAll('table.steps tbody tr')].map((e) => Number(e.dataset.step))")
    assert steps == sorted(steps)
    assert [later - earlier for earlier, later in pairwise(steps)] == [10] * 24  # 100 questions, 10 a step
    page.until("document.querySelector('ins')")
    picture(page, "prompt")
    page.press("k")
    page.until(f"document.querySelector('table.steps tr.active').dataset.step === '{steps[-2]}'")
    page.press("Enter")
    page.until(f"document.querySelector('.group-view h2').textContent.includes('Step {steps[-2]}')")
    page.press("Escape")
    page.until("document.querySelector('table.rollouts')")


def test_dark(page, viewer, picture):
    page.dark(True)
    page.until("document.documentElement.dataset.theme === 'dark'")
    page.press("1")
    page.until("document.querySelectorAll('.u-over').length >= 8")
    picture(page, "curves-dark")
    page.open(f"{viewer.base}#/group?run=0&step=40&group=391")
    page.until("document.querySelectorAll('.completion').length === 8")
    page.click("[data-colour=logp]")
    picture(page, "group-dark")
    page.press("t")
    page.until("document.documentElement.dataset.theme === 'light'")
    page.press("t")
    page.until("document.documentElement.dataset.theme === 'dark'")
    page.dark(False)


def test_exported_pairs_train_dpo(page, viewer, downloads):
    open_rollouts(page, viewer)
    page.until("document.querySelector('#chosen').textContent === '0'")
    for _ in range(2):  # two rows of the first group, one of the second
        page.press("x")
        page.press("j")
    for _ in range(7):
        page.press("j")
    page.press("x")
    page.until("document.querySelector('#chosen').textContent === '3'")
    page.click("#export-all")
    path = downloads / "grpo-math-dpo.jsonl"
    page.until("/rows in grpo-math-dpo.jsonl/.test(document.querySelector('.told').textContent)")
    wait_for(path.exists)
    pairs = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(pairs) > 2000
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)

    from datasets import load_dataset

    from posttrain import DPOConfig, DPOTrainer
    from tests import tiny

    rows = load_dataset("json", data_files=str(path), split="train", cache_dir=str(downloads / "cache")).select(
        range(16)
    )
    model = tiny.causal_lm()
    before = model.get_output_embeddings().weight.detach().clone()
    options = DPOConfig(
        output_dir=str(downloads / "dpo"), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3, use_cpu=True,
        logging_steps=1, save_strategy="no", report_to="none", dataset_cache_dir=str(downloads / "cache"),
    )  # fmt: skip
    trainer = DPOTrainer(model=model, args=options, train_dataset=rows, processing_class=tiny.tokenizer())
    trainer.train()
    logs = [json.loads(line) for line in (downloads / "dpo/metrics.jsonl").read_text().splitlines()]
    losses = [log["loss"] for log in logs if "loss" in log]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # before the first step nothing is preferred
    assert len(losses) == 2
    assert not model.get_output_embeddings().weight.equal(before)


def test_chosen_rollouts_are_exported_for_sft(page, downloads):
    page.run("window.format = document.querySelector('#format'); format.value = 'sft'")
    page.run("format.dispatchEvent(new Event('change', {bubbles: true}))")
    page.click("#export-chosen")
    page.until("/3 rows in grpo-math-sft.jsonl/.test(document.querySelector('.told').textContent)")
    path = downloads / "grpo-math-sft.jsonl"
    wait_for(path.exists)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["messages"][0]["role"] for row in rows] == ["user"] * 3
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


APPEND = """
import sys, time
from pathlib import Path
from tokenizers import Tokenizer
from tests.view.made_up import write_log, write_step
folder = Path(sys.argv[1])
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
for step in range(4, 7):
    time.sleep(0.7)
    write_log(folder, step, 10, write_step(folder, tokenizer, step, 10, prompts=2, samples=4))
"""


def test_the_page_follows_a_run_that_goes_on(tmp_path):
    run = tmp_path / "live"
    tokenizer = make_tokenizer(run)
    for step in range(1, 4):
        write_log(run, step, 10, write_step(run, tokenizer, step, 10, prompts=2, samples=4))
    with Viewer(run) as viewer, Chromium(find_chromium(), tmp_path / "profile") as page:
        page.open(viewer.url)
        page.until("document.querySelector('#step')?.textContent === 'step 3'")
        page.press("2")
        page.until(f"{ROWS} === 24")
        (run / "rollouts/step=000004").mkdir()
        (run / "rollouts/step=000004/process-1.parquet").write_bytes(b"PAR1 half of a file")
        with subprocess.Popen([sys.executable, "-c", APPEND, str(run)], cwd=ROOT) as writer:
            page.until(f"{ROWS} > 24", seconds=20)
            page.until(f"{ROWS} === 48", seconds=20)
            assert writer.wait(20) == 0
        assert page.run(FIRST_ROW).startswith("6/")
        page.until("document.querySelector('#step').textContent === 'step 6'")
        page.until("document.querySelector('.count-line').textContent.includes('1 file could not be read')")
        page.press("1")
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["reward"]
        page.until(f"Math.abs(document.querySelector('.chart .value').textContent - {last}) < 0.001")
        assert all(url.startswith((viewer.base, "about:")) for url in page.requests)
        assert page.problems == []


RECORD_LABELS = """
window.labels = new Map();
const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.clearRect = function (...place) {
  labels.set(this.canvas, []);
  return clearRect.call(this, ...place);
};
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  labels.get(this.canvas)?.push([text, this.textAlign]);
  return fillText.call(this, text, ...place);
};
"""
LABELS = """Object.fromEntries([...document.querySelectorAll('.chart')].map((chart) => [
  chart.querySelector('.chart-title').textContent, labels.get(chart.querySelector('canvas'))]))"""


def test_axes_of_a_short_run_and_the_step_of_the_run_that_is_looked_at(tmp_path):
    """What the axes say is drawn, so it is taken from the calls that draw it: those of y are right-aligned."""
    short, long = tmp_path / "short", tmp_path / "long"
    for step in range(1, 5):
        entry = {"reward": 1 + step / 1e5, "loss": 0.0, "learning_rate": 1e-5 + step * 1e-8, "entropy": 2.0}
        StepFile(short / "metrics.jsonl").append(step, entry)
    for step in range(1, 13):
        StepFile(long / "metrics.jsonl").append(step, {"reward": 1.0 + step / 1e5})
    with Viewer(short, long) as viewer, Chromium(find_chromium(), tmp_path / "profile") as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=RECORD_LABELS)
        page.open(viewer.url)
        page.until("document.querySelectorAll('.chart canvas').length === 4")
        page.until(f"Object.values({LABELS}).every((drawn) => drawn?.length)")
        for name, drawn in page.run(LABELS).items():
            up = [text for text, align in drawn if align == "right"]
            along = [text for text, align in drawn if align != "right"]
            assert len(up) == len(set(up)) > 1, (name, up)
            assert all(text.isdigit() for text in along if text), (name, along)
        zero = [float(text) for text, align in page.run(LABELS)["loss"] if align == "right"]
        assert (min(zero), max(zero)) == (0, 1)
        assert page.run("document.querySelector('input[type=range]').disabled")  # fewer than 20 points are not smoothed
        assert page.run("document.querySelector('#step').textContent") == "step 12"
        page.press("3")
        page.until("document.querySelector('#step').textContent === 'step 4'")
        assert page.problems == []


def test_the_page_tells_when_the_viewer_has_ended_and_when_it_has_no_token(run_folder, tmp_path):
    with Chromium(find_chromium(), tmp_path / "profile") as page:
        with Viewer(run_folder) as viewer:
            page.open(viewer.base)
            page.until("document.body.textContent.includes('The token is missing or wrong')")
            page.open(viewer.url + "&again")
            page.run("location.reload()")
            page.until("document.querySelectorAll('.chart').length > 0")
        page.until("document.querySelector('[role=alert]')?.textContent.includes('does not answer')", seconds=20)


def test_the_pictures_that_a_run_was_shown(tmp_path):
    """A real run on images: each picture of a prompt is on the screen, with the size of its thumbnail."""
    rows = [{"prompt": chats()[number][0]} for number in (1, 0)]
    options = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 4, "max_steps": 1}
    trainer = trainer_of(
        "grpo",
        "smolvlm",
        tmp_path,
        torch.float32,
        train_dataset=rows,
        reward_funcs=checksum,
        reward_workers=0,
        **options,
    )
    trainer.train()
    loaded = "[...document.querySelectorAll('img')].filter((e) => e.complete && e.naturalWidth > 0).length"
    with Viewer(tmp_path / "run") as viewer, Chromium(find_chromium(), tmp_path / "profile") as page:
        page.open(viewer.url)
        page.click("nav a:nth-child(2)")
        page.until(f"{ROWS} === 8")
        page.click("table.rollouts tbody tr")
        page.until("document.querySelectorAll('.completion').length === 4")
        page.until(f"{loaded} >= 1")
        sizes = page.run("[...document.querySelectorAll('img')].map((e) => [e.naturalWidth, e.naturalHeight])")
        shown = {picture.size for picture in PICTURES_SHOWN}
        assert {tuple(size) for size in sizes} <= shown
        page.click("button.picture")
        page.until("/\\d+ × \\d+, \\d+ token/.test(document.querySelector('button.picture.large').textContent)")
        assert page.problems == []
        assert [url for url in page.requests if not url.startswith((viewer.base, "about:", "data:"))] == []


WAITERS = "[...document.querySelectorAll('.waiters th')].map((e) => e.textContent)"
TABS = "[...document.querySelectorAll('nav a')].map((e) => e.textContent.replace(/\\d/g, ''))"


def test_who_waits_for_whom(tmp_path, run_folder, picture):
    """A made-up run, whose trainer waits, and a real one; a synchronous run has no such page."""
    made_up = make_async_run(tmp_path / "grpo-async")
    beside = {"async_rollouts": True, "async_lead": 1, "rollout_engine": "native", "max_steps": 4}
    online_trainer(tmp_path / "real", checksum, **beside).train()
    with Viewer(made_up, tmp_path / "real") as viewer, Chromium(find_chromium(), tmp_path / "profile") as page:
        page.dark(False)
        page.open(viewer.url)
        page.until(f"{TABS}.includes('Waiting')")
        page.press("4")
        page.until("document.querySelectorAll('.waiting-view .chart canvas').length === 6")
        said = page.run("document.querySelector('#verdict').textContent")
        assert said.startswith(
            "The workers wait for the trainer. The trainer waits 2 % of its time, the workers 14 %"
        ), said
        assert page.run(WAITERS) == ["trainer", "worker-0", "worker-1", "worker-2"]
        ages = page.run("document.querySelector('.ages').getAttribute('aria-label')")
        assert [part.split(":")[0] for part in ages.partition(": ")[2].split(", ")] == list("01234")
        text = page.run("document.querySelector('main').textContent")
        assert "the trainer waited for 0.55" in text
        assert "entropy fell" not in text
        assert "finished 500 · taken 480 · reissued 3" in text
        picture(page, "waiting")
        page.run("(e => { e.value = '1'; e.dispatchEvent(new Event('change')) })(document.querySelector('select'))")
        page.until(f"{WAITERS}.join() === 'trainer,inline-0'")
        page.until("document.querySelectorAll('.ages rect').length === 5")
        assert page.problems == []
    with Viewer(run_folder) as viewer, Chromium(find_chromium(), tmp_path / "other") as page:
        page.open(viewer.url)
        page.until("document.querySelectorAll('.chart').length > 0")
        assert page.run(TABS) == ["Curves", "Rollouts", "Run"]


def test_the_docs_have_the_pictures():
    shown = (ROOT / "docs/view.md").read_text()
    for name in ("curves", "rollouts", "group", "prompt", "curves-dark", "group-dark", "waiting"):
        assert (PICTURES / f"view-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"images/view-{name}.png" in shown


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
