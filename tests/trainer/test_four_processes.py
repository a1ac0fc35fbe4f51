"""Four processes end where one does: two copies of two shards (HSDP), four shards (FSDP2), four copies (DDP)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from safetensors.torch import load_file

from posttrain.trainer.options.processes import lay_out_processes
from tests.forked import wait_for_group
from tests.trainer.fsdp_cells import (
    CELLS,
    COPIES,
    FOUR,
    STEPS,
    assert_ends_alike,
    assert_resumed_exactly,
    final,
    start,
)

OF_EACH_METHOD = {cell.method: name for name, cell in reversed(CELLS.items()) if not cell.lora and not cell.fault}
MORE = ["sft", "sft-launched", "sft-lora", "sft-passes", "grpo-lora"]
TRIED = list(dict.fromkeys([*OF_EACH_METHOD.values(), *MORE]))
LAYOUTS = {"hsdp": {}, "fsdp": {"dp_replicate_size": 1}, "ddp": {"fsdp": None, "dp_replicate_size": 1}}
QUICK = ("sft", "grpo")


def runs(folder, names):
    """(of one process, of four): where these cells have left their runs."""
    groups = [start(1, folder / "one", names), start(FOUR, folder / "four", names)]
    for group in groups:
        wait_for_group(group, 900)
    return folder / "one", folder / "four"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return runs(tmp_path_factory.mktemp("hsdp"), list(QUICK))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    home = tmp_path_factory.mktemp("alone") / "one"
    wait_for_group(start(1, home, TRIED), 900)
    return home


@pytest.fixture(scope="module", params=LAYOUTS)
def together(request, tmp_path_factory):
    """One launch of four processes runs every method in turn."""
    home = tmp_path_factory.mktemp(request.param) / "four"
    wait_for_group(start(FOUR, home, tried_by(request.param), **LAYOUTS[request.param]), 900)
    return request.param, home


def tried_by(layout):
    """`sft-launched` asks for HSDP itself."""
    cells = {name: CELLS[name] for name in TRIED if layout == "hsdp" or not CELLS[name].launched}
    return [name for name, cell in cells.items() if layout == "ddp" or not cell.whole]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_ends_where_one_process_does_and_resumes_exactly(name, quick):
    assert_ends_alike(name, *quick)
    assert_resumed_exactly(name, quick[1], FOUR)


@pytest.mark.slow
def test_each_copy_has_all_shards(quick):
    """The first process of each copy holds the same half of the weights; the two processes of a copy hold all of them."""
    parts = [
        load_file(quick[1] / "sft" / f"checkpoint-{STEPS}" / f"optimizer_{rank}.safetensors") for rank in range(FOUR)
    ]
    for here, there in ((0, 2), (1, 3)):
        assert all(torch.equal(parts[there][key], tensor) for key, tensor in parts[here].items())
    masters = [sum(t.numel() for key, t in part.items() if "masters" in key) for part in parts[:COPIES]]
    assert sum(masters) == sum(tensor.numel() for tensor in final(quick[1], "sft").values())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_every_method_ends_where_one_process_does(name, alone, together):
    layout, home = together
    if name not in tried_by(layout):
        pytest.skip("not of this layout")
    assert_ends_alike(name, alone, home)
    if CELLS[name].resumes:
        assert_resumed_exactly(name, home, FOUR)


# ---- how it is asked for -----------------------------------------------------------------------------------------------


def options(processes=4, sharding="fsdp", copies=1, given=None):
    return SimpleNamespace(
        world_size=processes,
        sharding=sharding,
        dp_replicate_size=copies,
        sequence_parallel_size=1,
        parallelism_config=given,
    )


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        (options(), None),
        (options(copies=2), (2, 2)),
        (options(8, copies=2), (2, 4)),
        (options(given=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)), (2, 2)),
        (options(copies=2, given=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)), (2, 2)),
        (options(given=ParallelismConfig(dp_shard_size=4)), None),
        (options(sharding=None, given=ParallelismConfig(dp_replicate_size=4)), None),
    ],
)
def test_copies_and_shards(asked, sizes):
    lay_out_processes(asked)
    found = asked.parallelism_config
    assert (found and (found.dp_replicate_size, found.dp_shard_size)) == sizes


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (options(copies=3), "share evenly"),
        (options(copies=4), "in shards on several processes"),
        (options(sharding=None, copies=2), "need `fsdp=True`"),
        (options(copies=0), "`dp_replicate_size` is 0"),
        (options(given=ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)), "for 8 processes .* there are 4"),
        (options(8, copies=4, given=ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)), "set one of them"),
        (options(given=ParallelismConfig(tp_size=4)), "tensor parallel training is not offered"),
        (options(given=ParallelismConfig(cp_size=4)), "context parallel .* is not offered"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(asked, sentence):
    with pytest.raises(ValueError, match=sentence):
        lay_out_processes(asked)
