"""The deliberate differences that a comparison of numbers can show. docs/differences-from-trl.md tells each at length."""

from __future__ import annotations

DIFFERENCES: dict[str, str] = {
    "step-means": "logged means are over all tokens of the step; TRL averages the means of its micro-batches",
    "sft-term": "the sft term of a DPO mix is divided by the chosen tokens of the step; TRL's, of the micro-batch",
    "sorted-step": "aot and aot_unpaired sort the pairs of the whole step; TRL sorts within each micro-batch",
    "pairs-of-the-step": "every pair of a step weighs the same; in TRL a short last micro-batch weighs as much as a full one",
    "evaluation-whole": "evaluation numbers are those of all rows as one batch; TRL averages over its batches",
    "grouped-order": "group_by_length orders the rows by its own seeded rule, a function of seed and epoch; TRL by transformers'",
    "eval-num-tokens": "the running total num_tokens is logged with training; TRL repeats it in each evaluation as eval_num_tokens",
    "mask-columns": "a completion_mask column is used when it is there; TRL ignores it unless completion_only_loss=True",
    "formatting-func-columns": "formatting_func may read prompt and completion columns; TRL refuses them, or ignores the function",
    "shared-letters": "a prompt that both answers share ends at a word; TRL's at the last shared letter",
    "control-tokens": "the text of a control token inside a message is ordinary text; TRL makes it the control token",
    "weighted-hinge": "use_weighting works with hinge; TRL's backward pass fails",
    "tokenised-pairs": "rows of prompt_ids, chosen_ids and rejected_ids are read; TRL fails with a KeyError",
    "unread-options": "an option that none of the chosen losses reads is an error; TRL ignores it",
    "option-ranges": "values outside the range in which a loss means something are errors; TRL trains",
    "exact-zeros": "a completion with its group's mean reward has the advantage 0; in TRL a rounding error, counted as clipped",
    "tokens-of-the-step": "dapo divides by the tokens of the step; TRL by those of the generation over its number of steps",
    "entropy-of-the-step": "the entropy bonus is the mean over the tokens of the step; TRL averages the means of its micro-batches",
    "entropy-coef-in-force": "entropy_coef is logged as it was in force; TRL logs the one that the next step will have",
    "unscored-groups": "a group with fewer than two scored completions counts in frac_reward_zero_std; not in TRL",
    "truncated-loss": "RLOO: a completion left out for its length adds nothing to the loss; in TRL -advantage, without a gradient",
    "truncated-kl": "RLOO: the divergence of a completion left out for its length stays in its reward; in TRL it is 0",
    "rollout-order": "samples of a generation are cut into steps in the order of their groups; TRL shuffles them first",
    "cispo-cap": "cispo caps ratios at 5 unless told otherwise; TRL at epsilon 0.2, so that every token has a weight of 0.2",
    "luspo-level": "luspo takes the ratio of sequences, as its paper does, unless told otherwise; TRL that of tokens",
    "answer-logits": "logits/* of CPO and ORPO are means over the answers' tokens; TRL's over prompts and padding, too",
    "nll-shown": "nll_loss is logged whatever its weight; TRL logs 0 where cpo_alpha is 0",
    "one-end-token": "CPO and ORPO end a chat as its template does; TRL puts an end token after it",
    "nll-of-the-step": "CPO, ORPO, TPO: the nll is divided by the tokens of the step; TRL's, of the micro-batch",
    "gold-unneeded": "TPO with tpo_alpha=0 reads pairs; TRL still asks for the column `reference`",
    "kto-kl-of-the-step": "KTO's reference point is that of the step, from partners of the step; TRL's, of each micro-batch",
    "kto-rows-of-the-step": "KTO: every row of a step weighs the same; in TRL margins and means are those of micro-batches",
    "apo-kl": "apo_zero_unpaired has no reference point and logs no kl; TRL logs 0",
    "bad-rows": "rows that cannot teach anything are refused before training; TRL drops them or trains on them",
}
"""Key -> one line. A key in cases.py that is not here, or not on the page, fails the test suite."""

WITNESSED = (
    "step-means",
    "sft-term",
    "sorted-step",
    "pairs-of-the-step",
    "evaluation-whole",
    "mask-columns",
    "shared-letters",
    "entropy-of-the-step",
    "nll-of-the-step",
    "kto-kl-of-the-step",
    "kto-rows-of-the-step",
    "cispo-cap",
    "luspo-level",
)
"""Differences whose numbers are proven by a run in which TRL is given the same question: ours must equal that run."""
