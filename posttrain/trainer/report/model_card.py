"""README.md of a trained model: what it is, how to load it, how it was made. Nothing local or secret goes into it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import yaml
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import TrainerState

from posttrain.core import __version__
from posttrain.core.secrets import HIDDEN, last_parts, without_secrets, write_whole
from posttrain.data.store.report import PreparationReport
from posttrain.models.load.adapters import is_peft_model
from posttrain.models.load.model import CAUSAL_LM, SEQUENCE_REWARD, TOKEN_LABELS, LoadedModel, innermost_model
from posttrain.trainer.checkpoints.run_state import FREE_TO_CHANGE
from posttrain.trainer.options.base import BaseConfig, default_of, is_ours
from posttrain.trainer.report.progress import number

FILE = "README.md"
MARK = "<!-- Written by posttrain; a card without this line is never overwritten on its own account. -->"


@dataclasses.dataclass(frozen=True)
class Paper:
    """What to cite for a method."""

    key: str
    title: str
    authors: str
    year: int
    arxiv: str
    venue: str = ""

    def bibtex(self) -> str:
        kind, place = ("inproceedings", "booktitle") if self.venue else ("article", "journal")
        where = self.venue or f"arXiv:{self.arxiv}"
        entries = {"title": self.title, "author": self.authors, place: where, "year": str(self.year)}
        lines = [f"  {name:<{len(place)}} = {{{text}}}" for name, text in entries.items()]
        return f"@{kind}{{{self.key},\n" + ",\n".join(lines) + "\n}"


SETTLED_BY_THE_TRAINER = frozenset(
    ("output_dir", "gradient_checkpointing_kwargs", "logging_nan_inf_filter", "accelerator_config", "debug")
)
REPORTED_ELSEWHERE = frozenset(
    ("trackio_static_space_id", "batch_eval_metrics", "include_for_metrics", "log_on_each_node")
)
NOT_SHOWN = (FREE_TO_CHANGE | SETTLED_BY_THE_TRAINER | REPORTED_ELSEWHERE) - {"max_steps", "num_train_epochs"}
"""Options that say nothing about how the model was made: where it lies, how often it was logged, where that was reported."""
NOT_METRICS = frozenset(("epoch", "step", "total_flos", "num_tokens"))
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "tokenizers")


class DescribedRun(Protocol):
    """What a card says of a run; a trainer has all of it."""

    method: str
    title: str
    task: str
    paper: Paper | None
    args: BaseConfig
    state: TrainerState
    model: nn.Module
    loaded: LoadedModel
    processing_class: Any
    train_dataset: Any
    teacher_name: str | None
    hub_model_id: str | None


def write_model_card(
    run: DescribedRun,
    model_name: str | None = None,
    dataset_name: str | list[str] | None = None,
    tags: str | list[str] | None = None,
    license: str | None = None,
    language: str | list[str] | None = None,
) -> Path:
    """Write the card into the output folder."""
    name = model_name or Path(run.args.output_dir).name
    datasets = [name for name in _as_list(dataset_name) if is_hub_id(name)]  # names of local files are not published
    metadata = front_matter(run, name, datasets, _as_list(tags), license, _as_list(language))
    sections = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n{MARK}\n",
        f"# {name}\n\n{introduction(run, datasets)}",
        f"## Use\n\n```python\n{usage(run, repository(run, name))}\n```",
        f"## Training\n\n{procedure(run)}",
        f"### Data\n\n{data(run)}",
        f"### Options that differ from the defaults\n\n{options(run.args)}",
        f"### Results\n\n{results(run.state.log_history)}",
        f"### Versions\n\n{versions()}",
        *([f"## Citation\n\n```bibtex\n{run.paper.bibtex()}\n```"] if run.paper else []),
    ]
    path = Path(run.args.output_dir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n\n".join(section.strip() for section in sections) + "\n", private=False)
    return path


def may_be_overwritten(output_dir: str) -> bool:
    """Whether the folder has no card, one of ours, or PEFT's unfilled form; a card that a person wrote stays."""
    path = Path(output_dir) / FILE
    if not path.exists():
        return True
    text = path.read_text(encoding="utf-8", errors="replace")
    return MARK in text or "[More Information Needed]" in text


# ---- the head ------------------------------------------------------------------------------------------------------------


