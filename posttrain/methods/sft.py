"""Supervised fine-tuning: next-token training on texts, conversations or completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.data.packing import PACKING_STRATEGIES
from posttrain.data.row_formats import LANGUAGE_MODELLING, PROMPT_COMPLETION, TOKENISED
from posttrain.losses.supervised import dft, label_smoothed_nll, nll
from posttrain.models.token_scores import score_tokens
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.config import BaseConfig, check_choice, check_range, option

LOSS_ALIASES = {"chunked_nll": "nll"}
PACKING_ALIASES = {"bfd-requeue": "bfd_split"}


@dataclass
class SFTConfig(BaseConfig):
    """Options of supervised fine-tuning."""

    learning_rate: float = option(2e-5, "Initial learning rate of AdamW.")
    disable_dropout: bool = option(False, "Set every dropout probability of the model to 0.")
    loss_type: str = option(
        "nll", "nll: negative log-likelihood; dft: the same weighted by the token's own probability."
    )
    completion_only_loss: bool | None = option(
        None, "Train on completions only. None: yes for prompt-completion rows, no for plain texts and conversations."
    )
    assistant_only_loss: bool = option(False, "Train on the assistant's turns only, end-of-turn token included.")
    dataset_text_field: str = option("text", "Column that holds the text of language-modelling rows.")
    dataset_kwargs: dict[str, Any] | str | None = option(
        None, "Only key: skip_prepare_dataset=True, for a dataset whose items are tuples of Samples already."
    )
    packing: bool = option(
        False, "Put several sequences into blocks of `max_length` tokens; they do not see each other."
    )
    packing_strategy: str = option(
        "bfd", "bfd: best fit, over-long ones cut; bfd_split: best fit, cut pieces kept; wrapped."
    )
    eval_packing: bool | None = option(None, "Pack the evaluation data too. None: as `packing`.")

    def __post_init__(self) -> None:
        self.loss_type = LOSS_ALIASES.get(self.loss_type, self.loss_type)
        self.packing_strategy = PACKING_ALIASES.get(self.packing_strategy, self.packing_strategy)
        super().__post_init__()
        check_choice("loss_type", self.loss_type, ("nll", "dft"))
        check_choice("packing_strategy", self.packing_strategy, tuple(PACKING_STRATEGIES))
        check_range("label_smoothing_factor", self.label_smoothing_factor, 0, 1)
        if self.packing and self.max_length is None:
            raise ValueError("`packing` fills blocks of `max_length` tokens: set `max_length`.")
        if self.packing and self.padding_free is False:
            raise ValueError(
                "Packed sequences are kept apart by ragged attention: leave `padding_free` out, or set it to True."
            )
        if self.loss_type == "dft" and self.label_smoothing_factor:
            raise ValueError(
                "`label_smoothing_factor` belongs to loss_type 'nll'; 'dft' weighs tokens by their probability."
            )


class SFTTrainer(BaseTrainer):
    """Supervised fine-tuning on whole texts, conversations, completions or the assistant's turns."""

    method = "sft"
    config_class = SFTConfig
    formats = (LANGUAGE_MODELLING, PROMPT_COMPLETION, TOKENISED)
    roles = ("text",)

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Callable | None = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable | None = None,
    ) -> None:
        self.compute_token_loss = compute_loss_func
        if preprocess_logits_for_metrics is not None:
            raise ValueError(
                "Logits are never kept, so `preprocess_logits_for_metrics` has nothing to read; leave it out."
            )
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            quantization_config,
            peft_config,
            formatting_func,
        )

    def prepare_options(self) -> dict[str, Any]:
        args = self.args
        return {
            "completion_only_loss": args.completion_only_loss,
            "assistant_only_loss": args.assistant_only_loss,
            "dataset_text_field": args.dataset_text_field,
            "packing": args.packing_strategy if args.packing else None,
        }

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        args = self.args
        return score_tokens(
            model,
            batch,
            stats,
            chunk_tokens=args.chunk_tokens,
            summed=args.loss_type == "nll" and self.compute_token_loss is None,
            label_smoothing=args.label_smoothing_factor,
            differentiable_stats=("mean_logps",) if args.label_smoothing_factor else (),
            router_loss=self.uses_router_loss,
        )

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        if policy.nll_sum is not None:  # the gradient was computed with the forward
            return LossOutput(policy.nll_sum, per="token")
        return LossOutput(self._token_losses(policy), per="token")

    def _token_losses(self, policy: TokenScores) -> Any:
        args = self.args
        if self.compute_token_loss is not None:
            return self.compute_token_loss(policy.logps)
        if args.loss_type == "dft":
            return dft(policy.logps)
        if args.label_smoothing_factor:
            return label_smoothed_nll(
                policy.logps, policy.stats["mean_logps"], label_smoothing=args.label_smoothing_factor
            )
        return nll(policy.logps)
