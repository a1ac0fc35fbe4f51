"""`posttrain explain`: its figures are those that a real run then counts, for 20 configurations of three methods."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from posttrain.cli.commands.explain import Explained, counts_lines
from posttrain.cli.options.arguments import parse
from posttrain.cli.options.needs import notes_on_servers
from posttrain.cli.running.assemble import trainer_of
from posttrain.models.memory.fit import ENOUGH_TOKENS
from posttrain.trainer.distilling_trainer import lands_on_policy
from posttrain.trainer.report.display import METRICS_FILE
from tests import tiny
from tests.cli import test_broken_configs as broken
from tests.cli.runs import flags, folder_with_inputs, options_of, posttrain

REWARD = '''
from pathlib import Path


def length(completions, **columns):
    """Longer is better; every call leaves a line."""
    with open("calls.txt", "a") as file:
        file.write(f"{len(completions)}\\n")
    return [float(len(text)) for text in completions]
'''
WORDS = ["amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heath", "inlet", "jetty", "knoll"]


def text(number: int, size: int) -> str:
    return " ".join(WORDS[(number * 5 + k * k) % len(WORDS)] for k in range(size))


UNEVEN = {
    "sft": [{"prompt": f"Say {i}:", "completion": " " + text(i, 1 + i * i % 7)} for i in range(23)],
    "texts": [{"text": text(i, 1 + (3 * i) % 11)} for i in range(19)],
    "dpo": [
        {"prompt": f"Say {i}:", "chosen": " " + text(i, 1 + i % 5), "rejected": " no " + text(i + 1, i % 3)}
        for i in range(21)
    ],
    "grpo": [{"prompt": f"Say {text(i, 1 + i % 4)}:"} for i in range(11)],
}
EVERY_STEP = {"logging_steps": 1, "max_steps": -1, "disable_tqdm": True}
SMALL = {"per_device_train_batch_size": 2, "num_train_epochs": 1}
GROUPS = {"num_generations": 4, "per_device_train_batch_size": 4, "reward_workers": 0, "num_train_epochs": 1}

CASES = {
    # name: (method, rows, options)
    "sft: a step a batch": ("sft", "sft", SMALL),
    "sft: accumulation with a partial last step": ("sft", "sft", {**SMALL, "gradient_accumulation_steps": 4}),
    "sft: two and a half epochs": ("sft", "sft", {**SMALL, "num_train_epochs": 2.5, "gradient_accumulation_steps": 3}),
    "sft: the rest is dropped": ("sft", "sft", {**SMALL, "per_device_train_batch_size": 5, "dataloader_drop_last": True}),
    "sft: max_steps inside of the second epoch": ("sft", "sft", {**SMALL, "max_steps": 17, "warmup_steps": 0.2}),
    "sft: packed": ("sft", "texts", {**SMALL, "packing": True, "max_length": 48, "num_train_epochs": 2}),
    "sft: packed, split": (
        "sft",
        "texts",
        {**SMALL, "packing": True, "packing_strategy": "bfd_split", "max_length": 24, "gradient_accumulation_steps": 2},
    ),
    "sft: wrapped": (
        "sft", "texts", {**SMALL, "packing": True, "packing_strategy": "wrapped", "max_length": 32},
    ),
    "sft: cut and trained on whole rows": ("sft", "sft", {**SMALL, "max_length": 20, "completion_only_loss": False}),
    "sft: too long ones dropped, passes, evaluations and checkpoints": (
        "sft",
        "sft",
        {
            **SMALL, "max_length": 28, "truncation_mode": "drop", "per_device_train_batch_size": 4, "save_strategy": "steps",
            "save_steps": 2, "save_total_limit": 2, "save_only_model": True, "eval_strategy": "steps", "eval_steps": 3,
            "test_split_size": 3, "max_tokens_per_pass": 60, "logging_steps": 2, "warmup_steps": 2,
        },
    ),
    "sft: grouped by length": (
        "sft", "sft", {**SMALL, "train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 2},
    ),
    "dpo: pairs": ("dpo", "dpo", {**SMALL, "gradient_accumulation_steps": 2, "num_train_epochs": 2}),
    "dpo: cut, dropped rest, several losses": (
        "dpo",
        "dpo",
        {
            **SMALL, "max_length": 16, "dataloader_drop_last": True, "loss_type": ["sigmoid", "sft"],
            "gradient_accumulation_steps": 3,
        },
    ),
    "dpo: precomputed reference, evaluation by epoch": (
        "dpo",
        "dpo",
        {
            **SMALL, "precompute_ref_log_probs": True, "eval_strategy": "epoch", "test_split_size": 4, "num_train_epochs": 2,
            "save_strategy": "epoch", "save_only_model": True,
        },
    ),
    "dpo: coupled pairs in passes": (
        "dpo", "dpo", {**SMALL, "loss_type": ["aot"], "max_tokens_per_pass": 70, "gradient_accumulation_steps": 2},
    ),
    "grpo: a generation a step": ("grpo", "grpo", {**GROUPS, "num_train_epochs": 2}),
    "grpo: accumulation, several epochs": ("grpo", "grpo", {**GROUPS, "gradient_accumulation_steps": 2, "num_train_epochs": 3}),
    "grpo: two passes over each generation": ("grpo", "grpo", {**GROUPS, "num_iterations": 2, "beta": 0.1}),
    "grpo: steps_per_generation": (
        "grpo", "grpo", {**GROUPS, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 5},
    ),
    "grpo: generation_batch_size, a reward a sample": (
        "grpo",
        "grpo",
        {**GROUPS, "per_device_train_batch_size": 2, "generation_batch_size": 8, "reward_batching": "sample", "max_steps": 7},
    ),
    "grpo: a step that takes parts of two generations": (
        "grpo",
        "grpo",
        {**GROUPS, "steps_per_generation": 3, "gradient_accumulation_steps": 2, "num_iterations": 1, "reward_batching": "all"},
    ),
    "ppo: mini-batches, epochs": (
        "ppo",
        "grpo",
        {**GROUPS, "num_generations": 1, "gradient_accumulation_steps": 2, "num_mini_batches": 2, "num_ppo_epochs": 2},
    ),
    "rloo: evaluation": (
        "rloo",
        "grpo",
        {**GROUPS, "num_generations": 2, "eval_strategy": "steps", "eval_steps": 4, "test_split_size": 3, "eval_on_start": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = folder_with_inputs(tmp_path_factory.mktemp("explain"))
    (folder / "rewards_of_test.py").write_text(REWARD, encoding="utf-8")
    for name, rows in UNEVEN.items():
        (folder / f"uneven_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture
def here(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    (inputs / "calls.txt").unlink(missing_ok=True)
    return inputs


def words_of(method: str, rows: str, changes: dict, folder: str = "out") -> list[str]:
    options = options_of(method) | EVERY_STEP | {"dataset_name": f"uneven_{rows}.jsonl", "output_dir": folder} | changes
    return flags(options)


class Spy:
    """Counts, from outside, what a run does."""

    def __init__(self, trainer) -> None:
        self.trainer, self.steps = trainer, defaultdict(lambda: defaultdict(int))
        self.generations = self.completions = self.prompt_tokens = 0
        self.prompts = set()
        self._hear(trainer, "loss", self._of_loss)
        self._hear(trainer, "training_step", self._of_micro_batch)
        if hasattr(trainer, "collector"):
            self._hear(trainer.collector, "collect", self._of_generation, after=True)

    @staticmethod
    def _hear(owner, name, hear, after=False) -> None:
        real = getattr(owner, name)

        def heard(*args, **kwargs):
            result = real(*args, **kwargs)
            hear(*args, result) if after else hear(*args)
            return result

        setattr(owner, name, heard)

    def _of_loss(self, batch, *_) -> None:
        if torch.is_grad_enabled():
            step = self.steps[self.trainer.state.global_step]
            step["rows"] += batch.num_units if not hasattr(self.trainer, "collector") else batch.num_samples
            step["samples"] += batch.num_samples
            step["tokens"] += batch.num_tokens
            step["trained"] += batch.num_trained
            step["passes"] += 1

    def _of_micro_batch(self, *_) -> None:
        self.steps[self.trainer.state.global_step]["micro_batches"] += 1

    def _of_generation(self, requests, rows, params, collected) -> None:
        if rows is self.trainer.train_dataset:
            self.generations += 1
            self.completions += len(requests)
            self.prompts |= {request.number for request in requests}
            self.prompt_tokens += sum(len(r.sample) - r.sample.num_trained for r in collected.rollouts)

    def range(self, name: str) -> tuple[int, float, int, int]:
        values = [step[name] for step in self.steps.values()]
        return min(values), sum(values) / len(values), max(values), sum(values)


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_run(here, name, tmp_path):
    method, rows, changes = CASES[name]
    config = parse(method, words_of(method, rows, changes, str(tmp_path / "out")))
    told = Explained(config).counts
    trainer = trainer_of(parse(method, words_of(method, rows, changes, str(tmp_path / "out"))))
    spy = Spy(trainer)
    trainer.train()
    history, online = trainer.state.log_history, told.rollouts is not None
    logged = [entry for entry in history if "learning_rate" in entry]
    assert told.optimizer_steps == trainer.state.global_step == len(spy.steps)
    assert told.epochs == pytest.approx(trainer.state.epoch, abs=1e-12)
    assert told.logs == len(logged)
    assert told.evaluations == len([entry for entry in history if "eval_runtime" in entry])
    assert told.checkpoints_kept == len(list((tmp_path / "out").glob("checkpoint-*")))
    if changes.get("warmup_steps") and changes.get("logging_steps", 1) == 1:
        rates = [entry["learning_rate"] for entry in logged]
        assert told.warmup_steps == rates.index(max(rates))
    exact = ("rows", "samples", "micro_batches", "passes") + (() if online else ("tokens", "trained"))
    for figure in exact:
        found = told.per_step[figure]
        assert (found.smallest, found.mean, found.largest, found.total) == spy.range(figure), figure
    if online:
        assert_rollouts(told, spy, here, trainer, tmp_path / "out")
    elif changes.get("logging_steps", 1) == 1:
        assert told.per_step["tokens"].total == logged[-1]["num_tokens"]
        assert max(b["num_tokens"] - a["num_tokens"] for a, b in zip([{"num_tokens": 0}, *logged], logged)) == (
            told.per_step["tokens"].largest
        )


def assert_rollouts(told, spy: Spy, here: Path, trainer, folder: Path) -> None:
    import pyarrow.dataset

    rollouts = told.rollouts
    assert rollouts.generations == spy.generations
    assert rollouts.prompts == len(spy.prompts)
    assert rollouts.completions == spy.completions
    assert rollouts.prompt_tokens == spy.prompt_tokens
    stored = pyarrow.dataset.dataset(folder / "rollouts").to_table().to_pylist()
    assert rollouts.completions == len(stored)
    logged = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry][-1]
    assert rollouts.prompt_tokens < logged <= rollouts.most_tokens
    for figure in ("smallest", "mean", "largest", "total"):
        assert (
            getattr(told.per_step["tokens"], figure)
            >= dict(zip(("smallest", "mean", "largest", "total"), spy.range("tokens")))[figure]
        )
    calls = [int(line) for line in (here / "calls.txt").read_text().split()]
    if told.evaluations:  # which calls rewards too, once for each group
        evaluated = told.evaluations * told.eval_rows
        assert rollouts.reward_calls + evaluated == len(calls)
        assert rollouts.completions + told.evaluations * told.eval_completions == sum(calls)
    else:
        assert rollouts.reward_calls == len(calls)
        assert rollouts.completions == sum(calls)


def test_passes_of_rollouts_are_at_most_those_told(here, tmp_path):
    """Rollouts are cut into passes as if each were as long as it may be."""
    words = words_of("grpo", "grpo", {**GROUPS, "max_tokens_per_pass": 40}, str(tmp_path / "out"))
    told = Explained(parse("grpo", words)).counts.per_step["passes"]
    trainer = trainer_of(parse("grpo", words))
    spy = Spy(trainer)
    trainer.train()
    assert (told.smallest, told.largest, told.total) == (1, 2, 16)
    assert told.total >= spy.range("passes")[3] >= len(spy.steps) == 11


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"save_strategy": "steps", "save_steps": 4, "save_only_model": True},
        {"eval_strategy": "steps", "eval_steps": 3, "test_split_size": 3},
        {"eval_strategy": "epoch", "test_split_size": 3, "metric_for_best_model": "evals/now_and_then/score"},
    ],
)
def test_tasks_are_judged_as_often_as_said(here, changes, tmp_path):
    task = {"data": "uneven_grpo.jsonl", "reward": "rewards_of_test.py:length", "max_new_tokens": 3}
    evals = [{**task, "name": "with_the_run", "samples": 2}, {**task, "name": "now_and_then", "every": 5, "limit": 4}]
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({"evals": evals}), encoding="utf-8")
    words = [str(file), *words_of("sft", "sft", {**SMALL, **changes}, str(tmp_path / "out"))]
    found = Explained(parse("sft", words))
    first, second = found.counts.tasks
    assert (first.prompts, first.answers, second.prompts, second.answers) == (11, 22, 4, 4)
    assert first.most_tokens == 3 * 22 * first.times
    trainer = trainer_of(parse("sft", words))
    trainer.train()
    for told in (first, second):
        name = f"evals/{told.name}/score"
        assert told.times == len([entry for entry in trainer.state.log_history if name in entry]), told
    assert (
        f"now_and_then: 4 answers to 4 prompts, {second.times} times; at most {second.times * 12} tokens"
        in "\n".join(counts_lines(found))
    )


def test_there_are_twenty_configurations_of_the_three_methods():
    assert len([name for name in CASES if name.startswith(("sft", "dpo", "grpo"))]) >= 20


# ---- the command -----------------------------------------------------------------------------------------------------------


def explained(method: str, rows: str, changes: dict, gpu: int | None = None) -> Explained:
    return Explained(parse(method, words_of(method, rows, changes)), gpu)


def test_the_screen_and_the_file_say_the_same(here, capsys):
    words = words_of("dpo", "dpo", {**SMALL, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.25})
    assert posttrain("explain", "dpo", "--gpu", "24GB", "--json", "told.json", *words) == 0
    shown, told = capsys.readouterr().out, json.loads((here / "told.json").read_text())
    assert told["counts"]["optimizer_steps"] == 11
    assert "optimizer steps  11 (11 an epoch, 1 epochs" in shown
    assert "loss = -log(sigmoid(0.25 * d))" in shown
    assert "+ 0.5 * [-logp_c]" in shown
    assert "1 to 2 pairs of the step" in shown
    assert "reference: a frozen copy" in shown
    assert "On 24 GB it fits" in shown
    assert f"{told['counts']['per_step']['tokens']['total']:,}" in shown
    assert set(told["memory"]["phases"]) == {"load", "update"}


def test_what_the_run_will_not_find_is_said(here, capsys, monkeypatch):
    trackers = "transformers.integrations.integration_utils.get_available_reporting_integrations"
    monkeypatch.setattr(trackers, lambda: [])
    words = words_of("grpo", "grpo", {**GROUPS, "reward_funcs": ["accuracy_reward"], "report_to": "wandb"})
    assert posttrain("explain", "grpo", *words) == 0
    shown = capsys.readouterr().out
    assert "Reward accuracy_reward needs the argument 'solution'" in shown
    assert "`report_to` wandb needs a package that is not installed on this machine: pip install wandb." in shown


def test_a_server_that_shares_the_gpu_is_said(here, monkeypatch):
    changes = {**GROUPS, "use_vllm": True, "vllm_mode": "server"}
    monkeypatch.setattr("posttrain.cli.running.processes.visible_gpus", lambda ids: 1)
    (note,) = [note for note in explained("grpo", "grpo", changes).counts.notes if "127.0.0.1:8000" in note]
    assert "shares a GPU with the trainer, which takes all 1 of this machine" in note
    assert "may share a GPU" in notes_on_servers(["http://localhost:1"], 1, 2)[0]
    assert notes_on_servers(["http://elsewhere:1"], 1, 1) == []


def test_a_file_that_names_its_method(here, capsys):
    import yaml

    options = options_of("grpo") | EVERY_STEP | GROUPS | {"dataset_name": "uneven_grpo.jsonl", "method": "grpo"}
    (here / "grpo.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")
    assert posttrain("explain", "grpo.yaml", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["counts"]["rollouts"]["prompts"] == 11


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "sft", "--gpu", "large"], ["--gpu", "'large'", "24GB"]),
        (["explain", "sft", "--gpu"], ["--gpu", "80GB"]),
        (["explain", "nothing.yaml"], ["nothing.yaml"]),
        (["explain", "sft", "--lerning_rate", "1"], ["lerning_rate", "learning_rate"]),
        (["explain", "grpo", *words_of("grpo", "grpo", {**GROUPS, "num_generations": 3})], ["num_generations"]),
        (["explain", "dpo", *words_of("dpo", "sft", SMALL)], ["chosen"]),
        (
            [
                "explain",
                "sft",
                *words_of("sft", "sft", {"per_device_train_batch_size": 99, "dataloader_drop_last": True}),
            ],
            ["99"],
        ),
    ],
)
def test_what_cannot_be_explained_ends_with_a_sentence(here, capsys, words, said):
    assert posttrain(*words) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error


@pytest.mark.parametrize("case", broken.CASES)
def test_what_cannot_be_trained_cannot_be_explained(broken_inputs, monkeypatch, capsys, tmp_path, case):
    """The list of tests/cli/test_broken_configs.py: the same exit code, and a sentence with the same words in it."""
    import yaml

    method, changes, said = broken.CASES[case]
    options = {name: value for name, value in {**options_of(method), **changes}.items() if value is not None}
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(options | {"output_dir": str(tmp_path / "out")}), encoding="utf-8"
    )
    monkeypatch.chdir(broken_inputs)
    assert posttrain("explain", method, str(tmp_path / "run.yaml")) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said), error
    assert "Traceback" not in error


broken_inputs = broken.inputs


def test_several_processes_share_the_rows(here):
    alone = explained("sft", "sft", {**SMALL, "per_device_train_batch_size": 6}).counts
    told = explained("sft", "sft", {**SMALL, "per_device_train_batch_size": 2, "num_processes": 3})
    assert told.counts.per_step["rows"] == alone.per_step["rows"]
    assert told.counts.per_step["tokens"] == alone.per_step["tokens"]
    assert told.counts.per_step["passes"].largest == 3
    assert told.counts.processes == 3
    assert told.args.world_size == 1  # what stood for three processes is gone
    groups = explained("grpo", "grpo", {**GROUPS, "per_device_train_batch_size": 2, "num_processes": 2}).counts
    one = explained("grpo", "grpo", GROUPS).counts
    assert (groups.rollouts.prompts, groups.rollouts.completions) == (one.rollouts.prompts, one.rollouts.completions)
    # A group on two processes is judged in two calls.
    assert groups.rollouts.reward_calls == 2 * one.rollouts.reward_calls


def test_a_stream_is_read_as_far_as_its_steps(here):
    streamed = {**SMALL, "streaming": True, "max_steps": 4, "train_sampling_strategy": "sequential"}
    told = explained("sft", "sft", streamed).counts
    stored = explained("sft", "sft", {**streamed, "streaming": False}).counts
    assert told.rows_of_dataset is None
    assert told.optimizer_steps == 4
    assert told.per_step["tokens"] == stored.per_step["tokens"]
    told, stored = (explained("sft", "sft", {**part, "num_processes": 2}).counts.per_step for part in (
        streamed, {**streamed, "streaming": False}
    ))  # fmt: skip
    assert told == stored  # rows, samples, tokens, trained tokens, micro-batches and passes of both processes


# ---- memory and work -------------------------------------------------------------------------------------------------------


@pytest.fixture
def seven_billion(here):
    from transformers import Qwen2Config

    config = Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(here / "qwen7b")
    tiny.tokenizer().save_pretrained(here / "qwen7b")
    return {"model_name_or_path": "./qwen7b", "use_cpu": False}


def test_memory_of_a_model_without_weights(seven_billion):
    count = 7_615_616_512  # of Qwen2.5 7B
    told = explained("sft", "sft", {**SMALL, **seven_billion, "gradient_accumulation_steps": 2})
    phases = {phase.name: phase for phase in told.memory.phases}
    assert told.shape.parameters == told.shape.trained == count
    assert phases["load"].terms == {"weights": 2 * count}
    update = phases["update"].terms
    assert (update["weights"], update["masters"], update["moments"]) == (2 * count, 4 * count, 8 * count)
    assert update["gradients"] == 4 * count  # at the head, which is the worst moment, no bfloat16 gradient lives
    assert phases["update"].binding == "moments"


@pytest.mark.parametrize("gigabytes", [20, 24, 28, 32])
def test_what_the_plan_chooses_is_said_to_fit(seven_billion, gigabytes):
    """Nine tenths of what the weights leave free may be used, by the plan and by the verdict about it."""
    told = explained("sft", "sft", {**SMALL, **seven_billion, "use_peft": True}, gpu=gigabytes * 2**30).memory
    assert "too much" not in told.sentence
    assert told.worst.peak <= told.room < gigabytes * 2**30


def test_the_largest_settings_fit_and_the_next_do_not(seven_billion):
    told = explained("sft", "sft", {**SMALL, **seven_billion, "use_peft": True}, gpu=24 * 2**30)
    model = told.memory
    for level in ("none", "selective", "full"):
        tokens = model.largest_pass(level)
        assert model.update(tokens, level).peak <= model.room
        assert model.update(tokens + 2, level).peak > model.room
    fitting = [told.memory.fitting[level]["tokens"] for level in ("none", "selective", "full")]
    assert fitting == sorted(fitting)
    assert fitting[0] > 0


def test_gradients_of_several_processes_have_ddps_buckets(seven_billion):
    count = 7_615_616_512
    told = explained("sft", "sft", {**SMALL, **seven_billion, "num_processes": 2}).memory.phases[-1]
    assert told.terms["gradients"] == (4 + 2) * count  # sums in float32, and buckets in bfloat16 as in a run's own plan


def test_the_plan_for_a_gpu_is_carried_out_before_its_memory_is_told(seven_billion, here):
    """A micro-batch that is cut into passes adds gradients up, though the step has one micro-batch only."""
    rows = "".join(json.dumps({"text": "a" * 1000}) + "\n" for _ in range(64))
    (here / "uneven_long.jsonl").write_text(rows, encoding="utf-8")
    changes = {
        **SMALL,
        **seven_billion,
        "use_peft": True,
        "per_device_train_batch_size": 64,
        "completion_only_loss": None,
    }
    whole, cut = (explained("sft", "long", changes, gpu) for gpu in (None, 24 * 2**30))
    assert whole.memory.tokens == 64 * 1001 > cut.memory.tokens >= ENOUGH_TOKENS
    assert cut.args.max_tokens_per_pass == cut.memory.tokens
    assert cut.args.gradient_checkpointing
    assert cut.memory.level == "full"
    assert "gradients" not in whole.memory.phases[-1].terms
    assert cut.memory.phases[-1].terms["gradients"] == 4 * cut.shape.trained


def test_a_reference_that_answers_before_training_is_no_second_model(seven_billion):
    def phases(**options):
        told = explained("dpo", "dpo", {**SMALL, **seven_billion, **options})
        return {phase.name: phase.terms for phase in told.memory.phases}

    weights = 2 * 7_615_616_512
    assert phases()["load"] == {"weights": weights, "reference": weights}
    assert phases(precompute_ref_log_probs=True)["load"] == {"weights": weights}
    assert "reference" not in phases(precompute_ref_log_probs=True)["update"]


def test_a_run_that_may_use_less_is_planned_for_that(seven_billion):
    def planned(gpu=None, **memory):
        found = explained("sft", "sft", {**SMALL, **seven_billion, "use_peft": True, **memory}, gpu)
        return found.memory.phases[-1].peak, found.args.gradient_checkpointing, found.args.optim

    small = 17 * 2**30
    assert (
        planned(80 * 2**30, memory="17GiB")
        == planned(memory="17GiB")
        == planned(small)
        == planned(small, memory="80GiB")
    )
    assert planned(memory="least")[0] < planned()[0]
    assert planned(memory="least")[1:] == (True, "adamw_8bit")


def test_a_run_whose_settings_are_all_given_is_not_planned(seven_billion, capsys):
    given = {"gradient_checkpointing": False, "activation_offloading": False, "optim": "adamw_torch"}
    words = words_of(
        "sft", "sft", {**SMALL, **seven_billion, **given, "keep_logits": None, "max_tokens_per_pass": None}
    )
    assert posttrain("explain", "sft", "--gpu", "24GB", *words) == 0
    shown = capsys.readouterr().out
    assert "On 24 GB it does not fit" in shown
    assert "Nothing is left open: the run uses the settings that are given." in shown
    assert "Activations are" not in shown


def test_keys_and_values_and_the_reference_of_an_online_run(seven_billion):
    told = explained("grpo", "grpo", {**GROUPS, **seven_billion, "beta": 0.1, "max_completion_length": 100})
    phases = {phase.name: phase for phase in told.memory.phases}
    longest = told.counts.rollouts.longest_prompt
    assert set(phases) == {"load", "generation", "scoring", "update"}
    assert phases["generation"].terms["keys and values"] == 2 * 28 * 512 * 2 * (4 * 100 + longest)
    assert phases["load"].terms["reference"] == phases["load"].terms["weights"]
    assert told.memory.tokens == 4 * 100 + longest  # the prompt of a group is computed once


def test_keys_and_values_in_8_bits_take_half_and_old_log_probs_a_pass_of_their_own(seven_billion):
    given = {**GROUPS, **seven_billion, "max_completion_length": 100}
    plain, rounded = (explained("grpo", "grpo", given | more) for more in ({}, {"rollout_kv_dtype": "fp8"}))
    kept = [{phase.name: phase for phase in told.memory.phases} for told in (plain, rounded)]
    halved = kept[1]["generation"].terms["keys and values"] / kept[0]["generation"].terms["keys and values"]
    assert 0.5 < halved < 0.51
    assert ["scoring" in phases for phases in kept] == [False, True]


def test_rollouts_are_scored_in_passes_of_their_own(seven_billion):
    """All of a generation at once, up to what a pass without a gradient may have, however small a micro-batch is."""
    changes = {**GROUPS, **seven_billion, "beta": 0.1, "max_completion_length": 100, "gradient_accumulation_steps": 4}
    limits = ({"gradient_accumulation_steps": 1}, {}, {"max_tokens_per_pass": 500}, {"max_completion_length": 5000})
    told = [explained("grpo", "grpo", {**changes, **limit}) for limit in limits]
    a_token = told[0].memory.activations.layer
    scored = [one.memory.phases[2].terms["activations"] / a_token for one in told]
    prompt = told[0].counts.rollouts.longest_prompt
    assert scored == pytest.approx([400 + prompt, 4 * (400 + prompt), 500, 32768])


def test_reward_models_lie_on_the_device_all_the_time(seven_billion):
    named = {"reward_model_name_or_path": [seven_billion["model_name_or_path"]]}
    told = explained("grpo", "grpo", {**GROUPS, **seven_billion, **named})
    head = 152064 * 3584  # of the language model, in whose place a reward model has one row
    assert {phase.terms["reward models"] for phase in told.memory.phases} == {
        2.0 * (told.shape.parameters - head + 3584)
    }


def test_a_process_reward_is_a_reward_model(seven_billion, tmp_path):
    tiny.process_reward_model().save_pretrained(tmp_path / "judge")
    weights = sum(parameter.numel() for parameter in tiny.process_reward_model().parameters())
    for name in (f"{tmp_path / 'judge'}?aggregate=mean", f"judge:{tmp_path / 'judge'}"):
        told = explained("grpo", "grpo", {**GROUPS, **seven_billion, "reward_funcs": [name]})
        assert {phase.terms["reward models"] for phase in told.memory.phases} == {2.0 * weights}
    told = explained("grpo", "grpo", {**GROUPS, **seven_billion, "reward_funcs": ["judge:org/m@http://127.0.0.1:1/v1"]})
    assert {phase.terms.get("reward models", 0.0) for phase in told.memory.phases} == {0.0}


def test_a_colocated_vllm_has_its_share_and_gives_it_back_asleep(seven_billion):
    def phases(gpu=80 * 2**30, **options):
        told = explained("grpo", "grpo", {**GROUPS, **seven_billion, "use_vllm": True, **options}, gpu)
        return {phase.name: phase.terms for phase in told.memory.phases}, told.counts.notes

    share = 0.3 * 80 * 2**30
    awake, _ = phases()
    assert awake["generation"]["vLLM"] == awake["update"]["vLLM"] == share
    assert "keys and values" not in awake["generation"]
    asleep, _ = phases(vllm_enable_sleep_mode=True)
    assert asleep["generation"]["vLLM"] == share
    assert "vLLM" not in asleep["update"]
    served, _ = phases(vllm_mode="server")
    assert "generation" not in served
    assert any("name the device with --gpu" in note for note in phases(gpu=None)[1])


def test_activations_of_plain_layers_are_those_that_the_probe_finds():
    import torch

    from posttrain.models.layers.kernels import PLAIN
    from posttrain.models.load.model import LoadOptions, load_model
    from posttrain.models.memory import fit as memory
    from posttrain.models.memory.shape import Shape

    shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 2}
    model = load_model(tiny.causal_lm(dtype=torch.bfloat16, **shape), LoadOptions(dtype=torch.bfloat16)).model
    found = memory.activation_cost(model)
    told = Shape(model).activations(PLAIN)
    for level in ("none", "selective", "full"):
        assert told.kept[level] == pytest.approx(found.kept[level], rel=0.06), level


@pytest.mark.parametrize(
    ("kernels", "adapter", "kib_a_token"),
    [
        ("liger", {"target_modules": "all-linear"}, 757),
        ("liger", {"target_modules": "all-linear", "lora_dropout": 0.05}, 1417),
        ("liger", {"target_modules": ["q_proj", "v_proj"]}, 710),
        ("liger", None, 991),
        ("compiled", None, 670),
    ],
)
def test_activations_are_those_that_were_measured_on_an_h200(kernels, adapter, kib_a_token):
    """Qwen2.5 0.5B in bfloat16, 15 November 2026: `python benchmarks/explain_memory.py`, "KiB a token, measured"."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, Qwen2Config

    from posttrain.models.load.adapters import add_adapter
    from posttrain.models.memory.shape import Shape

    config = Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=1024, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if adapter is not None:
            model = add_adapter(model, LoraConfig(r=16, task_type="CAUSAL_LM", **adapter), torch.bfloat16)
    told = Shape(model).activations(kernels).of("none", False)
    assert told == pytest.approx(kib_a_token * 2**10, rel=0.015)


