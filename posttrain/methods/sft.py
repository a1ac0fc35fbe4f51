"""Supervised fine-tuning: next-token training on texts, conversations or completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import SUMMED, LossOutput, LossTerm, TokenScores
from posttrain.data.packing import PACKING_STRATEGIES
from posttrain.data.rows.formats import LANGUAGE_MODELLING, PROMPT_COMPLETION, TOKENISED
from posttrain.losses.formulas import SUPERVISED_FORMULAS, Formula, Totals, filled
from posttrain.losses.supervised import dft, label_smoothed_nll, nll
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.trainer.base import BaseTrainer
from posttrain.trainer.options.base import BaseConfig, check_choice, check_range, option
from posttrain.trainer.options.images import ImageConfig

LOSS_ALIASES = {"chunked_nll": "nll"}
PACKING_ALIASES = {"bfd-requeue": "bfd_split"}


@dataclass
class SFTConfig(ImageConfig, BaseConfig):
    """Options of supervised fine-tuning."""

    reads_label_smoothing_factor: ClassVar[bool] = True
    _VALID_DICT_FIELDS = [*BaseConfig._VALID_DICT_FIELDS, "dataset_kwargs"]

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
        None,
        "Only key: skip_prepare_dataset. Rows with `input_ids` need no such word; items that are tuples of Samples do.",
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
        if isinstance(self.dataset_kwargs, dict) and set(self.dataset_kwargs) - {"skip_prepare_dataset"}:
            raise ValueError(
                f"`dataset_kwargs` knows skip_prepare_dataset only; found {', '.join(self.dataset_kwargs)}."
            )
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

    method, title = "sft", "supervised fine-tuning"
    shares_rows = True
    config_class = SFTConfig
    formats = (LANGUAGE_MODELLING, PROMPT_COMPLETION, TOKENISED)
    roles = ("text",)

    def __init__(self, model: Any, *given: Any, loss: Callable[[Tensor], Tensor] | None = None, **named: Any) -> None:
        """As BaseTrainer, and `loss`: a custom function from the log-probs of the trained tokens to their losses."""
        for name in ("compute_loss_func", "preprocess_logits_for_metrics"):
            if named.pop(name, None) is not None:
                raise ValueError(
                    f"`{name}` reads logits, which are never kept. Pass `loss`, a function of token log-probs, or override `loss`."
                )
        self.custom_loss = loss
        super().__init__(model, *given, **named)

    def _prepared(self, dataset: Any, name: str) -> Any:
        if (self.args.dataset_kwargs or {}).get("skip_prepare_dataset") and not hasattr(dataset, "column_names"):
            return dataset
        return super()._prepared(dataset, name)

    def prepare_options(self, is_training: bool) -> dict[str, Any]:
        args = self.args
        packing = args.packing if is_training or args.eval_packing is None else args.eval_packing
        return {
            "completion_only_loss": args.completion_only_loss,
            "assistant_only_loss": args.assistant_only_loss,
            "dataset_text_field": args.dataset_text_field,
            "packing": args.packing_strategy if packing else None,
        }

    def recomputes_logits(self) -> bool:
        """A plain sum of nll has its gradient in the forward."""
        return self.args.loss_type != "nll" or self.custom_loss is not None

    def differentiable_stats(self) -> tuple[str, ...]:
        return ("mean_logps",) if self.args.label_smoothing_factor else ()

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        args = self.args
        if self.compute_metrics is not None and not model.training:
            stats = (*stats, "most_likely")
        return score_tokens(
            model,
            batch,
            stats,
            summed=not self.recomputes_logits(),
            label_smoothing=args.label_smoothing_factor,
            differentiable_stats=self.differentiable_stats(),
            **self.scoring_options(),
        )

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        if policy.nll_sum is not None:  # the gradient was computed with the forward
            return LossOutput([LossTerm(policy.nll_sum, per="token", entries=SUMMED)])
        return LossOutput(self._token_losses(policy), per="token")

    def _token_losses(self, policy: TokenScores) -> Any:
        args = self.args
        if self.custom_loss is not None:
            return self.custom_loss(policy.logps)
        if args.loss_type == "dft":
            return dft(policy.logps)
        if args.label_smoothing_factor:
            return label_smoothed_nll(
                policy.logps, policy.stats["mean_logps"], label_smoothing=args.label_smoothing_factor
            )
        return nll(policy.logps)

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        name = "label_smoothed_nll" if args.label_smoothing_factor else args.loss_type
        divided = (f"sum over tokens / {totals['tokens']} trained tokens of the step",)
        return Formula((filled(SUPERVISED_FORMULAS[name], args),), divided, (("p", "probability of a trained token"),))

    def predictions(
        self, batch: TokenBatch, policy: TokenScores, output: LossOutput
    ) -> tuple[Tensor | None, Tensor | None]:
        """For `compute_metrics`: the likeliest token and the target at each trained token, a row a sample, filled with -100."""
        if "most_likely" not in policy.stats:
            return None, None
        sizes = batch.counts.tolist()
        rows = (torch.split(values.long(), sizes) for values in (policy.stats["most_likely"], batch.targets))
        predicted, targets = (nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=-100) for part in rows)
        return predicted, targets
