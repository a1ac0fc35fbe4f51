"""Preparation: what is kept, cut, dropped and counted; the cache; several workers; streams."""

from __future__ import annotations

import json
import logging
import os
import pickle
import runpy
import time

import datasets
import numpy as np
import pytest
import torch.utils.data

from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows import formats
from posttrain.data.rows.checks import BadRowsError
from posttrain.data.store import building as store_building
from posttrain.data.store import prepare
from posttrain.data.store.part_workers import build_parts
from posttrain.data.store.prepare import PreparedDataset, prepare_dataset
from posttrain.data.store.token_store import DamagedStoreError, TokenStore, trained_ranges
from tests import tiny
from tests.forked import Child, run_function
from tests.waiting import eventually

SFT = (formats.LANGUAGE_MODELLING, formats.PROMPT_COMPLETION, formats.TOKENISED)
DPO = (formats.PREFERENCE,)
REWARD = (formats.SCORED_PREFERENCE,)


@pytest.fixture(scope="module")
def renderer():
    return Renderer(tiny.tokenizer())


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def ids_of(prepared):
    return [[sample.input_ids.tolist() for sample in unit] for unit in prepared]


def texts(*sizes):
    """Rows that give samples of these sizes: one token a character, and the end-of-sequence token."""
    return [{"text": "x" * (size - 1)} for size in sizes]


# ------------------------------------------------------------------------------------------------------------ truncation


@pytest.mark.parametrize(
    ("mode", "lengths", "dropped", "truncated"),
    [
        ("keep_start", [3, 8, 8], {}, (1, 12)),
        ("keep_end", [3, 8, 8], {}, (1, 12)),
        ("drop", [3, 8], {"longer than max_length": 1}, (0, 0)),
    ],
)
def test_truncation_is_counted(mode, lengths, dropped, truncated, renderer, cache):
    options = PrepareOptions(cache_dir=cache, max_length=8, truncation_mode=mode)
    prepared = prepare_dataset(texts(3, 8, 20), SFT, renderer, options)
    assert [len(unit[0]) for unit in prepared] == lengths
    report = prepared.report
    assert (report.dropped, (report.truncated, report.truncated_tokens)) == (dropped, truncated)
    assert (report.rows_read, report.kept) == (3, len(lengths))
    assert report.tokens == sum(lengths)
    assert report.trained_tokens == sum(length - 1 for length in lengths)
    ends_on_eos = prepared[len(lengths) - 1][0].input_ids[-1] == renderer.tokenizer.eos_token_id
    assert ends_on_eos == (mode != "keep_start")


def test_truncation_by_error_names_the_row(renderer, cache):
    options = PrepareOptions(cache_dir=cache, max_length=8, truncation_mode="error")
    with pytest.raises(BadRowsError, match="row 2, column 'text': has 20 tokens, max_length is 8"):
        prepare_dataset(texts(3, 8, 20), SFT, renderer, options)
    options.on_bad_rows = "drop"
    assert prepare_dataset(texts(3, 8, 20), SFT, renderer, options).report.dropped == {"bad (too_long)": 1}


def test_pairs_need_a_trained_token_on_both_sides(renderer, cache):
    pair = {"prompt": "x" * 10, "chosen": "y", "rejected": "zz"}
    rows = [pair, {**pair, "prompt": "x" * 16}, {**pair, "prompt": "x" * 3}]
    by_start = prepare_dataset(rows, DPO, renderer, PrepareOptions(cache_dir=cache, max_length=16))
    assert by_start.rows.tolist() == [0, 2]
    assert by_start.report.dropped == {"left without a trained token by max_length": 1}
    by_end = PrepareOptions(cache_dir=cache, max_length=3, truncation_mode="keep_end")
    assert ids_of(prepare_dataset(rows, DPO, renderer, by_end))[0] == [
        renderer.encode_texts(["xy<|im_end|>"])[0].tolist(),
        renderer.encode_texts(["zz<|im_end|>"])[0].tolist(),
    ]


