"""What of a run folder goes to the Hub. The model does; the machine, secrets and the user's rows do not.

transformers pushes the whole folder, and while training a pickle of the options with the token in it
(`_push_from_checkpoint` saves `training_args.bin`). Both pushes are therefore written here, and name what they take: a file
that is not listed stays on this machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import CommitOperationAdd, HfApi
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import HubStrategy, SaveStrategy
from transformers.utils import PushInProgress

from posttrain.core import __version__
from posttrain.core.secrets import hidden_text, last_parts, published
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.tensor_file import FileRecord
from posttrain.trainer.options.base import BaseConfig

logger = logging.getLogger(__name__)

MODEL_FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "adapter_config.json", "adapter_model*.safetensors", "quantization_config.json", "tokenizer*.json", "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model", "chat_template.jinja",
    "preprocessor_config.json", "processor_config.json", "modeling_*.py", "configuration_*.py", "tokenization_*.py",
    "*processing_*.py",
)  # fmt: skip
"""What a model is loaded from: its files at the top of a folder, and adapters and templates in folders of their own."""
CARD_FILE = "README.md"
STATE_FILES = (
    "optimizer*.safetensors", "optimizer*.json", "scheduler.safetensors", "scheduler.json", "rng_state_*", "sums_*.json",
    "rollouts_*", "method_state.*", "bema_state.*", "moved_reference.*", "run_state.json", "trainer_state.json",
)  # fmt: skip
"""What a checkpoint has beside its model, and a resume asks for."""
NOT_NEEDED = (files.MANIFEST, "training_args.json", CARD_FILE)
"""Files of a checkpoint that a resume from the Hub does without; its manifest is written anew."""


class PushedRun(Protocol):
    """What a push reads of a run, and where transformers keeps pushes that are on their way."""

    args: BaseConfig
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    hub_model_id: str | None
    push_in_progress: PushInProgress | None
    is_world_process_zero: Callable[[], bool]
    init_hf_repo: Callable[..., None]
    save_model: Callable[..., None]
    create_model_card: Callable[..., None]
    _finish_current_push: Callable[[], None]


def push_model(
    run: PushedRun,
    commit_message: str | None = "End of training",
    blocking: bool = True,
    token: str | None = None,
    revision: str | None = None,
    model_name: str | None = None,
    **card: Any,
) -> Any:
    """Save the model, write its card with `card` (`dataset_name`, `tags`, ...), upload both."""
    args = run.args
    run.callback_handler.on_push_begin(args, run.state, run.control)
    token = args.hub_token if token is None else token
    if run.hub_model_id is None:  # `push_to_hub=False`: the repository is made now
        run.init_hf_repo(token=token)
    run.save_model(_internal_call=True)  # every process has a part in it
    if not run.is_world_process_zero():
        return None
    run.create_model_card(model_name=model_name or run.hub_model_id.split("/")[-1], **card)
    run._finish_current_push()
    return _upload(run, args.output_dir, commit_message, token, not blocking, revision)


def push_checkpoint(run: PushedRun, folder: Path) -> None:
    """Push the model of a checkpoint, in the background, as `hub_strategy` says."""
    args = run.args
    if not run.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    if not args.hub_always_push and run.push_in_progress is not None and not run.push_in_progress.is_done():
        return
    run.callback_handler.on_push_begin(args, run.state, run.control)
    copy_model_files(folder, Path(args.output_dir))
    by_steps = args.save_strategy == SaveStrategy.STEPS
    when = f"step {run.state.global_step}" if by_steps else f"epoch {int(run.state.epoch)}"
    message = f"Training in progress, {when}"
    jobs = [_upload(run, args.output_dir, message, args.hub_token, in_background=True)]
    places = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}
    if place := places.get(args.hub_strategy):
        jobs.append(_upload(run, folder, f"{message}, checkpoint", args.hub_token, in_background=True, place=place))
    if run.push_in_progress is None or run.push_in_progress.is_done():
        run.push_in_progress = PushInProgress(jobs)
    else:
        run.push_in_progress.jobs.extend(jobs)


def upload_model_to_hf(
    folder_path: str | Path, repo_id: str, token: str | None = None, private: bool | None = None
) -> Any:
    """The model in a folder as a repository of its own."""
    _api().create_repo(repo_id, token=token, private=private, exist_ok=True)
    additions = [CommitOperationAdd(name, content) for name, content in model_files(Path(folder_path))]
    return _api().create_commit(repo_id, additions, commit_message="Upload model", token=token)


def _upload(
    run: PushedRun,
    folder: str | Path,
    message: str | None,
    token: str | None,
    in_background: bool,
    revision: str | None = None,
    place: str | None = None,
) -> Any:
    """A checkpoint has a `place` in the repository; without one, `folder` is that of the run, and its model and card go."""
    found = checkpoint_files if place is not None else model_files
    revision = revision or run.args.hub_revision

    def push() -> Any:
        listed = found(Path(folder))
        additions = [CommitOperationAdd(f"{place}/{name}" if place else name, content) for name, content in listed]
        return _api().create_commit(
            run.hub_model_id, additions, commit_message=message or "Upload model", token=token, revision=revision
        )

    return _api().run_as_future(push) if in_background else push()


@cache
def _api() -> HfApi:
    """One client for all pushes: uploads in the background then come one after the other, in order."""
    return HfApi(library_name="posttrain", library_version=__version__)


def copy_model_files(checkpoint: Path, folder: Path) -> None:
    """Weights, configs and tokenizer of a checkpoint into the run folder, whose card goes with them."""
    for path in checkpoint.iterdir():
        if path.is_file() and _is_one_of(path, MODEL_FILES):
            shutil.copy(path, folder / path.name)


def _is_one_of(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns) or path.match("additional_chat_templates/*.jinja")


def model_files(folder: Path) -> Iterator[tuple[str, Path | bytes]]:
    """(name, file or content) of the model in a folder, and of its card."""
    inner = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", files.PREFIX))]
    for path in sorted([*folder.iterdir(), *(file for sub in inner for file in sub.iterdir())]):
        if path.is_file() and _is_one_of(path, (*MODEL_FILES, CARD_FILE)):
            yield str(path.relative_to(folder)), _content(path)


def checkpoint_files(folder: Path) -> Iterator[tuple[str, Path | bytes]]:
    """(name, file or content) of what a resume needs, with a manifest of just that."""
    listed = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if not _is_one_of(path, (*MODEL_FILES, *STATE_FILES)):
            if name not in NOT_NEEDED:
                logger.warning(f"{path} is not pushed: only files whose contents are known go to the Hub.")
            continue
        content = _content(path)
        listed[name] = content if isinstance(content, bytes) else path
        yield name, content
    yield files.MANIFEST, files.manifest_text({name: _recorded(content) for name, content in listed.items()}).encode()


def _recorded(content: Path | bytes) -> FileRecord:
    if isinstance(content, bytes):
        return FileRecord(len(content), hashlib.sha256(content).hexdigest())
    return files.recorded(content)


def _content(path: Path) -> Path | bytes:
    """The file, or, of one that says how the model was made, its text without secrets and local paths."""
    if path.name in ("run_state.json", "trainer_state.json"):
        return files.json_text(published(json.loads(path.read_text(encoding="utf-8")))).encode()
    if path.name in ("config.json", "adapter_config.json", "tokenizer_config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        places = {name: last_parts(value) for name, value in config.items() if name.endswith("name_or_path") and value}
        if any(config[name] != value for name, value in places.items()):
            return (json.dumps(config | places, indent=2, ensure_ascii=False) + "\n").encode()
    if path.name == CARD_FILE:
        return hidden_text(path.read_text(encoding="utf-8")).encode()
    return path
