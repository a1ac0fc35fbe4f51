"""Which files are read, and what is said of those that cannot be: splits by words, no rows, CSV headers, cut documents."""

from __future__ import annotations

import csv
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.data.sources.named import DatasetSource, SourceError, load_source
from posttrain.data.sources.text_files import read_text_files


def folder_of(folder, **counts):
    """A file of JSON lines for each name (__ for a folder's slash), whose rows say which file they are of."""
    for name, count in counts.items():
        path = folder / f"{name.replace('__', '/')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": path.stem}) + "\n" for _ in range(count)))
    return str(folder)


def rows_of(path, split="train"):
    return sorted(load_source(DatasetSource(path, split=split))["text"])


# ---------------------------------------------------------------------------------------------------------------- splits


def test_splits_are_whole_words(tmp_path):
    """`latest` holds "test", `constrained` holds "train": neither names a split."""
    assert rows_of(folder_of(tmp_path / "a", latest=2, constrained=1)) == ["constrained", "latest", "latest"]
    path = folder_of(tmp_path / "b", **{"training_latest": 1, "contest-train": 1, "my.test.2": 1, "dev0": 1})
    assert rows_of(path) == ["contest-train", "training_latest"]
    assert rows_of(path, "test") == ["my.test.2"]
    assert rows_of(path, "validation") == rows_of(path, "dev") == ["dev0"]


def test_a_file_of_no_split_is_named(tmp_path):
    path = folder_of(tmp_path, **{"train-1": 2, "more": 3})
    with pytest.raises(SourceError, match=r"more\.jsonl belongs to no split, and other files of .* do\. Rename it"):
        load_source(path)
    (tmp_path / "more.jsonl").rename(tmp_path / "train-more.jsonl")
    assert len(load_source(path)) == 5


def test_a_file_of_two_splits_is_named(tmp_path):
    with pytest.raises(SourceError, match=r"train_test\.jsonl names the splits 'train' and 'test'"):
        load_source(folder_of(tmp_path, train_test=1, train=1))


def test_a_file_s_own_name_goes_before_its_folder_s(tmp_path):
    path = folder_of(tmp_path, train__part=1, train__test=1, **{"validation__deep__0": 1})
    assert rows_of(path) == ["part"]
    assert rows_of(path, "test") == ["test"]
    assert rows_of(path, "validation") == ["0"]


def test_splits_of_another_name(tmp_path):
    path = folder_of(tmp_path, **{"train_sft-0": 1, "train_gen-0": 1, "test_sft-0": 1})
    assert rows_of(path, "train_sft") == ["train_sft-0"]
    assert rows_of(path) == ["train_gen-0", "train_sft-0"]
    with pytest.raises(SourceError, match="splits 'train', 'test', none for 'test_gen'"):
        rows_of(path, "test_gen")


def test_what_a_folder_has_beside_its_rows(tmp_path):
    path = folder_of(tmp_path, train=2, **{".cache__train": 5})
    (tmp_path / "README.txt").write_text("What this is.")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert rows_of(path) == ["train", "train"]


# --------------------------------------------------------------------------------------------------- no rows, odd names


NO_ROWS = {"blank.jsonl": "\n \n", "list.json": "[]", "header.csv": "prompt,completion\n", "blank.txt": "\n\n"}


@pytest.mark.parametrize("name", NO_ROWS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_without_rows_is_named(tmp_path, name, streaming):
    (tmp_path / name).write_text(NO_ROWS[name])
    with pytest.raises(SourceError, match=f"{name} has no rows"):
        load_source(str(tmp_path / name), streaming=streaming)


def test_suffixes_in_capitals(tmp_path):
    (tmp_path / "a.JSONL").write_text('{"text": "a"}\n')
    (tmp_path / "b.CSV").write_text("text,n\na,1\n")
    (tmp_path / "c.Tsv").write_text("text\tn\na, b\t1\n")
    (tmp_path / "d.JSON").write_text('[\n{"text": "a"}\n]')
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "e.PARQUET")
    with gzip.open(tmp_path / "f.JSONL.GZ", "wt") as file:
        file.write('{"text": "a"}\n')
    assert [load_source(str(path))[0]["text"] for path in sorted(tmp_path.iterdir())] == [
        "a",
        "a",
        "a, b",
        "a",
        "a",
        "a",
    ]
    assert len(load_source(folder_of(tmp_path / "folder", train=1).replace("folder", "a.JSONL"))) == 1
    with pytest.raises(SourceError, match="There is no file or folder"):
        load_source("nothing.CSV")