def test_scored_pairs_may_be_dropped_whole(renderer, cache):
    rows = [{"chosen": "x" * 9, "rejected": "y"}, {"chosen": "x", "rejected": "y"}]
    options = PrepareOptions(cache_dir=cache, max_length=8, truncation_mode="drop")
    prepared = prepare_dataset(rows, REWARD, renderer, options)
    assert prepared.rows.tolist() == [1]
    assert prepared.report.dropped == {"longer than max_length": 1}


def test_every_row_is_accounted_for(renderer, cache):
    rows = [*texts(3, 40), {"text": ""}, {"text": 5}, {"text": "a\x00"}, *texts(9)]
    options = PrepareOptions(cache_dir=cache, max_length=8, truncation_mode="drop", on_bad_rows="drop")
    report = prepare_dataset(rows, SFT, renderer, options).report
    assert report.dropped == {"bad (blank)": 1, "bad (wrong_type)": 1, "bad (nul)": 1, "longer than max_length": 2}
    assert report.kept + sum(report.dropped.values()) == report.rows_read == 6
    assert "6 rows read, 1 kept" in report.summary()


def test_file_of_bad_rows_is_that_of_this_run(renderer, cache, tmp_path):
    file = tmp_path / "out" / "bad.jsonl"
    options = PrepareOptions(cache_dir=cache, on_bad_rows="drop", bad_rows_file=file)
    prepare_dataset([*texts(3), {"text": ""}, {"text": 5}], SFT, renderer, options, name="mine")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["dataset"], line["row"], line["column"], line["kind"]) for line in lines] == [
        ("mine", 1, "text", "blank"),
        ("mine", 2, "text", "wrong_type"),
    ]
    prepare_dataset(texts(3), SFT, renderer, options)
    assert not file.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"truncation_mode": "middle"},
            "truncation_mode='middle'; it must be one of keep_start, keep_end, error, drop",
        ),
        ({"on_bad_rows": "ignore"}, "on_bad_rows='ignore' is neither 'error' nor 'drop'"),
        ({"max_length": 1}, "max_length=1"),
        ({"packing": "bfd", "max_length": None}, "packing needs max_length"),
        ({"packing": "best"}, "packing_strategy='best'"),
    ],
)
def test_options_are_checked_when_they_are_made(options, message):
    with pytest.raises(ValueError, match=message):
        PrepareOptions(**options)


def test_other_things_than_datasets_are_refused(renderer):
    with pytest.raises(ValueError, match="train has no rows"):
        prepare_dataset([], SFT, renderer)
    with pytest.raises(TypeError, match="eval is a DatasetDict"):
        prepare_dataset(datasets.DatasetDict(), SFT, renderer, name="eval")


# ------------------------------------------------------------------------------------------------------------- the cache


def test_cache_is_found_again_and_another_length_costs_nothing(renderer, cache, monkeypatch):
    dataset = datasets.Dataset.from_list(texts(3, 8, 20))
    first = prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=cache, max_length=8))
    monkeypatch.setattr(prepare, "build_store", None)
    again = prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=cache, max_length=8))
    assert again.fingerprint == first.fingerprint
    assert ids_of(again) == ids_of(first)
    shorter = prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=cache, max_length=4))
    assert shorter.fingerprint != first.fingerprint
    assert [len(unit[0]) for unit in shorter] == [3, 4, 4]
    copy = datasets.Dataset.from_list([{"id": i, **row} for i, row in enumerate(texts(3, 8, 20))])
    prepare_dataset(copy, SFT, renderer, PrepareOptions(cache_dir=cache))  # columns that are not read do not matter


def test_lengths_packing_and_order_are_decided_when_the_store_is_opened(renderer, cache, monkeypatch):
    dataset = datasets.Dataset.from_list(texts(3, 8, 20, 5))
    prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=cache))
    for name in ("encode_texts", "encode_chats", "encode_prompts"):
        monkeypatch.setattr(type(renderer), name, None)  # whoever tokenises now fails
    for mode in ("keep_start", "keep_end", "drop"):
        options = PrepareOptions(cache_dir=cache, max_length=6, truncation_mode=mode)
        cut = [len(unit[0]) for unit in prepare_dataset(dataset, SFT, renderer, options)]
        assert cut == ([3, 5] if mode == "drop" else [3, 6, 6, 5])
    for strategy, length in (("bfd", 8), ("bfd", 11), ("bfd_split", 8), ("wrapped", 9)):
        options = PrepareOptions(cache_dir=cache, max_length=length, packing=strategy)
        blocks = prepare_dataset(dataset, SFT, renderer, options)
        kept = 3 + 8 + 5 + (length if strategy == "bfd" else 20)
        assert sum(len(sample) for block in blocks for sample in block) == kept
        assert all(sum(map(len, block)) <= length for block in blocks)
    shuffled = prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=cache, shuffle_seed=1))
    assert sorted(len(unit[0]) for unit in shuffled) == [3, 5, 8, 20]


