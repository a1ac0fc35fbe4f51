"""`posttrain eval MODEL --data FILE --reward NAME`: answers to prompts, judged; scores with intervals."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, as_usage_error
from posttrain.cli.options.words import Parser, pairs
from posttrain.cli.running.output import ready_to_write

if TYPE_CHECKING:
    from posttrain.evaluation.result import EvalResult
    from posttrain.evaluation.spec import EvalSpec

SPEC_OPTIONS = (
    "data", "reward", "reward_weights", "name", "samples", "temperature", "top_p", "top_k", "max_new_tokens", "limit",
    "seed", "threshold", "split", "subset", "best_of", "select_by",
)  # fmt: skip


def parser() -> Parser:
    made = Parser(
        prog="posttrain eval",
        description="Answer prompts with a model and judge the answers with rewards of GRPO's signature. The scores are those that "
        "`evals:` logs during training: same code, same samples for the same seed.",
    )
    made.add_argument(
        "model", metavar="MODEL", help="run folder, checkpoint, model or adapter folder, GGUF file, Hub id"
    )
    made.add_argument("--data", help="prompts: a file (JSONL, JSON, CSV, Parquet, ...), a folder or a Hub id")
    made.add_argument(
        "--reward",
        nargs="+",
        metavar="NAME",
        help="built-in name, my_module.function, file.py:function, or the folder or Hub id of a reward model; a process reward "
        "takes options, as in runs/prm?aggregate=mean",
    )
    made.add_argument(
        "--best-of", type=int, metavar="N", help="write N answers and also score the one that --select-by picks"
    )
    made.add_argument(
        "--select-by", metavar="NAME", help="the reward that picks: a reward model, a process reward, a function"
    )
    made.add_argument(
        "--evals", metavar="FILE", help="a file of options whose `evals` are run, instead of --data and --reward"
    )
    made.add_argument("--name", help="of the task; with --evals: only that one")
    made.add_argument("--samples", type=int, metavar="K", help="answers to each prompt (default: 1)")
    made.add_argument("--temperature", type=float, help="0: the most likely token (default: 1)")
    made.add_argument("--top-p", type=float, help="(default: 1, all tokens)")
    made.add_argument("--top-k", type=int, help="(default: 0, all tokens)")
    made.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: 256)")
    made.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    made.add_argument("--seed", type=int, help="of the draws (default: 0)")
    made.add_argument(
        "--threshold", type=float, help="reward from which on an answer passes (default: 1, for rewards 0 and 1)"
    )
    made.add_argument(
        "--reward-weights", nargs="+", type=float, metavar="W", help="one for each reward (default: 1 each)"
    )
    made.add_argument(
        "--column", action="append", default=[], metavar="OLD=NEW", help="read column OLD as NEW; several times"
    )
    made.add_argument("--split", help="of a folder or a Hub dataset (default: test)")
    made.add_argument("--subset", help="configuration of a Hub dataset")
    made.add_argument("--chat-template-kwargs", type=json.loads, metavar="JSON", help="arguments for the chat template")
    made.add_argument("--adapter", help="a PEFT adapter on top of MODEL")
    made.add_argument("--dtype", help="of the weights (default: that of the files)")
    made.add_argument("--device", help="(default: the GPU where there is one)")
    made.add_argument("--engine", default="native", choices=("native", "transformers"), help="(default: %(default)s)")
    made.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    made.add_argument("--json", metavar="FILE", help="write the scores; - for the standard output, without the table")
    made.add_argument("--save-samples", metavar="FILE", help="write every answer with its rewards as JSONL")
    return made


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    for path, option in ((options.json, "--json"), (options.save_samples, "--save-samples")):
        if path:
            ready_to_write(path, option)
    specs = specs_of(options)

    results = as_usage_error(lambda: run(options, specs))
    report(options, results)
    unjudged = [result for result in results if bool((result.answers.totals != result.answers.totals).all())]
    for result in unjudged:
        why = first_failure(result) or "every reward gave None"
        print(f"posttrain eval: no answer of {result.spec.name} could be judged. {why}", file=sys.stderr)
    return 1 if unjudged else 0


def first_failure(result: EvalResult) -> str | None:
    return next((one["error"] for one in result.samples if one["error"]), None)


def specs_of(options: argparse.Namespace) -> list[EvalSpec]:
    from posttrain.cli.running.evals_of import spec_of

    given = {name: getattr(options, name) for name in SPEC_OPTIONS if getattr(options, name) is not None}
    if options.column:
        given["columns"] = pairs(options.column, "--column")
    if options.chat_template_kwargs is not None:
        given["chat_template_kwargs"] = options.chat_template_kwargs
    if options.evals is None:
        if missing := [name for name in ("data", "reward") if name not in given]:
            raise UsageError(
                f"There is no --{missing[0]}; `posttrain eval` needs --data and --reward, or --evals FILE."
            )
        return [spec_of(given, "The command line")]
    if extra := [name for name in given if name != "name"]:
        raise UsageError(
            f"--{extra[0].replace('_', '-')} and --evals are both given; {options.evals} says how it is done."
        )
    return _specs_of_file(options.evals, options.name)


def _specs_of_file(path: str, name: str | None) -> list[EvalSpec]:
    from posttrain.cli.running.evals_of import spec_of
    from posttrain.core.config_file import read_config

    entries = as_usage_error(lambda: read_config(path))[0].get("evals")
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path} has no list `evals`.")
    specs = [spec_of(entry, f"{path}, `evals`, entry {number}") for number, entry in enumerate(entries, 1)]
    kept = [spec for spec in specs if name in (None, spec.name)]
    if not kept:
        raise UsageError(f"{path} has no evaluation named {name!r}; it has {', '.join(spec.name for spec in specs)}.")
    return kept


def run(options: argparse.Namespace, specs: list[EvalSpec]) -> list[EvalResult]:
    """Rows first: a bad row must be found before minutes go into loading a model."""
    from posttrain.cli.running.loaded_model import open_model
    from posttrain.data.render.renderer import Renderer
    from posttrain.evaluation.run import TaskEvaluation, engine_for, stop_ids

    opened = open_model(options)
    renderer = Renderer(opened.tokenizer)
    rows = [spec.rows(renderer) for spec in specs]
    model = opened.load()
    device = next(model.parameters()).device
    tasks = [TaskEvaluation(spec, of, opened.tokenizer, device=device) for spec, of in zip(specs, rows)]
    engine = engine_for(options.engine, opened.tokenizer)(model)
    ends = stop_ids(model, opened.tokenizer)
    results = []
    for task in tasks:
        results.append(task(engine, ends, keep_samples=True))  # with them, what went wrong
        task.close()
        if options.save_samples:  # at once: the next task may fail
            save_samples(options.save_samples, results)
    return results


def save_samples(path: str, results: list[EvalResult]) -> None:
    """Every answer so far. They have cost time: where the file cannot be written, they go to another."""
    lines = [{"eval": result.spec.name, **one} for result in results for one in result.samples]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        with tempfile.NamedTemporaryFile(
            "w", prefix="posttrain-answers-", suffix=".jsonl", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        print(
            f"posttrain eval: {path} cannot be written ({error.strerror}); the answers are in {file.name}.",
            file=sys.stderr,
        )


def report(options: argparse.Namespace, results: list[EvalResult]) -> None:
    shown = [{"model": options.model, **result.as_json()} for result in results]
    text = json.dumps(shown[0] if len(shown) == 1 else shown, indent=1) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
        return
    if options.json:
        Path(options.json).expanduser().write_text(text, encoding="utf-8")
    for result in results:
        show(options.model, result)


def show(model: str, result: EvalResult) -> None:
    from rich.console import Console
    from rich.table import Table

    spec, answers, errors = result.spec, result.answers, result.standard_errors()
    table = Table("score", "value", "95% interval", title=f"{spec.name}: {model}", title_justify="left")
    for name, estimate in result.scores.items():
        interval = "" if estimate.low != estimate.low else f"{estimate.low:.4f} to {estimate.high:.4f}"
        error = f" ± {errors[name]:.4f}" if name in errors else ""
        table.add_row(name, f"{estimate.value:.4f}{error}", interval)
    console = Console()
    console.print(table)
    failed = int(answers.failed.sum())
    lines: list[Any] = [
        f"{result.prompts} prompts, {len(answers.rows)} answers, {answers.lengths.mean():.1f} tokens each, "
        f"{answers.truncated.mean():.1%} cut at {spec.max_new_tokens}",
        f"{result.tokens_per_second:,.0f} tokens/s ({result.engine}); rewards took {result.seconds['reward']:.1f} s more",
    ]
    if errors:
        lines.append(f"best of {spec.best_of} by {result.reward_names[-1]}; ± is one standard error, over prompts")
    if failed:
        lines.append(f"{failed} answers have no reward (failed) and are left out of the scores")
        lines += [f"the first: {why}"] if (why := first_failure(result)) else []
    console.print("\n".join(lines), markup=False, highlight=False)
