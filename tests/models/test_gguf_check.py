"""Malformed GGUF files: each is refused with a sentence that names the file and the byte, before anything is loaded."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from posttrain.models.load.gguf_check import BadGGUF, check_gguf_file
from posttrain.models.load.model import load_tokenizer

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("one", np.ones((4, 32), np.float32))
    writer.add_tensor("two", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def at(content: bytes, place: int, kind: str, value: int) -> bytes:
    return content[:place] + struct.pack(kind, value) + content[place + struct.calcsize(kind) :]


def after(content: bytes, name: bytes) -> int:
    return content.index(name) + len(name)


DAMAGES = {
    "nothing": (lambda c: b"", "the magic number takes 4 bytes, and the file ends after 0"),
    "another magic number": (lambda c: b"GGML" + c[4:], "begins with b'GGML'"),
    "a version of tomorrow": (lambda c: at(c, 4, "<I", 9), "version 9 of the format"),
    "big-endian": (lambda c: at(c, 4, ">I", 3), "version 50331648 of the format"),
    "cut in the header": (lambda c: c[:20], "the number of metadata entries takes 8 bytes"),
    "cut in the metadata": (lambda c: c[:60], "the file ends after"),
    "cut in the tensors": (lambda c: c[:-1], "it was cut, or is damaged"),
    "too many tensors": (lambda c: at(c, 8, "<Q", 2**63), "the number of tensors is 9,223,372,036,854,775,808"),
    "too many entries": (lambda c: at(c, 16, "<Q", 2**40), "the number of metadata entries is 1,099,511,627,776"),
    "fewer entries than there are": (lambda c: at(c, 16, "<Q", 1), "byte"),
    "a name without end": (lambda c: at(c, 24, "<Q", 2**50), "the length of the name of a metadata entry"),
    "a name that is no text": (lambda c: c.replace(b"general.name", b"general.\xff\xfeme"), "is not UTF-8 text"),
    "an unknown kind of entry": (lambda c: at(c, after(c, b"general.name"), "<I", 77), "unknown type 77"),
    "a list without end": (lambda c: at(c, after(c, b"ggml.tokens") + 8, "<Q", 2**60), "the length of the metadata"),
    "no architecture": (
        lambda c: c.replace(b"general.architecture", b"general.architecturE"),
        "does not name the model",
    ),
    "too many dimensions": (lambda c: at(c, after(c, b"\x03" + b"\0" * 7 + b"one"), "<I", 9), "has 9 dimensions"),
    "an unknown type of tensor": (lambda c: at(c, after(c, b"\0" * 7 + b"one") + 20, "<I", 99), "unknown type 99"),
    "a shape of nothing": (lambda c: at(c, after(c, b"\0" * 7 + b"one") + 4, "<Q", 0), "has the shape"),
    "a shape beyond the file": (lambda c: at(c, after(c, b"\0" * 7 + b"two") + 4, "<Q", 2**40), "the file has"),
    "a place beyond the file": (lambda c: at(c, after(c, b"\0" * 7 + b"two") + 16, "<Q", 2**40), "the file has"),
    "a place inside of another": (
        lambda c: at(c, after(c, b"\0" * 7 + b"two") + 16, "<Q", 32),
        "inside of another one",
    ),
    "a crooked place": (lambda c: at(c, after(c, b"\0" * 7 + b"two") + 16, "<Q", 513), "multiple of 32"),
    "a tensor twice": (lambda c: c.replace(b"\0" * 7 + b"two", b"\0" * 7 + b"one"), "two tensors have the same name"),
}


def test_a_whole_file_passes(whole, tmp_path):
    (tmp_path / "model.gguf").write_bytes(whole)
    check_gguf_file(tmp_path / "model.gguf")


@pytest.mark.parametrize("damage", DAMAGES)
def test_malformed_files_are_refused_with_file_and_byte(whole, tmp_path, damage):
    change, reason = DAMAGES[damage]
    path = tmp_path / "model.gguf"
    path.write_bytes(change(whole))
    assert path.read_bytes() != whole
    with pytest.raises(BadGGUF) as refused:
        check_gguf_file(path)
    assert str(refused.value).startswith(f"{path}, byte ")
    assert reason in str(refused.value)
    with pytest.raises(BadGGUF):
        load_tokenizer(path, None, False)


def test_every_cut_is_noticed(whole, tmp_path):
    path = tmp_path / "model.gguf"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(BadGGUF):
            check_gguf_file(path)