def front_matter(
    run: DescribedRun, name: str, datasets: list[str], tags: list[str], license: str | None, language: list[str]
) -> dict[str, Any]:
    """The metadata the Hub reads."""
    base = base_model(run)
    own_tags = ["posttrain", run.method, "generated_from_trainer", *_as_list(getattr(run.model, "model_tags", None))]
    metadata: dict[str, Any] = {
        "base_model": base,
        "library_name": "peft" if is_peft_model(run.model) else "transformers",
        "pipeline_tag": _PIPELINES[run.task],
        "model_name": name,
        "license": license or license_of(run.loaded.name),
        "language": language,
        "datasets": datasets,
        "tags": list(dict.fromkeys([*own_tags, *tags])),
    }
    return {key: value for key, value in metadata.items() if value}


def base_model(run: DescribedRun) -> str | None:
    """Hub id of the model it was trained from. A local folder or a model made from a config has none."""
    name = run.loaded.name
    if is_peft_model(run.model):
        name = run.model.active_peft_config.base_model_name_or_path or name
    return name if is_hub_id(name) and name != type(innermost_model(run.model)).__name__ else None


def is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)) and not Path(name).exists()


def license_of(model: str) -> str | None:
    """The licence the base model's own card names, where that card is on this machine. Nothing is downloaded."""
    local = Path(model) / FILE
    found = local if local.is_file() else try_to_load_from_cache(model, FILE) if is_hub_id(model) else None
    if not isinstance(found, (str, Path)):
        return None
    head = re.match(r"---\n(.*?)\n---", Path(found).read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    if head is None:
        return None
    metadata = yaml.safe_load(head[1])
    known = metadata.get("license") if isinstance(metadata, dict) else None
    return known if isinstance(known, str) else None


def repository(run: DescribedRun, name: str) -> str:
    """What a reader loads it by."""
    return getattr(run, "hub_model_id", None) or run.args.hub_model_id or name


def _as_list(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


# ---- the text ------------------------------------------------------------------------------------------------------------


def introduction(run: DescribedRun, datasets: list[str]) -> str:
    base = base_model(run)
    source = f"[{base}](https://huggingface.co/{base})" if base else Path(run.loaded.name).name
    kind = "An adapter for" if is_peft_model(run.model) else _MADE_FROM.get(run.task, "Made from")
    linked = ", ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in datasets)
    on = f" on {linked}" if datasets else ""
    return f"{kind} {source}, trained by {run.title or run.method.upper()}{on} with posttrain."


def usage(run: DescribedRun, name: str) -> str:
    """A few lines that load the model and ask it something."""
    chats = bool(getattr(run.processing_class, "chat_template", None))
    loaders = _ADAPTER_LOADERS if is_peft_model(run.model) else _LOADERS
    question = _CLASSIFIER_QUESTIONS.get(run.task, _CHAT_QUESTION if chats else _TEXT_QUESTION)
    return (loaders[run.task] + question).format(name=name)


_PIPELINES = {
    CAUSAL_LM: "text-generation",
    SEQUENCE_REWARD: "text-classification",
    TOKEN_LABELS: "token-classification",
}
_MADE_FROM = {SEQUENCE_REWARD: "A reward model from", TOKEN_LABELS: "A process reward model from"}
_STEPS_LOADER = 'from posttrain.rewards.process_reward import ProcessReward\n\nmodel = ProcessReward("{name}")\n'
_LOADERS = {
    CAUSAL_LM: 'from transformers import pipeline\n\nmodel = pipeline("text-generation", model="{name}")\n',
    SEQUENCE_REWARD: "from transformers import pipeline\n\n"
    'model = pipeline("text-classification", model="{name}", function_to_apply="none")\n',
    TOKEN_LABELS: _STEPS_LOADER,
}
_ADAPTER_LOADERS = {
    CAUSAL_LM: "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer, pipeline\n\n"
    'adapted = AutoPeftModelForCausalLM.from_pretrained("{name}")\n'
    'model = pipeline("text-generation", model=adapted, tokenizer=AutoTokenizer.from_pretrained("{name}"))\n',
    SEQUENCE_REWARD: "from peft import AutoPeftModelForSequenceClassification\n"
    "from transformers import AutoTokenizer, pipeline\n\n"
    'adapted = AutoPeftModelForSequenceClassification.from_pretrained("{name}", num_labels=1)\n'
    'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
    'model = pipeline("text-classification", model=adapted, tokenizer=tokenizer, function_to_apply="none")\n',
    TOKEN_LABELS: _STEPS_LOADER,
}
_CHAT_QUESTION = (
    'answer = model([{{"role": "user", "content": "What is a good question?"}}], max_new_tokens=128, return_full_text=False)\n'
    'print(answer[0]["generated_text"])'
)
_TEXT_QUESTION = (
    'answer = model("Once upon a time", max_new_tokens=128, return_full_text=False)\nprint(answer[0]["generated_text"])'
)
_CLASSIFIER_QUESTIONS = {
    SEQUENCE_REWARD: 'print(model("a question and its answer, as the training data writes them")[0]["score"])',
    TOKEN_LABELS: 'print(model.step_scores([("a question\\n", ["its first step", "its second step"])])[0])',
}


def procedure(run: DescribedRun) -> str:
    what = f"Trained by {run.title or run.method.upper()}"
    if run.paper:
        what += f", [{run.paper.title}](https://arxiv.org/abs/{run.paper.arxiv})"
    args, state = run.args, run.state
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.readers
    dtype = str(args.compute_dtype).removeprefix("torch.")
    lines = [f"{what}.", f"{state.global_step:,} optimizer steps of {rows:,} rows, in {dtype}."]
    if (teacher := run.teacher_name) is not None:
        linked = f"[{teacher}](https://huggingface.co/{teacher})" if is_hub_id(teacher) else Path(teacher).name
        lines.append(f"Its teacher was {linked}.")
    tracked = sys.modules["wandb"].run if "wandb" in args.report_to and "wandb" in sys.modules else None
    if tracked is not None:
        lines.append(f"[The run on Weights & Biases]({tracked.url}).")
    return "\n".join(lines)


def data(run: DescribedRun) -> str:
    """Counts of the training rows, and why some were left out."""
    report: PreparationReport | None = getattr(run.train_dataset, "report", None)
    if report is None:
        return "Nothing is known about the rows."
    counts = {
        "rows read": report.rows_read,
        "rows used": report.kept,
        "tokens": report.tokens,
        "tokens trained": report.trained_tokens,
        "samples cut to `max_length`": report.truncated,
        **{f"rows dropped: {reason}": rows for reason, rows in report.dropped.items()},
    }
    rows = {name: f"{value:,}" for name, value in counts.items()}
    return _table(("", ""), rows | ({"packed": report.packing} if report.packing else {}))


def options(args: BaseConfig) -> str:
    changed = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init and _differs(args, f)}
    changed = {name: _plain(value) for name, value in changed.items()}
    shown = {f"`{name}`": publishable(value) for name, value in without_secrets(changed).items() if value != HIDDEN}
    return _table(("option", "value"), shown) if shown else "None."


def _differs(args: BaseConfig, field: dataclasses.Field) -> bool:
    """Our options remember what the user set; `None` of theirs is resolved later and would look changed."""
    if field.name in NOT_SHOWN:
        return False
    if is_ours(field):
        return field.name in args.set_by_user()
    return _plain(getattr(args, field.name)) != _plain(default_of(field))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def publishable(value: Any) -> str:
    """An option's value as it may be published: no secret, of local paths only the last parts."""
    value = without_secrets(_plain(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {publishable(v)}" for k, v in value.items() if v != HIDDEN) + "}"
    if isinstance(value, (list, tuple)):
        return ", ".join(publishable(item) for item in value)
    if isinstance(value, float):
        return number(value)
    return last_parts(str(value))


def results(history: list[dict[str, Any]]) -> str:
    """The last training log and the last evaluation."""
    latest: dict[str, str] = {}
    for entry in history:
        numbers = {
            name: value for name, value in entry.items() if name not in NOT_METRICS and "_per_second" not in name
        }
        latest |= {name: number(value) for name, value in numbers.items() if not name.endswith("_runtime")}
    latest.pop("learning_rate", None)  # at the end of a schedule it says nothing
    return _table(("metric", "last value"), latest) if latest else "Nothing was logged."


@cache  # reading the metadata of six packages takes longer than the rest of a card
def versions() -> str:
    found = {"posttrain": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES}
    return _table(("package", "version"), found)


def _table(head: tuple[str, str], rows: dict[str, Any]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
