"""The GPU receipt: what `tests/gpu` gave on a machine with CUDA, for which tree. CI has no GPU; this is its only witness.

    python scripts/gpu_receipt.py --pack .carry   here: wheels that the other machine lacks, unpacked into an ignored folder
    python scripts/gpu_receipt.py                 on a machine with CUDA: run tests/gpu, write tests/gpu/receipt.json
    python scripts/gpu_receipt.py --check         anywhere, standard library only: is the receipt fresh and green?

A receipt is fresh as long as the files of posttrain/ and tests/gpu/ are those that were tested, and green when every test passed;
a skipped test is not a passed one. Tests with vLLM and those with FlashAttention 3 and 4 are sections of their own, with a digest
of the files that concern these packages: they are rarely there, and other changes do not touch them.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECEIPT = ROOT / "tests" / "gpu" / "receipt.json"
TESTED = ("posttrain", "tests/gpu")
SECTIONS = ("cuda", "vllm", "flash")
PACKAGES = (
    "datasets", "dill", "multiprocess", "xxhash", "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime==4.13.2",
    "cloudpickle", "pytest", "iniconfig", "pluggy", "hypothesis", "sortedcontainers", "uvicorn", "gguf", "rich", "markdown-it-py",
    "mdurl", "pygments", "liger-kernel", "starlette", "anyio", "idna", "pydantic==2.14.3", "pydantic-core==2.50.4",
    "annotated-types", "typing-inspection", "typing-extensions", "prometheus_client", "httpcore", "h11", "certifi",
    "pytest-timeout", "pytest-xdist", "execnet", "bitsandbytes",
)  # fmt: skip
"""What tests/gpu imports and a machine with torch, transformers, accelerate and peft may lack."""
KEPT_LIBRARIES = ("libbitsandbytes_cpu", "libbitsandbytes_cuda130")
WHEELS, NEWER = "wheels", ("transformers==5.19.0", "num2words")
"""Kept as wheels in a subfolder, as what travels may be limited in size; tests of `images` alone run with them."""
FOR_IMAGES = "transformers for images"
MAX_NAMED = 8
OLDER_PLATFORMS = ("manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
PROCESSES = 8
"""Share the GPU: most of a test's time is spent outside of it."""
SPREAD = {"cuda": "loadfile", "flash": "load"}
"""Section -> what a process gets at a time: a file of tests, or, where kernels are compiled for minutes, one test."""


# ---- what was tested ------------------------------------------------------------------------------------------------------


CONCERNS = {
    "vllm": ("posttrain/serve/", "posttrain/rollout/engines/weight_sync"),
    "flash": ("posttrain/models/attention/",),
}
"""Section -> files that concern it beside those with its name."""


def concerns(section: str, name: str) -> bool:
    """Tests of a section are no concern of another."""
    if section == "cuda":
        return not name.startswith("tests/gpu/") or not any(other in name for other in CONCERNS)
    return section in name or name.startswith(CONCERNS[section])


def files_of(section: str, root: Path = ROOT) -> dict[str, str]:
    """Path -> hash of its content. Walked, not asked of git, which is not on every machine."""
    found = {}
    for folder in TESTED:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if not path.is_file() or "__pycache__" in name or path == root / RECEIPT.relative_to(ROOT):
                continue
            if concerns(section, name):
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found


def digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:32]


def files_with_tests(section: str, root: Path = ROOT) -> list[Path]:
    files = sorted((root / "tests" / "gpu").glob("test_*.py"))
    own = {path: next((one for one in CONCERNS if one in path.name), "cuda") for path in files}
    return [path for path in files if own[path] == section]


# ---- running --------------------------------------------------------------------------------------------------------------


