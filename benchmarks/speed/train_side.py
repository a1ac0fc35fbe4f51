"""Trains the rows of a plan with one library and writes a line of JSON for each, as soon as it is known.

    python -m benchmarks.speed.train_side PLAN.json RESULTS.jsonl

Both libraries are driven by this file: trainers, configs, arguments and columns have the same names in both.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

for variable, value in {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}.items():
    os.environ.setdefault(variable, value)

import torch  # noqa: E402
from peft import LoraConfig  # noqa: E402

from benchmarks.speed import materials, policy, settings  # noqa: E402
from benchmarks.speed.measure import StepClock, limited, peak_memory  # noqa: E402
from benchmarks.speed.profile import profiled  # noqa: E402
from benchmarks.speed.rows import Row, Steps, row_named, tiny  # noqa: E402

NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "reward": "Reward", "grpo": "GRPO"}
EXPERIMENTAL = ("orpo",)
"""Methods whose trainers TRL keeps under `trl.experimental`."""
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TASKS = {"sft": "CAUSAL_LM", "dpo": "CAUSAL_LM", "reward": "SEQ_CLS"}
COMPARED_TOO = ("grad_norm", "entropy")
"""Of GRPO. Its loss, of the policy's own completions, is the same whatever the weights; these are not."""
PROBE = Steps(1, 2)


