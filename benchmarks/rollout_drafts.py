"""What drafts do for the last completions of a batch, when the others are done.

    python -m benchmarks.rollout_drafts                                    # SmolLM2-135M-Instruct, one completion at a time
    python -m benchmarks.rollout_drafts --rows 4 --drafts 3 --temperature 1

Three kinds of prompts: to repeat a text, to work something out step by step, to tell a story. Each is written without drafts and
with them, by turns; the fastest of the repeats counts. `--always` drafts in every step, whether it pays or not. Tokens must be
equal: on a GPU in bfloat16 two that are equally good may part. With `--threads 1` it is the processor's time that is measured,
which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from posttrain.cli.commands import demo
from posttrain.models.load.model import LoadOptions, load_model, load_tokenizer
from posttrain.rollout.engines.native import drafts as drafting
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Completion, Prompt, SamplingParams, generate

TEXT = """def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth

def cost(width, height, depth, price):
    return volume(width, height, depth) * price
"""
PROMPTS = {
    "repeat": f"Copy this code without changing anything:\n{TEXT}",
    "work out": "Tom has 3 boxes of 12 pens, gives 7 pens away and buys 2 more boxes. How many pens has he? Think step by step.",
    "story": "Tell a story about a lighthouse and a storm.",
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="a folder or a name of the Hub; left out: SmolLM2-135M-Instruct")
    p.add_argument("--rows", type=int, default=1)
    p.add_argument("--drafts", type=int, default=4)
    p.add_argument("--tokens", type=int, default=192)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int)
    p.add_argument("--always", action="store_true")
    args = p.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.always:
        drafting.Trial.is_on = True
        drafting.LEAST_ACCEPTED.update(cuda=0.0, cpu=0.0)
        drafting.MAX_LINES.update(cpu=64)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    folder = args.model or demo.real_model()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = (
        load_model(folder, LoadOptions(device=device, dtype=dtype)).model.eval(),
        load_tokenizer(folder, None, False),
    )
    engines = {drafts: NativeEngine(model, drafts=drafts, max_context=2048) for drafts in (0, args.drafts)}
    print(
        f"{args.rows} rows of up to {args.tokens} tokens at temperature {args.temperature:g}, {args.drafts} drafts, {device}"
    )
    print("| prompt | tokens | s without | s with | times as fast | drafted | accepted | equal |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for name, text in PROMPTS.items():
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        asked = [Prompt(ids, key=1, sample=row) for row in range(args.rows)]
        params = SamplingParams(args.tokens, args.temperature, stop_ids=(tokenizer.eos_token_id,), seed=1)
        best, found = {0: float("inf"), args.drafts: float("inf")}, {}
        for _ in range(args.repeats):
            for drafts, engine in engines.items():
                engine.drafted = engine.accepted = 0
                found[drafts], seconds = timed(engine, asked, params, clock)
                best[drafts] = min(best[drafts], seconds)
        without, with_drafts = best.values()
        plain, drafted = ([one.ids.tolist() for one in each] for each in found.values())
        engine = engines[args.drafts]
        print(
            f"| {name} | {sum(map(len, drafted))} | {without:.2f} | {with_drafts:.2f} | {without / with_drafts:.2f} | "
            f"{engine.drafted} | {engine.accepted} | {'yes' if plain == drafted else 'no'} |"
        )


def timed(
    engine: NativeEngine, asked: list[Prompt], params: SamplingParams, clock: Callable[[], float]
) -> tuple[list[Completion], float]:
    began = clock()
    return generate(engine, asked, params), clock() - began


if __name__ == "__main__":
    main()