def test_operations_of_a_step_are_six_for_each_weight_and_token(seven_billion):
    told = explained("sft", "texts", {**SMALL, **seven_billion})
    tokens, shape = told.counts.per_step["tokens"].mean, told.shape
    dense = 6 * tokens * (shape.parameters - 152064 * 3584)  # embeddings are looked up, not multiplied with
    assert told.work.operations_per_step == pytest.approx(dense, rel=0.03)
    assert told.work.operations == pytest.approx(told.counts.optimizer_steps * told.work.operations_per_step)


def test_which_passes_a_run_makes(here):
    def passes(method: str, rows: str, **changes: object) -> list[str]:
        told = explained(method, rows, {**(SMALL if rows == "dpo" else GROUPS), **changes}).work
        return [one.what for one in (*told.per_step, *told.before_training)]

    assert passes("dpo", "dpo") == ["policy, forward and backward", "reference, forward"]
    assert passes("dpo", "dpo", precompute_ref_log_probs=True)[1] == "reference, forward, once over all rows"
    assert len(passes("dpo", "dpo", loss_type=["aot"], gradient_accumulation_steps=2)) == 4
    assert len(passes("grpo", "grpo")) == 3
    assert passes("grpo", "grpo", num_iterations=2)[3] == "policy, forward, for the log-probs before the update"
    assert passes("grpo", "grpo", beta=0.1)[3] == "reference, forward, once for each rollout"


