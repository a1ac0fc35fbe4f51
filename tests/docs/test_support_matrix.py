"""The support matrix says what test results say, and nothing else."""

from __future__ import annotations

from posttrain.methods.table import METHODS
from scripts import site_hooks, support_matrix

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.trainer.test_gradient_matrix" name="test_gradient_equals_the_oracle[sft-nll-ragged-chunk1-1x8-full]"/>
<testcase classname="tests.trainer.test_gradient_matrix" name="test_gradient_equals_the_oracle[sft-nll-ragged-chunk1-1x8-lora-x]"/>
<testcase classname="tests.trainer.test_gradient_matrix" name="test_gradient_equals_the_oracle[dpo-apo-padded-chunk1-1x8-full]">
<failure/></testcase>
<testcase classname="tests.methods.test_vllm_training" name="test_two_servers[grpo]"><skipped/></testcase>
</testsuite></testsuites>"""


def test_cells_count_what_passed_and_name_what_failed(tmp_path):
    (tmp_path / "one.xml").write_text(RESULTS)
    page = support_matrix.page(support_matrix.outcomes([tmp_path / "one.xml"]))
    rows = {
        line.split(" | ")[0].strip("| "): [cell.strip() for cell in line.strip("|").split("|")[1:]]
        for line in page.splitlines()
    }
    assert rows["gradients equal a float64 oracle, ragged batches"] == ["2", *[""] * (len(METHODS) - 1)]
    assert rows["... with LoRA"][0] == "1"
    assert rows["... padded batches"][:2] == ["", "1 failed"]
    assert rows["vLLM servers"] == [""] * len(METHODS)  # skipped is not shown to work
    assert "Of 4 tests: 2 passed, 1 failed, 1 skipped." in page


def test_every_row_has_tests_in_the_page_that_is_kept():
    kept = support_matrix.PAGE.read_text()
    for told, _ in support_matrix.FEATURES:
        (line,) = [line for line in kept.splitlines() if line.startswith(f"| {told} |")]
        assert any(cell.strip().isdigit() for cell in line.split("|")[2:]), line


def test_links_out_of_the_site_become_names():
    text = "see [the test](../tests/a.py), [tests/b.py](../tests/b.py#L1) and [here](data.md)"
    assert site_hooks.on_page_markdown(text, None) == "see the test (`tests/a.py`), `tests/b.py` and [here](data.md)"