class Side:
    """One library in this process."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.device, self.tiny = plan["device"], plan["tiny"]
        self.overrides, self.profile = plan["overrides"], plan["profile"]
        self.steps, self.layers = plan["steps"], plan["layers"]
        self.step_limits = plan["step_limits"]

    def row(self, name: str) -> Row:
        row = row_named(name, self.layers)
        return tiny(row) if self.tiny else row

    # ---- a row with a setting --------------------------------------------------------------------------------------

    def run(self, item: dict[str, Any]) -> dict[str, Any]:
        """What came of it, or {"error": ...}; candidates that failed are told in `tried`."""
        row, setting, tried = self.row(item["row"]), item["setting"], []
        steps = Steps(*self.steps, margin=row.steps_of(setting).margin) if self.steps else row.steps_of(setting)
        for candidate in self._candidates(row, item, tried):
            result = self._attempt(row, candidate, steps)
            if "error" not in result:
                return {**result, "tried": tried}
            tried.append({"options": candidate.options, "error": result["error"]})
        return {"error": tried[-1]["error"], "tried": tried}

    def _candidates(self, row: Row, item: dict[str, Any], tried: list[Any]) -> list[settings.Setting]:
        """Settings to be tried until one runs."""
        setting = item["setting"]
        if setting == "matched":
            return settings.ours_matched(row, self.device, item["tuned_options"])
        options = settings.CANDIDATES[setting](row, self.device, self.tiny)
        if setting != "tuned":
            return options
        if "candidate" in item:  # each is an item of its own: it is measured once, and has a limit of its own
            return settings.with_and_without_liger(options[item["candidate"]])
        fastest = self._fastest(row, options, tried) if len(options) > 1 else options
        return fastest + settings.trl_tuned_fallbacks(row, self.device, self.tiny)

    def _fastest(self, row: Row, candidates: list[settings.Setting], tried: list[Any]) -> list[settings.Setting]:
        """Candidates that ran a short probe, the fastest first."""
        speeds = []
        for candidate in candidates:
            result = self._attempt(row, candidate, PROBE)
            tried.append({"options": candidate.options, **{k: result[k] for k in ("error", "rate") if k in result}})
            if "error" not in result:
                speeds.append((result["rate"], candidate))
        return [candidate for _, candidate in sorted(speeds, key=lambda pair: -pair[0])]

    def _attempt(self, row: Row, setting: settings.Setting, steps: Steps) -> dict[str, Any]:
        self._free()  # what the traceback of a failed attempt still held
        try:
            with tempfile.TemporaryDirectory() as output:
                return self._train(row, setting, steps, output)
        except Exception as error:  # out of memory, or a combination the library refuses: told, and the others go on
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"}
        finally:
            self._free()

    def _free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _train(self, row: Row, setting: settings.Setting, steps: Steps, output: str) -> dict[str, Any]:
        start = time.perf_counter()
        trainer, clock, weights = self._trainer(row, setting, steps, output)
        constructed = time.perf_counter() - start
        writing = (
            policy.GenerationClock(trainer.model, self.device) if row.writes and setting.library == "trl" else None
        )
        with profiled(trainer, steps, self.device, self.profile and f"{self.profile}-{row.name}-{setting.name}"):
            trainer.train()
        seconds = clock.seconds()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        written = policy.tokens_written(logs, row) if row.writes else None
        tokens = materials.step_tokens(row, steps.total, written)
        timed = slice(steps.first_timed, steps.first_timed + steps.timed)
        unique, as_fed = tokens["unique"][timed], tokens["as_fed"][timed]
        found = {
            "rate": statistics.median(count / second for count, second in zip(unique, seconds)),
            "rate_as_fed": statistics.median(count / second for count, second in zip(as_fed, seconds)),
            "rate_overall": sum(unique) / sum(seconds),
            "step_seconds": seconds,
            "processor_seconds": clock.processor_seconds(),
            "step_tokens": unique,
            "peak_bytes": peak_memory(self.device),
            "losses": [entry["loss"] for entry in logs[: steps.losses]],
            "fed": tokens_fed(logs[steps.losses - 1].get("num_tokens"), tokens, steps.losses),
            "checksum": weights,
            "options": self._told(trainer, setting),
            "construct_seconds": constructed,
            "to_first_step_seconds": clock.first_step_after,
        }
        if row.writes:
            step = statistics.mean(seconds)
            found["phases"] = policy.phases(logs, writing, output, steps.total, timed, step)
            found |= {"tokens_written": written, "rewards_given": policy.rewards_given(output, steps.total)}
        elif row.is_online:
            names = [name for name in COMPARED_TOO if name in logs[0]]
            found["also"] = {name: [entry[name] for entry in logs[: steps.losses]] for name in names}
        return found

    def _trainer(self, row: Row, setting: settings.Setting, steps: Steps, output: str) -> tuple[Any, StepClock, str]:
        inner = f".experimental.{row.method}" if setting.library == "trl" and row.method in EXPERIMENTAL else ""
        library, title = importlib.import_module(setting.library + inner), NAMES[row.method]
        options = {**settings.shared(row, self.device, output), **setting.options, **self.overrides}
        options = settings.with_accumulation(row, options)
        options["max_steps"] = steps.total
        attention = options.pop("attn_implementation", None)  # no config has it for a model that is loaded
        if setting.library == "posttrain":
            options["dataset_cache_dir"] = output
        model = materials.build_model(row, self.device, getattr(torch, setting.weights))
        if attention:
            model.set_attn_implementation(attention)
        weights = materials.checksum(model)
        clock = StepClock(steps, self.device, self._limit(row, setting), logs_all=row.writes)
        lora = (
            LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS, task_type=TASKS[row.method]) if row.lora else None
        )
        trainer = getattr(library, f"{title}Trainer")(
            model=model,
            args=getattr(library, f"{title}Config")(**options),
            train_dataset=materials.dataset(row, steps.total, setting.sort_within_steps),
            processing_class=materials.tokenizer(row),
            callbacks=[clock],
            peft_config=lora,
            **self._of_method(row, setting, model, steps, output),
        )
        if row.lora and not materials.set_adapters(trainer.model):
            raise RuntimeError("no LoRA matrix was found to start from the same numbers in both libraries")
        return trainer, clock, weights

    def _limit(self, row: Row, setting: settings.Setting) -> float | None:
        """Seconds after which a first step is given up; only TRL as it comes has one, on a CPU that is slow at bfloat16."""
        return self.step_limits.get(row.name) if setting.name == "default" else None

    def _of_method(self, row: Row, setting: settings.Setting, model: Any, steps: Steps, output: str) -> dict[str, Any]:
        """TRL loads its live reference from the policy's path; a policy that has none comes with a copy, or gets a path."""
        is_trl = setting.library == "trl"
        if row.is_online:
            if is_trl and row.options.get("beta"):
                policy.lend_a_path(model, output)
            return policy.trainer_arguments(row, steps.total, output)
        if row.has_reference and is_trl and not setting.options.get("precompute_ref_log_probs"):
            return {"ref_model": materials.build_model(row, self.device, getattr(torch, setting.weights))}
        return {}

    def _told(self, trainer: Any, setting: settings.Setting) -> dict[str, Any]:
        """The options that were set, and what became of those that decide by themselves."""
        args = trainer.args
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16")
        decided = {name: getattr(args, name) for name in names} | {"optim": args.optim.value}
        decided["autocast"] = trainer.accelerator.mixed_precision
        return {**setting.options, **self.overrides, **decided, "weights": setting.weights}


def tokens_fed(counted: float | None, tokens: dict[str, list[int]], steps: int) -> str:
    """Which of our own counts the library's equals; another number means that it was given other rows."""
    if counted is None:
        return "not counted"  # some of TRL's trainers do not: their losses show that the rows are the same
    for name, counts in tokens.items():
        if int(counted) == sum(counts[:steps]):
            return name
    raise RuntimeError(f"{counted} tokens were counted in {steps} steps; the table has {tokens['as_fed'][:steps]}")


def main(plan_file: Path, results: Path) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    side = Side(plan)
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    for item in plan["items"]:
        start = time.perf_counter()
        print(f">> {item['row']} {item['setting']}", flush=True)
        with limited(item.get("seconds")):
            result = side.run(item)
        took = time.perf_counter() - start
        line = {**item, **result, "took_seconds": took, "process": plan["process"]}
        with open(results, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        print(f"<< {item['row']} {item['setting']} {took:.1f} s {result.get('error', '')}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