@pytest.mark.parametrize(
    ("method", "lines"),
    [
        ("cpo", ["loss = -log(sigmoid(0.1 * D))", "reference: none"]),
        ("orpo", ["loss = -logp_c", "reference: none"]),
        ("tpo", ["data             24 triples", "reference: none"]),
        ("kto", ["policy, forward, of mismatched rows, for the reference point: 1 of", "reference: a frozen copy"]),
        ("bco", ["delta = mean of 0.1 * l of all rows, over all steps before", "reference: a frozen copy"]),
    ],
)
def test_offline_methods_are_explained(here, capsys, method, lines):
    assert posttrain("explain", method, *flags(options_of(method))) == 0
    shown = capsys.readouterr().out
    for line in lines:
        assert line in shown


def test_a_teacher_is_resident_and_rows_of_the_dataset_are_counted_as_they_are(here):
    """With a coin for each prompt: what the student writes is at most so long, what the dataset brings is as long as it is."""
    told = explained("gkd", "sft", {**SMALL, "lmbda": 0.5, "max_completion_length": 40})
    assert {phase.terms["teacher"] for phase in told.memory.phases} == {told.memory.resident["weights"]}
    assert [one.what for one in told.work.per_step][-1] == "teacher, forward"
    rows, args = told.side.train_dataset, told.args
    order = [told.side.get_train_dataloader().source.order.row(number) for number in range(22)]
    written = [lands_on_policy(args.seed, number, 0.5) for number in range(22)]
    prompts = [len(rows[row].ids) for row in order]
    lengths = [p + 40 if own else len(rows[row].answer) for row, p, own in zip(order, prompts, written)]
    assert told.counts.rollouts.completions == sum(written) > 0
    assert told.counts.per_step["tokens"].total == sum(lengths)
    assert told.counts.rollouts.reward_calls == 0
    only = explained("gkd", "sft", {**SMALL, "lmbda": 0.0}).counts
    assert (only.rollouts.completions, only.per_step["tokens"].total) == (0, sum(len(rows[r].answer) for r in order))


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, {"teacher, forward": 1, "teacher, forward, once": 1, "policy, forward, once": 1}),
        ({"rkl_advantage": False}, {"teacher, forward": 1}),
        ({"single_step_decomposition": False}, {"teacher, forward, once": 1, "policy, forward, once": 1}),
        (  # old log-probs are there: those of the policy are not computed again
            {"num_iterations": 2},
            {"teacher, forward": 1, "teacher, forward, once": 0.5},
        ),
        ({"num_iterations": 2, "kd_temperature": 2.0},
         {"teacher, forward": 1, "teacher, forward, once": 0.5, "policy, forward, once": 0.5}),
    ],
)  # fmt: skip
def test_minillm_asks_its_teacher_for_advantages_and_in_steps(here, options, passes):
    told = explained("minillm", "grpo", {"max_steps": 4, **options})
    own = told.work.per_step[0].times
    found = {one.what.partition(" for each rollout")[0]: one.times / own for one in told.work.per_step}
    names = ("teacher, forward", "teacher, forward, once", "policy, forward, once")
    assert {name: found[name] for name in names if name in found} == passes
    assert told.counts.rollouts.reward_calls == 0


