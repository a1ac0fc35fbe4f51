"""Datasets by name: files of every kind, their faults with file and line, parts and mixtures of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows import formats
from posttrain.data.rows.checks import BadRowsError
from posttrain.data.sources.mixtures import load_mixture
from posttrain.data.sources.named import DatasetSource, SourceError, load_source
from posttrain.data.store.prepare import prepare_dataset
from tests import tiny

GOOD = [{"text": f"row {i}"} for i in range(20)]


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


def write_shards(folder, *tables):
    folder.mkdir()
    for i, table in enumerate(tables):
        pq.write_table(pa.table(table), folder / f"shard-{i}.parquet")
    return folder


def test_every_kind_of_file(tmp_path):
    write_lines(tmp_path / "a.jsonl", GOOD)
    (tmp_path / "b.json").write_text(json.dumps(GOOD))
    (tmp_path / "c.csv").write_text("text,n\nrow 0,1\nrow 1,2\n")
    (tmp_path / "d.tsv").write_text("text\tn\nrow 0\t1\n")
    (tmp_path / "e.txt").write_text("row 0\nrow 1\n")
    pq.write_table(pa.Table.from_pylist(GOOD), tmp_path / "f.parquet")
    with gzip.open(tmp_path / "g.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in GOOD)
    datasets.Dataset.from_list(GOOD).save_to_disk(tmp_path / "saved")
    counts = {p.name: len(load_source(str(p))) for p in sorted(tmp_path.iterdir())}
    assert counts == {
        "a.jsonl": 20,
        "b.json": 20,
        "c.csv": 2,
        "d.tsv": 1,
        "e.txt": 2,
        "f.parquet": 20,
        "g.jsonl.gz": 20,
        "saved": 20,
    }
    assert load_source(str(tmp_path / "d.tsv"))[0] == {"text": "row 0", "n": "1"}


def test_folder_with_splits(tmp_path):
    write_lines(tmp_path / "data" / "train-0.jsonl", GOOD[:3])
    write_lines(tmp_path / "data" / "train-1.jsonl", GOOD[3:5])
    write_lines(tmp_path / "data" / "test.jsonl", GOOD[5:6])
    assert len(load_source(str(tmp_path))) == 5
    assert load_source(DatasetSource(str(tmp_path), split="test"))[0] == GOOD[5]
    with pytest.raises(SourceError, match="splits 'train', 'test', none for 'validation'"):
        load_source(DatasetSource(str(tmp_path), split="validation"))


FAULTS = {
    "cut line": (GOOD + [b'{"text": "abc\n'] + GOOD, r"bad\.jsonl, line 21 ends in the middle of a value"),
    "cut last line": (GOOD + [b'{"text": "abc'], r"bad\.jsonl, line 21 ends in the middle of a value"),
    "not JSON": (GOOD + [b"text: abc\n"], r"bad\.jsonl, line 21 is not JSON"),
    "not an object": (GOOD + [["a"]], r"bad\.jsonl, line 21 is a list, a JSON object is needed"),
    "not UTF-8": (GOOD + [b'{"text": "caf\xe9"}\n'], r"bad\.jsonl, line 21 is not UTF-8 text: the byte 0xe9"),
    "cut UTF-8": (GOOD + [b'{"text": "caf\xc3'], r"bad\.jsonl, line 21 is not UTF-8 text: the byte 0xc3"),
    "lone surrogate": (GOOD + [{"text": "\ud83d"}], r"bad\.jsonl, line 21 holds half of a surrogate pair"),
    "empty file": ([], r"bad\.jsonl is empty"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_lines_are_named(fault, tmp_path):
    lines, message = FAULTS[fault]
    path = write_lines(tmp_path / "bad.jsonl", lines)
    with pytest.raises(SourceError, match=message):
        load_source(str(path))


def test_all_faulty_lines_in_one_pass(tmp_path):
    path = write_lines(tmp_path / "bad.jsonl", [*GOOD, b"{\n", *GOOD, b"[\n"] + [b"x\n"] * 30)
    with pytest.raises(SourceError, match=r"line 21(.|\n)*line 42(.|\n)*and 12 more"):
        load_source(str(path))


def test_csv_with_a_row_of_other_width(tmp_path):
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3,4,5,6\n")
    with pytest.raises(SourceError, match=r"bad\.csv, line 3 has 4 fields, the header has 2"):
        load_source(str(tmp_path / "bad.csv"))


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_csv_of_other_countries(tmp_path, sign):
    (tmp_path / "a.csv").write_text(f"prompt{sign}completion\nWhat is 2?{sign}Two\n")
    assert list(load_source(str(tmp_path / "a.csv"))) == [{"prompt": "What is 2?", "completion": "Two"}]


def test_patterns_of_files(tmp_path):
    """All that match, in the order of their names, whatever splits they are named after."""
    for number, name in enumerate(("test-b.jsonl", "sub/c.jsonl", "train-a.jsonl")):
        write_lines(tmp_path / name, [{"text": f"{name} {number}"}])
    (tmp_path / "notes.txt").write_text("not this one\n")
    assert [row["text"] for row in load_source(f"{tmp_path}/*.jsonl")] == ["test-b.jsonl 0", "train-a.jsonl 2"]
    assert len(load_source(f"{tmp_path}/**/*.jsonl")) == 3
    assert len(list(load_source(f"{tmp_path}/t*[ab].jsonl", streaming=True))) == 2
    with pytest.raises(SourceError, match=r"No file matches .*/\*\.csv"):
        load_source(f"{tmp_path}/*.csv")
    with pytest.raises(SourceError, match="one known type"):
        load_source(f"{tmp_path}/*")


def test_csv_values_are_what_was_written(tmp_path):
    (tmp_path / "a.csv").write_text('completion,label\nNone,True\n007,0\n"a, ""b""\nc",false\n')
    rows = list(load_source(str(tmp_path / "a.csv")))
    assert rows == [
        {"completion": "None", "label": True},
        {"completion": "007", "label": 0},
        {"completion": 'a, "b"\nc', "label": False},
    ]


def test_a_changed_file_is_read_again(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", GOOD[:2])
    assert len(load_source(str(path))) == 2
    write_lines(path, GOOD)
    assert len(load_source(str(path))) == 20


def test_json_values_are_not_cast(tmp_path):
    rows = [
        {"text": "2020-01-01"},
        {"text": 5},
        {"text": None},
        {"text": ["a", {"b": 1}]},
        {"text": "\U0001f600"},
        {"text": "007"},
    ]
    assert list(load_source(str(write_lines(tmp_path / "a.jsonl", rows)))) == rows


def test_parquet_shards_of_other_schema(tmp_path):
    types = write_shards(tmp_path / "types", {"text": ["a"]}, {"text": [1]})
    with pytest.raises(
        SourceError, match=r"shard-1\.parquet: column 'text' holds integers, in shard-0\.parquet it holds text"
    ):
        load_source(str(types))
    names = write_shards(tmp_path / "names", {"text": ["a"]}, {"other": ["a"]})
    with pytest.raises(SourceError, match=r"column 'text' holds nothing, in shard-0\.parquet it holds text"):
        load_source(str(names))
    widths = write_shards(tmp_path / "widths", {"n": pa.array([1], pa.int32())}, {"n": pa.array([1], pa.int64())})
    assert len(load_source(str(widths))) == 2
    (tmp_path / "no.parquet").write_bytes(b"PAR1 this is not one")
    with pytest.raises(SourceError, match="is not a readable Parquet file"):
        load_source(str(tmp_path / "no.parquet"))


def test_no_rows(tmp_path):
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), empty)
    with pytest.raises(SourceError, match="has no rows"):
        load_source(str(empty))
    with pytest.raises(SourceError, match="There is no file or folder"):
        load_source(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(SourceError, match=r"holds no file of type \.jsonl"):
        load_source(str(write_lines(tmp_path / "other" / "x.xyz", GOOD).parent))


def test_mixed_types_across_shards_are_found_by_the_row_check(tmp_path):
    write_lines(tmp_path / "d" / "0.jsonl", GOOD)
    write_lines(tmp_path / "d" / "1.jsonl", [{"text": 5}])
    dataset = load_source(str(tmp_path / "d"))
    with pytest.raises(BadRowsError, match="row 20, column 'text': is int 5"):
        prepare_dataset(
            dataset,
            (formats.LANGUAGE_MODELLING,),
            Renderer(tiny.tokenizer()),
            PrepareOptions(cache_dir=tmp_path / "cache"),
        )


def test_two_message_formats_in_one_file(tmp_path):
    ours = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    theirs = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    path = write_lines(tmp_path / "mix.jsonl", [ours] * 10 + [theirs])
    with pytest.raises(
        BadRowsError, match=r"row 10, column 'messages': .*'conversations', the columns of another format"
    ):
        prepare_dataset(
            load_source(str(path)),
            (formats.LANGUAGE_MODELLING,),
            Renderer(tiny.tokenizer()),
            PrepareOptions(cache_dir=tmp_path / "cache"),
        )


def test_columns_are_mapped(tmp_path):
    path = str(write_lines(tmp_path / "qa.jsonl", [{"question": "Q", "answer": "A"}]))
    mapped = load_source(DatasetSource(path, columns={"question": "prompt", "answer": "completion"}))
    assert mapped[0] == {"prompt": "Q", "completion": "A"}
    with pytest.raises(SourceError, match="has no column 'query'; it has 'question', 'answer'"):
        load_source(DatasetSource(path, columns={"query": "prompt"}))
    with pytest.raises(SourceError, match="has a column 'answer' already"):
        load_source(DatasetSource(path, columns={"question": "answer"}))


def test_fraction_is_a_seeded_choice(tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", GOOD))
    part = load_source(DatasetSource(path, fraction=0.25), seed=1)["text"][:]
    assert len(part) == 5
    assert part != [row["text"] for row in GOOD[:5]]
    assert part == load_source(DatasetSource(path, fraction=0.25), seed=1)["text"][:]
    assert part != load_source(DatasetSource(path, fraction=0.25), seed=2)["text"][:]
    with pytest.raises(ValueError, match="fraction=0 of"):
        DatasetSource(path, fraction=0)


def test_concatenated_mixture_counts_weights(tmp_path):
    a = str(write_lines(tmp_path / "a.jsonl", GOOD))
    b = str(write_lines(tmp_path / "b.jsonl", [{"text": f"other {i}", "extra": 1} for i in range(10)]))
    mixed = load_mixture([DatasetSource(a, weight=0.5), DatasetSource(b, weight=2)], seed=3)
    texts = mixed["text"][:]
    assert mixed.column_names == ["text", "extra"]
    assert sum(text.startswith("row") for text in texts) == 10
    assert all(texts.count(f"other {i}") == 2 for i in range(10))


def test_interleaved_mixture_follows_weights(tmp_path):
    a = str(write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 3000))
    b = str(write_lines(tmp_path / "b.jsonl", [{"text": "b"}] * 3000))
    for streaming in (False, True):
        mixed = load_mixture([DatasetSource(a, weight=3), b], mixing="interleave", seed=0, streaming=streaming)
        texts = [row["text"] for row in mixed]
        assert texts.count("a") == 3000 or texts.count("b") == 3000
        assert abs(texts.count("a") / len(texts) - 0.75) < 0.03


def test_mixture_of_conversations_with_other_keys(tmp_path):
    call = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    plain = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    tools = {"messages": [plain["messages"][0], {"role": "assistant", "content": "", "tool_calls": call}]}
    a = str(write_lines(tmp_path / "a.jsonl", [plain] * 3))
    b = str(write_lines(tmp_path / "b.jsonl", [tools] * 3))
    rows = list(load_mixture([a, b]))
    assert sum("tool_calls" in row["messages"][1] for row in rows) == 3
    c = str(write_lines(tmp_path / "c.jsonl", [{"words": "x"}]))
    with pytest.raises(SourceError, match="share no column"):
        load_mixture([a, c])


def test_streams(tmp_path):
    path = str(write_lines(tmp_path / "a.jsonl", GOOD))
    stream = load_source(path, streaming=True)
    assert isinstance(stream, datasets.IterableDataset)
    assert list(stream) == GOOD
    with pytest.raises(ValueError, match="a stream has no share to take"):
        load_source(DatasetSource(path, fraction=0.5), streaming=True)


# ---- what is read back -----------------------------------------------------------------------------------------------------


def flipped(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_cache_that_was_changed_is_made_again_from_its_source(tmp_path, monkeypatch, caplog, suffix):
    """The file is intact, its Arrow copy is not: nothing of the copy is trained on."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": f"row {number} says hello"} for number in range(50)]
    file = tmp_path / f"rows{suffix}"
    made = datasets.Dataset.from_list(rows)
    {".jsonl": made.to_json, ".csv": made.to_csv, ".parquet": made.to_parquet}[suffix](str(file))
    first = load_source(str(file))
    assert list(first) == rows
    (cached,) = [Path(entry["filename"]) for entry in first.cache_files]
    content = cached.read_bytes()
    del first
    flipped(cached, content.index(b"row 7 says hello"))
    assert list(load_source(str(file))) == rows
    assert "made again from its source" in caplog.text
    caplog.clear()
    assert list(load_source(str(file))) == rows
    assert not caplog.text


def test_a_dataset_that_somebody_saved_gets_no_file_of_ours(tmp_path):
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "saved"))
    before = sorted(path.name for path in (tmp_path / "saved").iterdir())
    load_source(str(tmp_path / "saved"))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before
