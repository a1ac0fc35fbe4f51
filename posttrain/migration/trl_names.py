"""`import trl` answered by posttrain: which module of TRL's has which of our names, and what to say of the others."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import posttrain

PLACES: dict[str, str] = {
    "DatasetConfig": "posttrain.migration.script_arguments",
    "disable_dropout_in_model": "posttrain.models.load.model",
    "PPOv2Config": "posttrain.methods.ppo",
    "PPOv2Trainer": "posttrain.methods.ppo",
}
"""Names of TRL's that `posttrain` itself does not have -> where they are."""
RENAMED = {"disable_dropout_in_model": "disable_dropout", "PPOv2Config": "PPOConfig", "PPOv2Trainer": "PPOTrainer"}
_VALUE_HEAD = "PPOTrainer puts a value head on a plain causal model itself: load it with AutoModelForCausalLM"
UNSUPPORTED: dict[str, str] = {
    "AutoModelForCausalLMWithValueHead": _VALUE_HEAD,
    "AutoModelForSeq2SeqLMWithValueHead": "encoder-decoder models are not supported",
    "PreTrainedModelWrapper": _VALUE_HEAD,
    "WeaveCallback": "posttrain writes every rollout to parquet: `posttrain view RUN` shows them",
    "build_teacher_request_inputs": "ServerDistillationTrainer asks the teacher's server itself",
    "setup_chat_format": "it is gone from TRL, too: use_chat_format(model, tokenizer, 'chatml')",
    "DataCollatorForCompletionOnlyLM": "SFTConfig(completion_only_loss=True) on prompt and completion columns does that",
}
"""Names that scripts import often and that are not there -> what to do."""
SHARED: dict[str, tuple[str, ...]] = {
    "gspo_token": ("GRPOTrainer",),  # GRPO with `importance_sampling_level="sequence_token"`, which ours has
    "bema_for_ref_model": ("DPOTrainer",),  # DPO whose reference BEMACallback may move, which ours lets it
}
"""Module of trl.experimental -> trainers that it has under the name of another module's and that are ours of that name."""
ROOT = "trl"
EXPERIMENTAL = f"{ROOT}.experimental."
MODULES = ("chat_template_utils", "data_utils", "extras", "import_utils", "models", "rewards", "scripts", "trainer")
"""Modules that `import trl` alone gives, as attributes."""


class UnsupportedByPosttrain(ImportError):
    """A script asks for something of TRL's that posttrain does not have; the message names it and the way round."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `trl` and every module below it out of posttrain's names."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name == ROOT or name.startswith(f"{ROOT}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        module.__version__ = posttrain.__version__


class _Module(ModuleType):
    """One of TRL's modules: every name is looked up when it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == ROOT and name in MODULES:
            return importlib.import_module(f"{ROOT}.{name}")
        return found(name, self.__name__)


def found(name: str, module: str = ROOT) -> Any:
    """posttrain's object of that name. The experimental modules of TRL have trainers of their own under names of stable ones."""
    part, plain = module.removeprefix(EXPERIMENTAL).partition(".")[0], name.removesuffix("Trainer")
    is_own = plain.lower() == part.replace("_", "") or name in SHARED.get(part, ())
    if module.startswith(EXPERIMENTAL) and name != plain and not is_own:
        raise UnsupportedByPosttrain(
            f"The script imports {name} from {module}, which is another trainer than the {name} that posttrain may have."
        )
    if name in PLACES:
        return getattr(importlib.import_module(PLACES[name]), RENAMED.get(name, name))
    if name in posttrain.__all__:
        return getattr(posttrain, name)
    why = UNSUPPORTED.get(name)
    hint = f": {why}" if why else ". docs/differences-from-trl.md lists what is there"
    raise UnsupportedByPosttrain(f"The script imports {name} from {module}, which posttrain does not have{hint}.")


def install() -> None:
    """From now on `import trl` gives posttrain, whether TRL is installed or not."""
    uninstall()
    sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """`import trl` finds what it found before."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]:
        del sys.modules[name]
