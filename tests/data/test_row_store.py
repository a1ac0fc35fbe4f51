"""Numbers kept by row: found again under the same tokens, whole or absent, whoever writes and whatever happens to the files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.store.row_store import AnnotatedDataset, RowStore, row_key
from tests.forked import Child


def key(number):
    return number.to_bytes(16, "little")


def values(number, size=5):
    return np.random.default_rng(number).normal(size=size).astype(np.float32)


def sample(ids, trained=None, **extra):
    return Sample(ids, np.arange(len(ids)) > 0 if trained is None else trained, **extra)


# ---- keys ---------------------------------------------------------------------------------------------------------------


def image(start: int, letter: bytes) -> ImageSpan:
    return ImageSpan(start, start + 1, letter * 16, (8, 8), (1,))


def test_a_key_is_made_of_tokens_mask_and_images_and_of_nothing_else():
    base = sample([1, 2, 3])
    assert row_key(base) == row_key(sample([1, 2, 3], row=7, group=3, scalars={"margin": 1.0}))
    assert row_key(base) == row_key(Sample(np.array([1, 2, 3], dtype=np.int64), [False, True, True]))
    others = [
        sample([1, 2, 4]), sample([1, 2]), sample([1, 2, 3, 0]), sample([1, 2, 3], [False, False, True]),
        sample([1, 2, 3], images=(image(0, b"a"),)), sample([1, 2, 3], images=(image(0, b"b"),)),
        sample([1, 2, 3], images=(image(1, b"a"),)),
    ]  # fmt: skip
    assert len({row_key(s) for s in [base, *others]}) == 8


# ---- reading and writing ------------------------------------------------------------------------------------------------


def test_rows_are_found_again_by_this_store_and_by_others(tmp_path):
    store = RowStore(tmp_path)
    store.add([(key(n), values(n, n)) for n in range(1, 20)])
    store.add([(key(20), values(20)), (key(21), values(21, 0))])
    for known in (store, RowStore(tmp_path), pickle.loads(pickle.dumps(store))):
        assert len(known) == 21
        assert key(99) not in known
        for n in range(1, 20):
            np.testing.assert_array_equal(known.read(key(n)), values(n, n))
        assert len(known.read(key(21))) == 0


def test_a_pickled_store_carries_no_values(tmp_path):
    store = RowStore(tmp_path)
    store.add([(key(1), values(1, 100_000))])
    store.read(key(1))
    assert len(pickle.dumps(store)) < 2000


def test_refresh_sees_what_another_store_wrote(tmp_path):
    first, second = RowStore(tmp_path), RowStore(tmp_path)
    second.add([(key(1), values(1))])
    assert key(1) not in first
    first.refresh()
    np.testing.assert_array_equal(first.read(key(1)), values(1))


def test_nothing_is_written_for_no_rows(tmp_path):
    RowStore(tmp_path / "cache").add([])
    assert not (tmp_path / "cache").exists()


def test_every_damage_is_noticed(tmp_path, caplog):
    """Each byte of a segment flipped, and each length cut: never a wrong number."""
    RowStore(tmp_path).add([(key(1), values(1, 3)), (key(2), values(2, 2))])
    (path,) = tmp_path.glob("*.rows")
    whole = path.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    damaged += [whole[:size] for size in range(0, len(whole), 7)] + [whole + b"\0"]
    for content in damaged:
        path.write_bytes(content)
        assert len(RowStore(tmp_path)) == 0
        assert not path.exists()
        path.with_suffix(".damaged").unlink()
    assert "is damaged" in caplog.text
    assert "will be computed again" in caplog.text


def test_a_damaged_segment_costs_its_own_rows_only(tmp_path):
    store = RowStore(tmp_path)
    store.add([(key(1), values(1))])
    (first,) = tmp_path.glob("*.rows")
    store.add([(key(2), values(2))])
    first.write_bytes(first.read_bytes()[:-1])
    again = RowStore(tmp_path)
    assert key(1) not in again
    np.testing.assert_array_equal(again.read(key(2)), values(2))
    again.add([(key(1), values(1))])
    assert key(1) in RowStore(tmp_path)


def test_a_killed_writer_leaves_no_segment(tmp_path, monkeypatch):
    def disk_is_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_is_full)
    store = RowStore(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        store.add([(key(1), values(1))])
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "abc.tmp-1").write_bytes(b"half")  # a SIGKILL leaves its staging file
    assert len(RowStore(tmp_path)) == 0


def test_several_processes_write_at_once(tmp_path):
    def write(start):
        store = RowStore(tmp_path / "cache")
        for n in range(start, start + 40):
            store.add([(key(n), values(n)), (key(1000), values(1000))])  # one row that everybody writes
            store.refresh()

    children = [Child(lambda start=start: write(start), tmp_path / f"{start}.log") for start in (0, 100, 200)]
    assert [child.wait() for child in children] == [0, 0, 0], children[0].output()
    store = RowStore(tmp_path / "cache")
    assert len(store) == 121
    for n in (0, 39, 100, 139, 200, 239, 1000):
        np.testing.assert_array_equal(store.read(key(n)), values(n))


# ---- on a dataset -------------------------------------------------------------------------------------------------------


def test_numbers_land_on_trained_tokens(tmp_path):
    one, none = sample([5, 6, 7, 8], [True, False, True, True]), sample([1, 2], [False, False])
    store = RowStore(tmp_path)
    store.add([(row_key(one), np.array([-1.0, -2.0]))])
    dataset = AnnotatedDataset([(one, none)], "reference", store)
    first, second = dataset[0]
    assert first.per_token["reference"].tolist() == [0, 0, -1, -2]
    assert second.per_token["reference"].tolist() == [0, 0]
    assert len(dataset) == 1
