"""The GPU receipt: fresh while the tested files are the same, green when every test passed, and what is not so is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_receipt
from scripts.gpu_receipt import SECTIONS, changes, digest, files_of, files_with_tests, is_good, not_passed, verdict


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("posttrain/a.py", "posttrain/serve/b.py", "tests/gpu/test_one.py", "tests/gpu/test_vllm.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def receipt_of(tree: Path, section: str = "cuda", **outcomes: str) -> dict:
    files = files_of(section, tree)
    tests = {f"test_one.py::{name}": {"outcome": outcome, "seconds": 1.0} for name, outcome in outcomes.items()}
    versions = {"torch": "2.11.0", "cuda": "13.0", "transformers": "5.17.0"}
    part = {"date": "2026-11-16T08:00:00+00:00", "device": "NVIDIA H200", "versions": versions, "seconds": 12.0}
    return {section: part | {"digest": digest(files), "files": files, "tests": tests}}


def test_fresh_and_green(tree):
    receipt = receipt_of(tree, test_a="passed", test_b="passed")
    assert is_good(receipt, "cuda", tree)
    (line,) = verdict(receipt, "cuda", tree)
    assert "fresh and green. 2 of 2 tests passed on 2026-11-16 on one NVIDIA H200" in line


def test_byte_code_and_the_receipt_itself_are_not_what_was_tested(tree):
    receipt = receipt_of(tree, test_a="passed")
    (tree / "posttrain" / "__pycache__").mkdir()
    (tree / "posttrain" / "__pycache__" / "a.pyc").write_bytes(b"1")
    (tree / "tests" / "gpu" / "receipt.json").write_text("{}")
    assert is_good(receipt, "cuda", tree)


def test_tests_of_other_sections_may_change(tree):
    receipt = receipt_of(tree, test_a="passed")
    (tree / "tests" / "gpu" / "test_vllm.py").write_text("other")
    assert is_good(receipt, "cuda", tree)
    assert "tests/gpu/test_vllm.py" in files_of("vllm", tree)
    assert "tests/gpu/test_vllm.py" not in files_of("cuda", tree)


def test_what_changed_is_named(tree):
    receipt = receipt_of(tree, test_a="passed")
    (tree / "posttrain" / "a.py").write_text("other")
    (tree / "posttrain" / "c.py").write_text("new")
    (tree / "posttrain" / "serve" / "b.py").unlink()
    (tree / "tests" / "gpu" / "test_two.py").write_text("new")
    assert changes(receipt, "cuda", tree) == [
        "posttrain/a.py (changed)",
        "posttrain/c.py (added)",
        "posttrain/serve/b.py (removed)",
        "tests/gpu/test_two.py (added)",
        "test_two.py (not run)",
    ]
    assert "stale and green" in verdict(receipt, "cuda", tree)[0]


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_failed_and_a_skipped_test_are_red(tree, outcome):
    receipt = receipt_of(tree, test_a="passed", test_b=outcome)
    assert not is_good(receipt, "cuda", tree)
    assert not_passed(receipt, "cuda") == [f"test_one.py::test_b: {outcome}"]
    assert "fresh and red" in verdict(receipt, "cuda", tree)[0]


def test_the_section_of_vllm_is_touched_by_its_own_files_only(tree):
    receipt = receipt_of(tree, "vllm") | receipt_of(tree, test_a="passed")
    receipt["vllm"]["tests"] = {"test_vllm.py::test_sleep": {"outcome": "passed", "seconds": 1.0}}
    (tree / "posttrain" / "a.py").write_text("other")
    assert is_good(receipt, "vllm", tree)
    (tree / "posttrain" / "serve" / "b.py").write_text("other")
    assert changes(receipt, "vllm", tree) == ["posttrain/serve/b.py (changed)"]


def test_every_file_of_tests_is_in_one_section(tree):
    (tree / "tests" / "gpu" / "test_flash_packages.py").write_text("")
    names = {section: [path.name for path in files_with_tests(section, tree)] for section in SECTIONS}
    assert names == {"cuda": ["test_one.py"], "vllm": ["test_vllm.py"], "flash": ["test_flash_packages.py"]}
    (tree / "posttrain" / "models" / "attention").mkdir(parents=True)
    (tree / "posttrain" / "models" / "attention" / "flash.py").write_text("")
    assert set(files_of("flash", tree)) == {"posttrain/models/attention/flash.py", "tests/gpu/test_flash_packages.py"}


def test_the_check_needs_the_standard_library_only():
    """As .ci/run calls it, before anything is installed."""
    command = [sys.executable, "-I", "-S", gpu_receipt.__file__, "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    assert ended.stdout.startswith("GPU receipt, cuda: ")


def test_without_a_gpu_no_receipt_is_written():
    command = [sys.executable, gpu_receipt.__file__]
    before = gpu_receipt.read()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, gpu_receipt.read()) == (2, before)
    assert "torch sees none here" in ended.stdout
    json.dumps(before)