def test_cache_key_is_what_decides_the_content(renderer, cache):
    def folder(rows, accepted=SFT, with_renderer=renderer, **options):
        dataset = datasets.Dataset.from_list(rows)
        return prepare_dataset(
            dataset, accepted, with_renderer, PrepareOptions(cache_dir=cache, **options)
        ).store.folder

    chat = [{"messages": tiny.chats(1)[0]["messages"]}]
    other_template = tiny.tokenizer()
    other_template.chat_template += "{# another #}"
    folders = [
        folder(texts(3)),
        folder(texts(4)),
        folder(texts(3), append_eos=False),
        folder(texts(3), formatting_func=lambda row: row["text"] + "!"),
        folder(texts(3), formatting_func=lambda row: row["text"] + "?"),
        folder(chat),
        folder(chat, assistant_only_loss=True),
        folder(chat, chat_template_kwargs={"a": 1}),
        folder(chat, with_renderer=Renderer(other_template)),
    ]
    assert len(set(folders)) == len(folders)
    shuffled = datasets.Dataset.from_list(texts(3, 4, 5)).select([2, 0, 1])
    options = PrepareOptions(cache_dir=cache)
    assert prepare_dataset(shuffled, SFT, renderer, options).store.folder != folder(texts(3, 4, 5))
    assert (
        prepare_dataset(shuffled.flatten_indices(), SFT, renderer, options).store.folder
        == prepare_dataset(shuffled, SFT, renderer, options).store.folder
    ), "the same rows in the same order are the same data"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_damaged_cache_is_noticed_and_built_again(damage, renderer, cache, caplog):
    rows = texts(3, 8, 20)
    first = prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache))
    expected, folder = ids_of(first), first.store.folder
    tokens = folder / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    if damage == "flip":
        content[17] ^= 4
        tokens.write_bytes(content)
    elif damage == "cut":
        tokens.write_bytes(content[:-1])
    elif damage == "remove":
        (folder / "ranges.bin").unlink()
    else:
        (folder / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        again = prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache))
    assert "It is built again" in caplog.text
    assert ids_of(again) == expected
    TokenStore(folder)


def test_every_flipped_bit_of_a_manifest_is_noticed(renderer, cache):
    """Or changes nothing, as in a blank: what is opened is what was written."""
    folder = prepare_dataset(texts(3, 8, 20), SFT, renderer, PrepareOptions(cache_dir=cache)).store.folder
    manifest = folder / "manifest.json"
    content, facts = manifest.read_bytes(), TokenStore(folder).facts
    noticed = 0
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 7
        manifest.write_bytes(changed)
        try:
            assert TokenStore(folder).facts == facts
        except DamagedStoreError:
            noticed += 1
    assert noticed > len(content) // 3 * 0.7
    manifest.write_bytes(content.replace(b'"facts"', b'"fACts"'))
    rebuilt = prepare_dataset(texts(3, 8, 20), SFT, renderer, PrepareOptions(cache_dir=cache))
    assert rebuilt.store.facts == facts


def test_an_interrupted_build_leaves_nothing(renderer, cache, monkeypatch):
    rows = texts(3, 8, 20)
    with monkeypatch.context() as patched:
        patched.setattr(Renderer, "encode_texts", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache))
    assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])
    assert len(prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache))) == 3


def test_problems_are_remembered_with_the_cache(renderer, cache, monkeypatch):
    rows = [*texts(3), {"text": ""}]
    for name in ("train", "eval"):
        with pytest.raises(BadRowsError, match=f"{name}, row 1, column 'text': is empty"):
            prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache), name=name)
        monkeypatch.setattr(store_building, "build_store", None)


