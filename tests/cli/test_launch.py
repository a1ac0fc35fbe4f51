"""The commands that start several processes, read by accelerate's and torchrun's own parsers."""

from __future__ import annotations

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch.distributed.run import get_args_parser

from posttrain.cli.errors import UsageError
from posttrain.cli.options.arguments import parse
from posttrain.cli.running import processes

RUN = ["--model_name_or_path", "m", "--dataset_name", "d.jsonl"]


def command(*words, gpus=8, monkeypatch=None):
    monkeypatch.setattr(processes, "visible_gpus", lambda ids: gpus)
    monkeypatch.setattr(processes, "_has_gpu", lambda: gpus > 0)
    given = [*RUN, *words]
    return processes.command_of(parse("sft", given), given)


@pytest.mark.parametrize("profile", processes.PROFILES)
def test_accelerate_reads_every_profile(profile, monkeypatch):
    several = [
        "--num_machines",
        "2",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "10.0.0.1",
        "--main_process_port",
        "29500",
    ]
    words = ["--accelerate_config", profile, "--num_processes", "16", *(several if profile == "hsdp" else [])]
    made = command(*words, monkeypatch=monkeypatch)
    read = launch_command_parser().parse_args(made[made.index("launch") + 1 :])
    assert (read.num_processes, read.module, read.training_script) == (16, True, "posttrain.cli.main")
    assert read.training_script_args == ["sft", *RUN, *words]
    config = load_config_from_file(read.config_file)
    sharding = {
        "fsdp2": "FSDP",
        "hsdp": "FSDP",
        "zero2": "DEEPSPEED",
        "zero3": "DEEPSPEED",
        "ddp": "MULTI_GPU",
        "single_gpu": "NO",
    }
    assert config.distributed_type.value == sharding[profile]
    if profile == "hsdp":  # a whole copy on each of two machines, in eight pieces
        read, *_ = _validate_launch_command(read)
        assert (read.num_machines, read.machine_rank, read.use_fsdp, read.use_parallelism_config) == (2, 1, True, True)
        environment = prepare_multi_gpu_env(read)
        assert environment["FSDP_VERSION"] == "2"
        sizes = [environment[f"PARALLELISM_CONFIG_DP_{name}_SIZE"] for name in ("REPLICATE", "SHARD")]
        assert sizes == ["2", "8"]


def test_all_visible_gpus_are_used_and_one_needs_no_launcher(monkeypatch):
    made = command(gpus=4, monkeypatch=monkeypatch)
    assert launch_command_parser().parse_args(made[made.index("launch") + 1 :]).num_processes == 4
    assert command(gpus=1, monkeypatch=monkeypatch) is None
    assert command(gpus=0, monkeypatch=monkeypatch) is None
    assert command("--accelerate_config", "single_gpu", gpus=8, monkeypatch=monkeypatch) is None


def test_processes_on_a_cpu_are_torchruns(monkeypatch):
    made = command("--num_processes", "2", gpus=0, monkeypatch=monkeypatch)
    read = get_args_parser().parse_args(made[made.index("torch.distributed.run") + 1 :])
    assert (read.nproc_per_node, read.standalone, read.training_script) == ("2", True, "posttrain.cli.main")


def test_a_config_of_ones_own_and_names_of_trl(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 3}))
    made = command("--config_file", str(tmp_path / "mine.yaml"), monkeypatch=monkeypatch)
    assert str(tmp_path / "mine.yaml") in made
    assert any(
        word.endswith("ddp.yaml") for word in command("--accelerate_config", "multi_gpu", monkeypatch=monkeypatch)
    )
    with pytest.raises(UsageError, match="num_machines of 2 or more"):
        command("--accelerate_config", "hsdp", "--num_processes", "8", monkeypatch=monkeypatch)


def test_one_gpu_that_is_named_is_the_one_that_is_used(monkeypatch):
    monkeypatch.setattr(processes, "_has_gpu", lambda: True)
    words = [*RUN, "--gpu_ids", "3"]
    made = processes.command_of(parse("sft", words), words)
    read, *_ = _validate_launch_command(launch_command_parser().parse_args(made[made.index("launch") + 1 :]))
    environment = prepare_simple_launcher_cmd_env(read)[1]
    assert (environment["CUDA_VISIBLE_DEVICES"], read.num_processes) == ("3", 1)
    assert made[-len(words) :] == words


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--num_processes", "0"], "num_processes"),
        (["--num_processes", "-2"], "num_processes"),
        (["--num_machines", "0"], "num_machines"),
        (["--gpu_ids", "0,,1"], "gpu_ids"),
        (["--num_processes", "3", "--num_machines", "2"], "evenly"),
    ],
)
def test_counts_that_cannot_be(words, wanted, monkeypatch):
    with pytest.raises(UsageError, match=wanted):
        command(*words, gpus=0, monkeypatch=monkeypatch)
