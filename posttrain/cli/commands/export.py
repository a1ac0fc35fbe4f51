"""`posttrain export RUN --to merged|adapter|gguf`: a trained model for others, verified against what was trained."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from posttrain.cli.errors import UsageError, as_usage_error
from posttrain.cli.options.words import Parser
from posttrain.cli.running.output import no_bars

FORMATS = ("merged", "adapter", "gguf")


def parser() -> Parser:
    made = Parser(
        prog="posttrain export",
        description="Write a trained model as plain weights, as a PEFT adapter or as a GGUF file. The export is loaded afresh and "
        "its log-probs are compared with those of the model as it was trained; where they differ, it is refused (exit code 1).",
    )
    made.add_argument("run", metavar="RUN", help="output folder of a run, or a checkpoint; whole models and adapters")
    made.add_argument("--to", required=True, choices=FORMATS, help="the format")
    made.add_argument("--output", type=Path, metavar="FOLDER", help="(default: RUN-FORMAT beside the run)")
    made.add_argument("--dtype", help="float32, float16 or bfloat16; of GGUF also q8_0 (default: that of the model)")
    made.add_argument(
        "--checkpoint", type=int, metavar="N", help="of the run (default: the model at its end, else the newest)"
    )
    made.add_argument(
        "--bound", type=float, metavar="X", help="mean difference of log-probs that is allowed (default: by dtype)"
    )
    made.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return made


def refuse_unknown_base(run: Path) -> None:
    """An adapter that was trained beside quantised weights is merged into these, dequantised, and into no others."""
    from posttrain.cli.running.run_record import CONFIG_FILE
    from posttrain.core.config_file import read_config
    from posttrain.models.load.saved_model import QUANTIZATION

    for path in (run / CONFIG_FILE, run.parent / CONFIG_FILE):
        values = as_usage_error(lambda file=str(path): read_config(file))[0] if path.is_file() else {}
        for name in ("load_in_4bit", "load_in_8bit"):
            if values.get(name):
                raise UsageError(
                    f"{path} says `{name}`, and the adapter's folder has no {QUANTIZATION}: how its base was quantised is not "
                    "known, and merged into other weights it is another model. Use --to adapter."
                )


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the libraries underneath
    from posttrain.cli.running.loaded_model import saved_named

    saved = saved_named(options.run, options.checkpoint)
    run = Path(options.run)
    if options.to != "adapter" and saved.quantization() is None:
        refuse_unknown_base(run)
    number = "" if options.checkpoint is None else f"-{options.checkpoint}"
    output = options.output or run.resolve().with_name(f"{run.resolve().name}{number}-{options.to}")
    from posttrain.exporting.export import Export, export
    from posttrain.exporting.verification import ExportRefused

    no_bars()
    wanted = Export(saved, options.to, output, options.dtype, options.bound, options.trust_remote_code)
    try:
        made = as_usage_error(lambda: export(wanted))
    except ExportRefused as refusal:
        print(f"posttrain export: {refusal} Nothing was written.", file=sys.stderr)
        return 1
    found = made.verified
    print(f"  export      {made.path} ({made.written_as})")
    print(
        f"  verified    loaded afresh: differs from the trained model by {found.mean:.2g} on average, {found.largest:.2g} at most "
        f"(bound {found.bound:g}); {found.layers} layers, none by more than {found.worst_layer:.2g}"
    )
    if found.picture is not None:
        print(
            f"  picture     same ids and pixels; differs from the trained model by {found.picture:.2g} on average after it"
        )
    if found.llama_cpp is not None:
        print(f"  llama.cpp   differs from the trained model by {found.llama_cpp:.2g} on average")
    return 0