def test_only_one_process_builds(renderer, cache, tmp_path):
    """Four processes at once: one builds, the others wait and read."""
    rows = tiny.chats(3000)

    def work():
        original = prepare.build_store

        def noted(*args):
            (tmp_path / f"built-by-{os.getpid()}").touch()
            return original(*args)

        prepare.build_store = noted
        assert len(prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache))) == 3000

    children = [Child(work, tmp_path / f"{number}.log") for number in range(4)]
    assert [child.wait() for child in children] == [0] * 4, "\n".join(child.output() for child in children)
    assert len(list(tmp_path.glob("built-by-*"))) == 1


# --------------------------------------------------------------------------------------------------------------- workers


@pytest.fixture
def helped(monkeypatch):
    """Small datasets are prepared by several processes too, as large ones are, and this one waits until another takes part."""
    here = os.getpid()

    def by_both(build_part, use_part, num_parts, num_workers, folder):
        def build(number):
            build_part(number)
            if os.getpid() != here:
                (folder.parent / "helped").touch()
            elif num_workers > 1:
                eventually((folder.parent / "helped").exists)

        build_parts(build, use_part, num_parts, num_workers, folder)

    monkeypatch.setattr(store_building, "ROWS_PER_WORKER", 500)
    monkeypatch.setattr(store_building, "build_parts", by_both)


@pytest.mark.parametrize("where", ["a list", "memory", "a file"])
def test_several_workers_give_the_same_store(renderer, tmp_path, helped, where):
    dataset = [*tiny.chats(2000), {"messages": None}, *tiny.chats(3)]
    if where != "a list":
        dataset = datasets.Dataset.from_list(dataset)
    if where == "a file":
        dataset.save_to_disk(tmp_path / "rows")
        dataset = datasets.load_from_disk(tmp_path / "rows")
    reports, files = [], []
    for num_proc in (1, 3 if where == "a file" else 2):  # a helper takes seconds to start
        options = PrepareOptions(cache_dir=tmp_path / str(num_proc), on_bad_rows="drop")
        prepared = prepare_dataset(dataset, SFT, renderer, options, num_proc=num_proc)
        reports.append((prepared.report.dropped, prepared.report.tokens, prepared.rows.tolist()))
        files.append({p.name: p.read_bytes() for p in prepared.store.folder.iterdir() if p.name != "manifest.json"})
    assert reports[0] == reports[1]
    assert files[0] == files[1]
    assert reports[0][0] == {"bad (null)": 1}


def test_script_without_a_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from posttrain.data.rows import formats as f\n"
        "from posttrain.data.options import PrepareOptions\n"
        "from posttrain.data.store.prepare import prepare_dataset\n"
        "from posttrain.data.render.renderer import Renderer\n"
        "from tests import tiny\n"
        "from tests.waiting import eventually\n"
        "from pathlib import Path\n"
        "import os\n"
        f"helped, here = Path({str(tmp_path / 'helped')!r}), os.getpid()\n"
        "def text(row):\n"
        "    helped.touch() if os.getpid() != here else row['n'] < 500 or eventually(helped.exists)\n"
        "    return row['text']\n"
        "rows = [{'text': 'some words', 'n': n} for n in range(12_000)]\n"
        f"options = PrepareOptions(cache_dir={str(tmp_path / 'cache')!r}, formatting_func=text)\n"
        "print(len(prepare_dataset(rows, (f.LANGUAGE_MODELLING,), Renderer(tiny.tokenizer()), options, num_proc=2)))\n"
    )
    ran = run_function(lambda: runpy.run_path(str(script), run_name="__main__"), cwd=tmp_path)
    assert ran.stdout == "12000\n", ran.stderr


# --------------------------------------------------------------------------------------------------------------- reading