def test_rewards_are_counted_where_a_method_can_do_without(here):
    told = explained("minillm", "grpo", {"max_steps": 4, "reward_funcs": ["rewards_of_test.py:length"]})
    assert told.counts.rollouts.reward_calls > 0


@pytest.mark.parametrize(
    ("objective", "what"), [("iw_opd", "teacher, forward, once for each rollout"), ("jsd", "teacher, forward")]
)
def test_iw_opd_asks_its_teacher_once_for_each_rollout(here, objective, what):
    told = explained("iw_opd", "sft", {"distillation_objective": objective, "max_steps": 2})
    assert [one.what for one in told.work.per_step if one.what.startswith("teacher")] == [what]


def test_a_run_without_a_teacher_cannot_be_explained(here, capsys):
    options = {name: value for name, value in options_of("gkd").items() if name != "teacher_model_name_or_path"}
    assert posttrain("explain", "gkd", *flags(options)) == 2
    assert "posttrain gkd needs a teacher: --teacher_model_name_or_path." in capsys.readouterr().err


def test_a_teacher_on_a_server_is_not_asked_and_not_counted(here, capsys):
    plain = {**options_of("distillation"), "teacher_model_name_or_path": None, "loss_top_k": 3, "beta": 0.0}
    options = flags({name: value for name, value in plain.items() if value is not None})
    assert posttrain("explain", "server_distillation", *options, "--teacher_model_server_url", "http://gpu7:8000") == 0
    shown = capsys.readouterr().out
    assert "v: the teacher's 3 likeliest tokens, the rest as one more" in shown
    assert "teacher, forward" not in shown
    several = '{"maths": "http://gpu7:8000", "code": "http://gpu8:8000"}'
    assert posttrain("explain", "server_distillation", *options, "--teacher_server_urls", several) == 2
    assert "Row 0 has no `teacher_id`" in capsys.readouterr().err
    own = flags(
        {name: value for name, value in options_of("distillation").items() if name != "teacher_model_name_or_path"}
    )
    assert posttrain("explain", "iw_opd", *own, "--use_teacher_server", "--teacher_model_server_url", "http://g:1") == 0
    assert "teacher, forward" not in capsys.readouterr().out
    assert posttrain("explain", "server_distillation", *options) == 2
    assert (
        "posttrain server_distillation needs a teacher's server: --teacher_model_server_url." in capsys.readouterr().err
    )


