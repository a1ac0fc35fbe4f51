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


def written_tokens(trainer: Any) -> None:
    """IW-OPD and GOLD divide by the tokens that were written, not by those of the dataset's completions."""
    of_trl = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, return_outputs=False, **counted: of_trl(model, inputs, return_outputs)