def test_units_know_their_rows_and_are_views(renderer, cache):
    rows = [{"text": ""}, *texts(3, 8)]
    prepared = prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache, on_bad_rows="drop"))
    assert [unit[0].row for unit in prepared] == prepared.rows.tolist() == [1, 2]
    assert not prepared[0][0].input_ids.flags.owndata
    assert prepared[-1][0].row == 2
    with pytest.raises(IndexError, match="Unit 2 of the 2 of train"):
        prepared[2]
    assert prepared.unit_lengths.tolist() == [3, 8]


def test_order_is_seeded(renderer, cache):
    rows = texts(*range(2, 30))
    orders = [
        prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache, shuffle_seed=seed)).rows.tolist()
        for seed in (None, 1, 1, 2)
    ]
    assert orders[0] == sorted(orders[1]) == sorted(orders[3])
    assert orders[1] == orders[2]
    assert orders[1] not in (orders[0], orders[3])


def test_packed_dataset(renderer, cache):
    rows = texts(20, 3, 8, 5)
    options = PrepareOptions(cache_dir=cache, max_length=8, packing="bfd")
    packed = prepare_dataset(rows, SFT, renderer, options)
    assert [[(s.row, len(s)) for s in unit] for unit in packed] == [[(0, 8)], [(2, 8)], [(3, 5), (1, 3)]]
    assert (packed.report.truncated, packed.report.kept) == (1, 4)
    split = prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache, max_length=8, packing="bfd_split"))
    assert split.unit_lengths.sum() == 36
    wrapped = prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=cache, max_length=8, packing="wrapped"))
    assert [len(unit[0]) for unit in wrapped] == [8, 8, 8, 8, 4]
    assert len({packed.fingerprint, split.fingerprint, wrapped.fingerprint}) == 3


def test_dataset_travels_to_loader_workers(renderer, cache):
    prepared = prepare_dataset(texts(3, 8, 20), SFT, renderer, PrepareOptions(cache_dir=cache, max_length=6))
    copy: PreparedDataset = pickle.loads(pickle.dumps(prepared))
    assert ids_of(copy) == ids_of(prepared)
    assert len(pickle.dumps(prepared.store)) < 500, "the tokens stay in their files"


def test_trained_ranges():
    masks = [[True, True, False, True], [], [True], [False, False], [True]]
    ranges, counts = trained_ranges([np.array(mask, dtype=bool) for mask in masks])
    assert ranges.tolist() == [[0, 2], [3, 4], [0, 1], [0, 1]]
    assert counts.tolist() == [2, 0, 1, 0, 1]


def test_transformed_and_formatted_datasets(renderer, cache):
    dataset = datasets.Dataset.from_list(texts(3, 8))
    expected = ids_of(prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=cache)))
    as_numpy = dataset.with_format("numpy")
    assert ids_of(prepare_dataset(as_numpy, SFT, renderer, PrepareOptions(cache_dir=cache))) == expected
    louder = dataset.with_transform(lambda batch: {"text": [text + "!" for text in batch["text"]]})
    lengths = [len(unit[0]) for unit in prepare_dataset(louder, SFT, renderer, PrepareOptions(cache_dir=cache))]
    assert lengths == [4, 9]


# --------------------------------------------------------------------------------------------------------------- streams


def stream_of(rows):
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("mode", ["keep_start", "keep_end", "drop"])
def test_stream_gives_what_the_dataset_gives(mode, renderer, cache):
    rows = [*texts(3, 8, 20), *tiny_pairs(250)]
    options = PrepareOptions(cache_dir=cache, max_length=12, truncation_mode=mode, on_bad_rows="drop")
    whole = prepare_dataset(rows, SFT, renderer, options)
    stream = prepare_dataset(stream_of(rows), SFT, renderer, options)
    for _ in range(2):
        units = list(stream)
        assert [[s.input_ids.tolist() for s in unit] for unit in units] == ids_of(whole)
        assert [unit[0].row for unit in units] == whole.rows.tolist()
        for count in ("rows_read", "kept", "dropped", "truncated", "truncated_tokens", "tokens", "trained_tokens"):
            assert getattr(stream.report, count) == getattr(whole.report, count), count