def test_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder_of(tmp_path, x=3)
    assert len(load_source("~/x.jsonl")) == 3
    assert len(load_source(DatasetSource("~/x.jsonl", fraction=0.34))) == 1
    with pytest.raises(SourceError, match=f"There is no file or folder {tmp_path}/y.jsonl"):
        load_source("~/y.jsonl")


# ------------------------------------------------------------------------------------------------------------ CSV, JSON


def test_a_csv_column_twice(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion,prompt\na,b,c\n")
    with pytest.raises(SourceError, match=r"a\.csv, line 1 names the column 'prompt' 2 times \(fields 1, 3\)"):
        load_source(str(tmp_path / "a.csv"))


def test_a_long_csv_field(tmp_path):
    csv.field_size_limit(131_072)  # Python's own
    (tmp_path / "a.csv").write_text(f'text\n"{"word " * 60_000}"\n')
    assert len(load_source(str(tmp_path / "a.csv"))[0]["text"]) == 300_000


def test_a_cut_document_is_one_fault(tmp_path):
    whole = json.dumps([{"prompt": f"p{i}", "completion": "c"} for i in range(30)], indent=2)
    path = tmp_path / "a.json"
    path.write_text(whole)
    assert len(load_source(str(path))) == 30
    path.write_text(whole[: whole.index("p20") + 2])
    with pytest.raises(SourceError) as told:
        load_source(str(path))
    assert str(told.value).startswith("1 line cannot be read:")
    assert "a.json, line 83 ends in the middle of a value: Unterminated string starting at (column 15)" in str(
        told.value
    )
    path.write_text(whole.replace('"p20",', '"p20"'))
    with pytest.raises(SourceError, match=r"a\.json, line 84 is not JSON: Expecting ',' delimiter \(column 5\)"):
        load_source(str(path))


def test_json_lines_under_the_name_of_a_document(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert len(load_source(str(path))) == 2
    path.write_text('{"text": "a\n{"text": "b"}\n{"text": \n')
    with pytest.raises(SourceError, match=r"2 lines cannot be read:\n.*a\.json, line 1 (.|\n)*a\.json, line 3 "):
        load_source(str(path))


def test_half_a_surrogate_pair_in_a_document(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "\\ud83d"}]')
    with pytest.raises(SourceError, match=r"a\.json, line 1 holds half of a surrogate pair .* \(entry 1 of the list"):
        load_source(str(tmp_path / "a.json"))


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            '{"text": "a", "n": ' + "7" * 5000 + "}",
            f"holds the integer {'7' * 24} of 5,000 digits, which 64 bits do not hold; write it as a text",
        ),
        ('{"text": "a", "n": 9223372036854775808}', "holds the integer 9223372036854775808 of 19 digits"),
        ('{"text": ' + "[" * 200 + "]" * 200 + "}", "is nested more than 100 deep"),
        ('{"text": ' + '{"a":' * 100000 + "1" + "}" * 100000 + "}", "is nested more than 100 deep"),
        ('{"text": "a", "text": "b"}', "names the key 'text' 2 times in one object"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "names the key 'content' 2 times"),
    ],
    ids=["5,000 digits", "65 bits", "deep", "very deep", "key twice", "inner key twice"],
)
def test_json_that_nobody_can_mean(tmp_path, suffix, line, reason):
    path = tmp_path / f"rows.{suffix}"
    path.write_text('{"text": "fine [[[[ }}"}\n' + line + "\n")
    with pytest.raises(SourceError) as refused:
        read_text_files([path], "json", streaming=False)
    assert f"{path}, line 2 {reason}" in str(refused.value)


def test_brackets_in_texts_are_no_depth_and_large_numbers_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "[" * 5000 + '"{' * 50, "n": -(2**63)}) + "\n")
    (row,) = read_text_files([path], "json", streaming=False)
    assert (len(row["text"]), row["n"]) == (5100, -(2**63))
