"""The critic of a policy: the value of the state before each token, by a head on the policy's hidden states or by another model.

It is attached to the innermost policy as the submodule `critic`, after adapters and reference are made: one forward pass answers
for both, and optimizer, DDP, FSDP and gradient clipping see its weights like all others. What is exported to engines or saved as
the policy does not hold it: transformers and `weight_export` leave out the names in `_keys_to_ignore_on_save`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.models.load.model import innermost_model
from posttrain.models.scoring.heads import HeadQuestion, sequence_head
from posttrain.models.scoring.token_scores import Question, ScoreRequest, forward_kwargs
from posttrain.models.sharding import reshard, whole

CRITIC = "critic"
HEAD_FILE, MODEL_FOLDER, MODEL_FILE = "value_head.safetensors", "value_model", "model.safetensors"


def value_head(policy: nn.Module) -> nn.Linear:
    """A linear head on the policy's last hidden state. Its weights are 0: so are the first values."""
    innermost = innermost_model(policy)
    like = next(p for p in innermost.parameters() if p.is_floating_point())
    dtype = torch.promote_types(like.dtype, torch.float32)  # a value in bfloat16 would have 3 digits
    head = nn.Linear(innermost.config.get_text_config().hidden_size, 1, device=like.device, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def attach_critic(policy: nn.Module, critic: nn.Module) -> None:
    """From now on the policy answers `value_question`; its exports and saved folders stay as they were."""
    innermost = innermost_model(policy)
    if hasattr(innermost, CRITIC):
        raise ValueError(
            f"{type(innermost).__name__} has a submodule `{CRITIC}` already: load the model afresh, and give a critic that was "
            "trained before as `value_model`."
        )
    critic.requires_grad_(True)
    setattr(innermost, CRITIC, critic)
    names = {f"{CRITIC}.{name}" for name in critic.state_dict()}
    innermost._keys_to_ignore_on_save = {*(innermost._keys_to_ignore_on_save or ()), *names}


def as_critic(model: nn.Module) -> nn.Module:
    """A loaded sequence classifier, whose head computes in float32 or better."""
    if innermost_model(model) is not model:
        raise ValueError("`value_model` has an adapter or a wrapper around it: give the plain sequence classifier.")
    head = sequence_head(model)
    head.to(torch.promote_types(next(head.parameters()).dtype, torch.float32))
    return model


# ---- asking it -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueQuestion(HeadQuestion):
    """A value at each position, computed in the dtype of the head."""

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        head = sequence_head(model) if self.module is None else getattr(model, self.module)
        return super().answer(model, rows.to(next(head.parameters()).dtype))


@dataclass(frozen=True)
class ValueModelQuestion:
    """The same of a critic with a body of its own, which reads the batch that the policy reads."""

    positions: Tensor
    inputs: dict[str, Any]
    width: int

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        request = ScoreRequest((ValueQuestion("values", self.positions),), self.width)
        return getattr(model, CRITIC)(**self.inputs, use_cache=False, score=request)


def value_question(critic: nn.Module, batch: TokenBatch) -> Question:
    """V_t for each trained token: at the position that predicts it, which has not seen it."""
    if isinstance(critic, nn.Linear):
        return ValueQuestion("values", batch.positions, CRITIC)
    return ValueModelQuestion(batch.positions, forward_kwargs(batch), batch.input_ids.shape[1])


# ---- its files -----------------------------------------------------------------------------------------------------------


def critic_tensors(critic: nn.Module) -> dict[str, Tensor]:
    """Its weights, whole. To be called by all processes where they are sharded."""
    reshard(critic)
    return {name: whole(tensor.detach()) for name, tensor in critic.state_dict(keep_vars=True).items()}


def critic_file(critic: nn.Module, folder: Path) -> Path:
    """Where a folder keeps the weights of such a critic."""
    return folder / HEAD_FILE if isinstance(critic, nn.Linear) else folder / MODEL_FOLDER / MODEL_FILE


def load_critic(critic: nn.Module, folder: Path) -> None:
    """Take over the weights that were saved into a folder."""
    path = critic_file(critic, folder)
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {path.relative_to(folder)}: it was not saved by PPO with such a critic."
        )
    saved, own = load_file(path), critic.state_dict()
    shapes, wanted = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (saved, own))
    if wrong := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
        raise ValueError(f"{path} does not fit this critic: {wrong[0]} is missing or has another shape.")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def saved_head(named: str | Path) -> Path | None:
    """The folder of a value head that PPO has saved, where `named` is such a folder."""
    return Path(named) if (Path(named) / HEAD_FILE).is_file() else None


def classifier_folder(named: str | Path) -> str | Path:
    """What a value model is loaded from: a folder that PPO has saved holds it below."""
    below = Path(named) / MODEL_FOLDER
    return below if below.is_dir() else named
