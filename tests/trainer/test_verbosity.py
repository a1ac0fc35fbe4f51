"""`verbosity`: how many of our own lines a run prints."""

import logging

import pytest

from posttrain import SFTConfig, SFTTrainer
from posttrain.core import console
from tests import tiny

ROWS = [{"prompt": "one two", "completion": " three four"}] * 4


@pytest.fixture(autouse=True)
def _as_before():
    yield
    console.set_verbosity(console.NORMAL)


def printed(tmp_path, capfd, **options):
    from datasets import Dataset

    args = SFTConfig(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        **options,
    )
    SFTTrainer(
        tiny.causal_lm(0), args=args, train_dataset=Dataset.from_list(ROWS), processing_class=tiny.tokenizer()
    ).train()
    shown = capfd.readouterr()
    return shown.out, shown.err


def test_a_quiet_run_prints_nothing_and_keeps_its_metrics(tmp_path, capfd):
    out, _ = printed(tmp_path, capfd, verbosity="quiet")
    assert out == ""
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 2


def test_a_run_prints_its_plan_progress_and_summary(tmp_path, capfd, caplog):
    out, _ = printed(tmp_path, capfd)
    logging.getLogger("posttrain.models").info("a detail")
    assert "step 2/2" in out
    assert "SFT finished: 2 steps" in out
    assert "a detail" not in caplog.messages


def test_a_verbose_run_says_what_was_decided(tmp_path, capfd, caplog):
    out, _ = printed(tmp_path, capfd, verbosity="verbose")
    assert "step 2/2" in out
    logging.getLogger("posttrain.models").info("a detail")
    assert caplog.messages.count("a detail") == 1  # pytest has set up logging: a handler of ours would say it twice


def test_details_go_to_the_terminal_where_the_program_has_not_set_up_logging(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    console.set_verbosity(console.VERBOSE)
    (handler,) = logging.getLogger("posttrain").handlers
    assert handler.format(logging.LogRecord("posttrain.data", logging.INFO, "", 0, "a detail", (), None)) == "a detail"
    console.set_verbosity(console.NORMAL)
    assert logging.getLogger("posttrain").handlers == []


def test_what_must_be_said_is_said_in_a_quiet_run_too(capsys):
    console.set_verbosity(console.QUIET)
    console.say("progress")
    console.say("alert", always=True)
    assert capsys.readouterr().out == "alert\n"


def test_an_unknown_verbosity_is_refused():
    with pytest.raises(ValueError, match="`verbosity` is 'loud'; it must be one of quiet, normal, verbose"):
        SFTConfig(verbosity="loud")