class Recorder:
    """A plugin of pytest that writes the receipt after every test: a run that is stopped leaves what it has."""

    def __init__(self, section: str, receipt: dict, writes: bool, continued: bool) -> None:
        self.receipt, self.writes, self.begun = receipt, writes, time.monotonic()
        files = files_of(section)
        self.part = {"date": now(), **machine(), "seconds": 0.0, "digest": digest(files), "files": files, "tests": {}}
        if continued:
            self.part = receipt[section]
            self.part["versions"] |= {FOR_IMAGES: machine()["versions"]["transformers"]}
            self.begun -= self.part["seconds"]
        receipt[section] = self.part

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix("tests/gpu/")
        if report.when != "call" and report.outcome == "passed":
            return
        found = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome != "passed":
            found["reason"] = str(report.longrepr)[-300:]
        self.part["tests"][name] = found
        self.part["seconds"] = round(time.monotonic() - self.begun, 1)
        if self.writes:
            RECEIPT.write_text(json.dumps(self.receipt, indent=1) + "\n", encoding="utf-8")


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def machine() -> dict:
    """Device and versions; imports torch."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for package in ("torch", "triton", "transformers", "accelerate", "peft", "datasets", "vllm", "flash-attn-4"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"device": torch.cuda.get_device_name(0), "versions": versions}


def run(sections: list[str], only: str | None, processes: int, images: bool) -> int:
    """All tests of a file in one process (see SPREAD): what one of them leaves behind, a user's process would have, too.

    Tests of time and of the card's memory have it to themselves (`whole_gpu`), and so have those with vLLM. Those of `images` need
    a newer transformers than a machine may have, so that a process of its own runs them at the end."""
    import pytest
    import torch

    if not torch.cuda.is_available():
        print("The GPU receipt is written on a machine with CUDA; torch sees none here.")
        return 2
    receipt = read()
    for section in sections:
        files = [str(path) for path in files_with_tests(section) if only is None or only in path.name]
        recorder = Recorder(section, receipt, only is None, continued=images)
        spread = ["-n", str(processes), "--dist", SPREAD[section]] if section in SPREAD and processes > 1 else []
        phases = [("images", spread[:2])] if images else [("not whole_gpu and not images", spread), ("whole_gpu", [])]
        for chosen, more in phases:
            pytest.main([*files, *more, "-m", chosen, "-rA", "--tb=short"], plugins=[recorder])
    if images:
        return 0
    if "cuda" in sections:
        run_images(["--processes", str(processes), *(["--only", only] if only else [])])
        receipt = read()
    print(*(line for section in sections for line in verdict(receipt, section)), sep="\n")
    return 0 if all(is_good(receipt, section) for section in sections) else 1


def run_images(options: list[str]) -> None:
    """This script again, whose processes find the packages of NEWER before those of the machine, where they were packed."""
    import zipfile

    with tempfile.TemporaryDirectory() as folder:
        for wheel in (wheel for entry in sys.path for wheel in (Path(entry) / WHEELS).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        paths = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, __file__, "--images", *options]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=False)


# ---- checking -------------------------------------------------------------------------------------------------------------


def changes(receipt: dict, section: str, root: Path = ROOT) -> list[str]:
    """Files that are not as they were tested, and tests that are missing."""
    then, now = receipt[section]["files"], files_of(section, root)
    then = {name: digest for name, digest in then.items() if concerns(section, name)}
    found = [f"{name} ({'changed' if name in then and name in now else 'added' if name in now else 'removed'})"
             for name in sorted({*then, *now}) if then.get(name) != now.get(name)]  # fmt: skip
    run_files = {name.partition("::")[0] for name in receipt[section]["tests"]}
    return found + [f"{path.name} (not run)" for path in files_with_tests(section, root) if path.name not in run_files]


def not_passed(receipt: dict, section: str) -> list[str]:
    return [
        f"{name}: {test['outcome']}" for name, test in receipt[section]["tests"].items() if test["outcome"] != "passed"
    ]


def is_good(receipt: dict, section: str, root: Path = ROOT) -> bool:
    return section in receipt and not changes(receipt, section, root) and not not_passed(receipt, section)


def verdict(receipt: dict, section: str, root: Path = ROOT) -> list[str]:
    """What there is to say about a section, a line each."""
    if section not in receipt:
        return [f"GPU receipt, {section}: none. Run scripts/gpu_receipt.py on a machine with CUDA."]
    part, stale, bad = receipt[section], changes(receipt, section, root), not_passed(receipt, section)
    state = f"{'stale' if stale else 'fresh'} and {'red' if bad else 'green'}"
    lines = [f"GPU receipt, {section}: {state}. {summary(part)}"]
    for title, items in (("changed since", stale), ("not passed", bad)):
        if items:
            rest = f" ... and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
            lines.append(f"  {len(items)} {title}: {', '.join(items[:MAX_NAMED])}{rest}")
    return lines


def summary(part: dict) -> str:
    passed = sum(test["outcome"] == "passed" for test in part["tests"].values())
    versions = part["versions"]
    images = f", with images {versions[FOR_IMAGES]}" if FOR_IMAGES in versions else ""
    return (
        f"{passed} of {len(part['tests'])} tests passed on {part['date'][:10]} on one {part['device']} (torch {versions['torch']}, "
        f"CUDA {versions['cuda']}, transformers {versions['transformers']}{images}) in {part['seconds']:.0f} s."
    )


def read() -> dict:
    return json.loads(RECEIPT.read_text(encoding="utf-8")) if RECEIPT.exists() else {}


def in_words(receipt: dict) -> str:
    """For README and docs/support.md: what was run on a GPU, and when."""
    titles = {
        "cuda": "`tests/gpu` on a GPU",
        "vllm": "`tests/gpu` with vLLM",
        "flash": "`tests/gpu` with FlashAttention 3 and 4",
    }
    said = [f"{titles[section]}: {summary(receipt[section])}" for section in SECTIONS if section in receipt]
    return " ".join(said or ["`tests/gpu` has not been run on a GPU for this tree."])


def check() -> int:
    receipt = read()
    print(*(line for section in SECTIONS for line in verdict(receipt, section)), sep="\n")
    return 0 if all(is_good(receipt, section) for section in SECTIONS) else 1


# ---- packing --------------------------------------------------------------------------------------------------------------


def download(packages: Sequence[str], folder: Path, python: str, platform: str) -> None:
    """Wheels of these packages alone, for another machine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python]
    for one in (platform, *(f"{older}_{platform.split('_', 3)[-1]}" for older in OLDER_PLATFORMS), "any"):
        command += ["--platform", one]  # pip takes wheels of exactly these, not those of older systems, too
    subprocess.run([*command, "--dest", str(folder), *packages], check=True)


