"""The built page belongs to the sources, is small, and loads nothing from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

FRONTEND = Path(__file__).parents[2] / "frontend"
STATIC = files("posttrain.view").joinpath("static")


def source_hash() -> str:
    """As frontend/build.mjs makes it."""
    named = [FRONTEND / name for name in ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")]
    paths = {
        path.relative_to(FRONTEND).as_posix(): path
        for path in [*named, *(FRONTEND / "src").rglob("*")]
        if path.is_file()
    }
    digest = hashlib.sha256()
    for name in sorted(paths):
        content = paths[name].read_bytes()
        digest.update(f"{name}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def test_the_page_was_built_from_these_sources():
    built = json.loads(STATIC.joinpath("build.json").read_text())["sources"]
    assert built == source_hash(), (
        "posttrain/view/static is not what frontend/ makes: run `make frontend` and commit both"
    )


def test_the_page_is_small():
    assert sum(len(path.read_bytes()) for path in STATIC.iterdir()) < 500_000


@pytest.mark.parametrize("name", ["index.html", "app.js", "app.css"])
def test_nothing_is_loaded_from_elsewhere(name):
    text = STATIC.joinpath(name).read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
        "http://www.w3.org/1999/xhtml",
    }
    assert not re.search(r"@import|\beval\(|new Function\(|document\.write", text)


def test_versions_are_pinned():
    package = json.loads((FRONTEND / "package.json").read_text())
    for versions in (package["dependencies"], package["devDependencies"]):
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values()), versions
    licences = STATIC.joinpath("THIRD_PARTY.txt").read_text()
    assert all(f"{name} {version}" in licences for name, version in package["dependencies"].items())


@pytest.mark.slow
def test_building_it_again_gives_the_same_files(tmp_path):
    node = shutil.which("node")
    if node is None or not (FRONTEND / "node_modules").is_dir():
        pytest.skip("node and frontend/node_modules are not there; `make frontend` gets them")
    subprocess.run([node, str(FRONTEND / "build.mjs"), str(tmp_path / "static")], check=True, timeout=120)
    built = {path.name: path.read_bytes() for path in (tmp_path / "static").iterdir()}
    assert built == {path.name: path.read_bytes() for path in STATIC.iterdir()}