def tiny_pairs(count):
    return [{"text": row["prompt"] + row["chosen"]} for row in tiny.pairs(count)]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_stream_is_packed(strategy, renderer, cache):
    rows = tiny_pairs(2_500)
    options = PrepareOptions(cache_dir=cache, max_length=512, packing=strategy)
    stream = prepare_dataset(stream_of(rows), SFT, renderer, options)
    whole = prepare_dataset(rows, SFT, renderer, options)
    blocks = [sum(map(len, unit)) for unit in stream]
    assert sum(blocks) == whole.unit_lengths.sum()
    assert max(blocks) == 512
    assert len(blocks) < 1.01 * len(whole) + 3
    if strategy == "wrapped":
        assert set(blocks[:-1]) == {512}


def test_stream_in_loader_workers(renderer):
    dataset = datasets.Dataset.from_list(tiny_pairs(40)).to_iterable_dataset(num_shards=2)
    stream = prepare_dataset(dataset, SFT, renderer, PrepareOptions())
    loader = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="forkserver")
    assert len(list(loader)) == 40


def test_empty_stream_and_shuffled_stream_are_refused(renderer):
    with pytest.raises(ValueError, match="train has no rows"):
        prepare_dataset(stream_of([]), SFT, renderer)
    with pytest.raises(ValueError, match="shuffle it with its own"):
        prepare_dataset(stream_of(texts(3)), SFT, renderer, PrepareOptions(shuffle_seed=1))


# ----------------------------------------------------------------------------------------------------------------- speed


def timed_check(count, renderer, cache):
    rows = [{"messages": chat["messages"] * 2} for chat in tiny.chats(count)]
    dataset = datasets.Dataset.from_list(rows)
    start, before = time.perf_counter(), time.process_time()
    prepared = prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=cache), num_proc=2)
    assert len(prepared) == count
    return time.perf_counter() - start, time.process_time() - before


def test_chat_rows_are_checked_fast(renderer, cache):
    """A twentieth of the bar: 100,000 rows of four turns checked, rendered and tokenised in two minutes."""
    # Of this processor: other work on the machine does not count.
    assert timed_check(5_000, renderer, cache)[1] < 120 / 20


@pytest.mark.trust
def test_hundred_thousand_chat_rows_in_two_minutes(renderer, cache):
    assert timed_check(100_000, renderer, cache)[0] < 120


def test_as_many_workers_as_asked_for_or_as_there_are_cores_but_none_for_few_rows():
    many = store_building.ROWS_PER_WORKER * 1000
    assert store_building._num_workers(many, None) == len(os.sched_getaffinity(0))
    assert store_building._num_workers(many, 3) == 3
    assert store_building._num_workers(store_building.ROWS_PER_WORKER * 2 - 1, None) == 1


@pytest.mark.parametrize(
    ("rows", "workers"), [(1, 1), (999, 1), (50_000, 1), (1000, 2), (25_000, 16), (10**6, 4), (10**8, 64)]
)
def test_shares_hold_every_row_once_and_grow_smaller(rows, workers):
    shares = store_building._shares(rows, workers)
    sizes = [stop - start for start, stop in shares]
    assert [start for start, _ in shares] == [0, *(stop for _, stop in shares[:-1])]
    assert shares[-1][1] == rows
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= max(store_building.MAX_ROWS, rows / 256)
    assert len(shares) < 1024  # a page of numbers: the least that a pipe holds
    if workers > 1:  # nobody waits for long at the end, and nobody has nothing to do
        assert sizes[-1] <= max(store_building.MIN_ROWS, rows / 20_000)
        assert len(shares) >= min(workers, rows // store_building.MIN_ROWS)


def test_a_repeated_id_names_the_first_row_that_has_it_whoever_read_it(renderer, tmp_path, helped):
    rows = [{**row, "id": "same" if i % 700 == 0 else str(i)} for i, row in enumerate(tiny.chats(3000))]
    found = []
    for num_proc in (1, 2):
        options = PrepareOptions(cache_dir=tmp_path / str(num_proc), row_id_column="id", on_bad_rows="drop")
        prepared = prepare_dataset(rows, SFT, renderer, options, num_proc=num_proc)
        found.append((prepared.store.folder / "problems.jsonl").read_text())
    assert found[0] == found[1]
    assert found[0].count("repeats the id of row 0") == 4