def pack(folder: Path, python: str, platform: str) -> int:
    """Wheels of PACKAGES for the other machine, unpacked: put the folder on PYTHONPATH there."""
    import zipfile

    with tempfile.TemporaryDirectory() as wheels:
        download(PACKAGES, Path(wheels), python, platform)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    for library in (folder / "bitsandbytes").glob("libbitsandbytes_*.so"):
        if library.stem not in KEPT_LIBRARIES:  # for other devices and other versions of CUDA: 100 MiB
            library.unlink()
    download(NEWER, folder / WHEELS, python, platform)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 2**20:.0f} MiB. There: PYTHONPATH={folder} python3 scripts/gpu_receipt.py")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="say whether the receipt is fresh and green; exit code 1 if not"
    )
    parser.add_argument("--section", choices=[*SECTIONS, "all"], default="cuda", help="which tests to run")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="that run tests side by side")
    parser.add_argument("--only", help="run only files whose name holds this; nothing is written")
    parser.add_argument(
        "--pack", type=Path, metavar="FOLDER", help="download and unpack what a machine without network needs"
    )
    parser.add_argument("--python-version", default="3.12", help="of the other machine, for --pack")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="of the other machine, for --pack")
    parser.add_argument("--images", action="store_true", help=argparse.SUPPRESS)  # a run's own second process
    given = parser.parse_args()
    if given.check:
        return check()
    if given.pack:
        return pack(given.pack, given.python_version, given.platform)
    os.chdir(ROOT)
    return run(list(SECTIONS) if given.section == "all" else [given.section], given.only, given.processes, given.images)


if __name__ == "__main__":
    sys.exit(main())