# ---- rollouts beside training ----------------------------------------------------------------------------------------------


def test_a_short_run_says_what_writing_beside_training_would_bring(here, capsys, tmp_path):
    run = str(tmp_path / "short")
    words = words_of("grpo", "grpo", {**GROUPS, "rollout_engine": "native"}, run)
    trainer_of(parse("grpo", words)).train()
    metrics = tmp_path / "short" / METRICS_FILE
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    for line in lines:  # an update of a second, far longer than these groups take on any machine
        if "rollouts/generate_s" in line:
            line["step_time"] = line["rollouts/generate_s"] + line.get("rollouts/reward_wait_s", 0.0) + 1.0
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert posttrain("explain", "grpo", "--timings", run, "--json", "told.json", *words) == 0
    shown, told = capsys.readouterr().out, json.loads((here / "told.json").read_text())["beside"]
    settings = told["settings"]
    assert [*settings] == [
        "synchronous",
        "in order, lead 1",
        "in order, lead 2",
        "window, lead auto",
        "first finished, mask",
    ]
    # With a lead, groups are written within the update: a window takes that second and nothing more.
    assert settings["synchronous"]["seconds"] > 1.0001
    assert settings["in order, lead 1"]["seconds"] == pytest.approx(1.0, abs=1e-6)
    assert settings["in order, lead 2"]["seconds"] == pytest.approx(1.0, abs=1e-6)
    assert settings["synchronous"]["oldest"] == 0
    assert 0 < told["share_for_rollouts"] < 1
    assert f"lead: {told['lead']:.1f} generations under way" in shown
    assert "GPUs for rollouts, so that neither side waits: 1 of 2" in shown


@pytest.mark.parametrize(
    ("method", "folder", "said"),
    [("sft", ".", "sft writes no completions"), ("grpo", "nowhere", "there is no such folder")],
)
def test_timings_that_cannot_be(here, capsys, method, folder, said):
    assert (
        posttrain(
            "explain", method, "--timings", folder, *words_of(method, method, SMALL if method == "sft" else GROUPS)
        )
        == 2
    )
    assert said in capsys.readouterr().err
