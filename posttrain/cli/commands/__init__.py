"""One module per subcommand, and the table of them. Nothing is imported before its command runs."""

from __future__ import annotations

from posttrain.cli.options.table import method_names

TRAIN = "train"
COMMANDS = {
    "check": ("check", "look at the data of a run before it costs anything: token by token, and what is wrong"),
    "completion": ("completion", "a script with which bash, zsh or fish complete commands and options"),
    "demo": ("demo", "post-train a real 135M model on embedded data and show what changed"),
    "doctor": ("doctor", "what works on this machine, and what to type next"),
    "env": ("env", "versions and devices, for bug reports"),
    "explain": ("explain", "the arithmetic of a run before it begins: steps, tokens, loss, work and memory"),
    "images": ("images", "the images of a dataset: checked, converted to a format and size, shown"),
    "schema": ("schema", "a JSON Schema of a method's file of options, for editors"),
    "sweep": ("sweep", "one run after another over values of any options; a table and a plot at the end"),
    "view": ("view", "curves and rollouts of runs: a page on this machine, a terminal summary or a report"),
    "eval": ("eval", "answer prompts with a model and judge the answers: pass@k with intervals"),
    "export": ("export", "a trained model as merged weights, an adapter or GGUF, checked against what was trained"),
    "chat": ("chat", "talk to a model in the terminal"),
    "launch": ("launch", "write, and submit, the job of a run for Slurm, SkyPilot or Kubernetes"),
    "replay": ("replay", "train an asynchronous run once more, from its journal, and compare the weights"),
    "rollouts": ("rollouts", "what a run of GRPO or RLOO has written, as rows for SFT or DPO"),
    "run": ("run", "run a script written for TRL, its imports answered by posttrain"),
    "vllm-serve": (
        "serve",
        "write completions for trainers: with vLLM, in an environment of its own, or with our own engine",
    ),
}


def commands() -> dict[str, tuple[str, str]]:
    """Name -> (module, what it does): a command for every method of METHODS, and the others."""
    return {name: (TRAIN, f"train: {summary}") for name, summary in method_names().items()} | COMMANDS
