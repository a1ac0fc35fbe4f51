"""TRL without one of its faults: runs in which its numbers must equal ours, the witnesses of declared differences."""

from __future__ import annotations

from typing import Any

import torch


def delta_first(trainer: Any) -> None:
    """BCO with the delta of the steps before: the rewards of a micro-batch are added after its loss."""
    of_trl, trainer.running.mean = trainer.bco_loss, 0.0

    def bco_loss(*given: Any, do_train: bool = True) -> Any:
        found = of_trl(*given, do_train=False)
        if do_train:
            trainer.running.update(torch.cat(found[1:3]).detach())
        return found

    trainer.bco_loss = bco_loss


def mask_placeholders(trainer: Any) -> None:
    """SFT without the loss of placeholders of images."""
    of_trl, placeholder = trainer.data_collator, trainer.model.config.image_token_id

    def collate(examples: Any) -> Any:
        made = of_trl(examples)
        made["labels"][made["input_ids"] == placeholder] = -100
        return made

    trainer.data_collator = collate


def written_tokens(trainer: Any) -> None:
    """IW-OPD and GOLD divide by the tokens that were written, not by those of the dataset's completions."""
    of_trl = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, return_outputs=False, **counted: of_trl(model, inputs, return_outputs)


def active_samples(trainer: Any) -> None:
    """SDPO divides by the completions whose teacher is shown something, not by all."""
    of_trl = trainer._compute_self_distillation_loss

    def loss_of_active(model: Any, inputs: Any, logits: Any) -> Any:
        active = inputs["self_distillation_mask"]
        return of_trl(model, inputs, logits) * len(active) / active.sum().clamp(min=1)

    trainer._compute_self_distillation_loss = loss_of_active


def ema_from_copy(trainer: Any) -> None:
    """SDFT's averaged adapter begins as a copy of the policy's, not at 0."""
    from peft import set_peft_model_state_dict

    (averaging,) = [one for one in trainer.callback_handler.callbacks if type(one).__name__ == "PEFTAdapterEMACallback"]
    of_trl = averaging._initialize_teacher_adapter

    def begin() -> None:
        if averaging._initialized:
            return
        of_trl()
        averaging.shadow_weights = {key: value.clone() for key, value in averaging._get_student_state_dict().items()}
        set_peft_model_state_dict(trainer.model, averaging.shadow_weights, adapter_name="teacher")

    averaging._initialize_teacher_adapter = begin


def gain_of_tokens(trainer: Any, after_step: bool = False) -> None:
    """MiniLLM: the teacher's gain has no gradient, tokens count by their distance, and padding does not count."""
    of_trl, mask = trainer.compute_loss, {}
    step, gamma = trainer._single_step_decomposition_loss, trainer.gamma

    def compute_loss(model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        mask["mask"] = inputs["completion_mask"].bool()
        return of_trl(model, inputs, *given, **named)

    def discounted(values: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(values)
        for place in reversed(range(values.shape[1])):
            found[:, place] = values[:, place] + (gamma * found[:, place + 1] if place + 1 < values.shape[1] else 0)
        return found

    def gains(student_log_probs_on_labels: Any, teacher_log_probs_on_labels: Any, **given: Any) -> torch.Tensor:
        counted = mask["mask"].float()
        found = discounted((teacher_log_probs_on_labels - student_log_probs_on_labels).detach() * counted)
        if trainer.length_normalization:
            found = found / discounted(counted).clamp(min=1)
        return torch.nn.functional.pad(found[:, 1:], (0, 1)) if after_step else found

    trainer.compute_loss, trainer._compute_advantage = compute_loss, gains
    trainer._single_step_decomposition_loss = lambda **given: step(**given | mask)


def gain_after_step(trainer: Any) -> None:
    """The same, and advantages begin with the token behind."""
    gain_of_tokens(trainer, after_step=True)


def boundaries(trainer: Any) -> None:
    """GOLD compares the distributions that foretell the first token of each group, whole."""
    compared = trainer.uld_loss_fn
    compared.token_merge_strategy = "bayesian"  # reads the distribution before each token
    compared._merge_probabilities_with_alignment_groups = lambda probs, groups, ids: probs[
        [group[0] for group in groups]
    ]
