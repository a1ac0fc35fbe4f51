"""Every loss as a line that a person reads, with places for its numbers: what `posttrain explain` prints.

Each line is also an expression that can be computed (`tests/losses/test_formulas.py` does, against the loss itself): sg stops the
gradient, choose(c, a, b) is a where c and b elsewhere, and `EXPRESSION where x = ...; y = ...` names its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.losses.advantages import EPSILON
from posttrain.losses.policy import CISPO_CAP, POLICY_LOSSES, chosen_level, clip_range, trust_radius

SUPERVISED_FORMULAS = {
    "nll": "-log(p)",
    "label_smoothed_nll": "-(1 - {label_smoothing_factor}) * log(p) - {label_smoothing_factor} * mean_v(log(p_v))",
    "dft": "-sg(p) * log(p)",
}
"""Name of SUPERVISED_LOSSES -> the loss of a trained token of probability p."""

PREFERENCE_FORMULAS = {
    "sigmoid": "-log(sigmoid({beta} * d))",
    "sigmoid_norm": "-log(sigmoid({beta} * (s_c / len_c - s_r / len_r)))",
    "hinge": "max(0, 1 - {beta} * d)",
    "ipo": "(s_c / len_c - s_r / len_r - 1 / (2 * {beta}))**2",
    "exo_pair": "q * log(q / (1 - {label_smoothing})) + (1 - q) * log((1 - q) / {label_smoothing}) "
    "where q = sigmoid({beta} * d)",
    "nca_pair": "-log(sigmoid({beta} * l_c)) - log(sigmoid(-{beta} * l_c)) / 2 - log(sigmoid(-{beta} * l_r)) / 2",
    "robust": "(-(1 - {label_smoothing}) * log(sigmoid({beta} * d)) + {label_smoothing} * log(sigmoid(-{beta} * d))) "
    "/ (1 - 2 * {label_smoothing})",
    "bco_pair": "-log(sigmoid({beta} * l_c)) - log(sigmoid(-{beta} * l_r))",
    "sppo_hard": "(l_c - 1 / (2 * {beta}))**2 + (l_r + 1 / (2 * {beta}))**2",
    "aot": "-(1 - {label_smoothing}) * log(sigmoid({beta} * D)) - {label_smoothing} * log(sigmoid(-{beta} * D)) "
    "where D = sort(logp_c - logp_r) - sort(ref_c - ref_r)",
    "aot_unpaired": "-(1 - {label_smoothing}) * log(sigmoid({beta} * D)) - {label_smoothing} * log(sigmoid(-{beta} * D)) "
    "where D = sort(l_c) - sort(l_r)",
    "apo_zero": "1 - sigmoid({beta} * l_c) + sigmoid({beta} * l_r)",
    "apo_down": "sigmoid({beta} * l_c) + 1 - sigmoid({beta} * (l_c - l_r))",
    "discopop": "-(1 - m) * log(sigmoid({beta} * d)) + m * exp(-{beta} * d) where m = sigmoid({beta} * d / {discopop_tau})",
    "sft": "-logp_c",
}
"""Name of PREFERENCE_LOSSES -> the loss of a pair."""

SCORE_FORMULAS = {
    "reverse_kl": "l",
    "forward_kl": "1 - exp(-l)",
    "js_divergence": "log(2) + log(sigmoid(l))",
    "alpha_divergence": "(exp(({f_alpha_divergence_coef} - 1) * l) - 1) / ({f_alpha_divergence_coef} - 1)",
}
"""Value of `f_divergence_type` -> the score s of a log-ratio l."""

REFERENCE_FREE_FORMULAS = {
    "sigmoid": ("-log(sigmoid(x))", "{beta} * D"),
    "hinge": ("max(0, 1 - x)", "{beta} * D"),
    "ipo": ("(x - 1 / (2 * {beta}))**2", "D"),
    "simpo": ("-log(sigmoid(x))", "{beta} * D - {simpo_gamma}"),
    "tpo-l": ("-log(sigmoid(x))", "{beta} * D - {tpo_l_gamma}"),
}
"""Name of REFERENCE_FREE_LOSSES -> the loss of a pair, and the x in it."""

ODDS_RATIO_FORMULA = (
    "-{beta} * log(sigmoid(o)) where o = log(exp(m_c) / (1 - exp(m_c))) - log(exp(m_r) / (1 - exp(m_r)))"
)

UNPAIRED_FORMULAS = {
    "kto": "1 - sigmoid({beta} * s * (l - z))",
    "apo_zero_unpaired": "1 - sigmoid({beta} * s * l)",
    "bco": "-log(sigmoid(s * ({beta} * l - delta)))",
}
"""Name of UNPAIRED_LOSSES -> the loss of a row."""

REWARD_FORMULAS = {
    "bradley_terry": "-log(sigmoid(r_c - r_r - margin))",
    "centring": "(r_c + r_r)**2",
    "step_cross_entropy": "-choose(label > 0, log(p), log(1 - p))",
}
"""Function of losses/reward -> the loss of a pair or of a step."""

SURROGATE_FORMULAS = {
    "clipped": "-min(rho * A, clip(rho, {below}, {above}) * A)",
    "clipped with delta": "-min(min(rho, {delta}) * A, clip(rho, {below}, {above}) * A)",
    "cispo": "-sg(min(rho, {cap})) * A * log(p)",
    "sapo": "-A * sigmoid(tau * (rho - 1)) * 4 / tau where tau = choose(A > 0, {sapo_temperature_pos}, {sapo_temperature_neg})",
    "vespo": "-sg(phi) * A * log(p) where w = prod_t(rho); k = choose(A >= 0, {vespo_k_pos}, {vespo_k_neg}); "
    "c = choose(A >= 0, {vespo_lambda_pos}, {vespo_lambda_neg}); phi = exp(c + k * log(w) - c * w)",
    "gmpo": "-exp(mean_t(c)) * A where c = choose(A >= 0, min(log(rho), {high}), max(log(rho), -{low}))",
    "dppo": "-sg(M * min(p / mu, {clip_ratio_c})) * A * log(p) where D = {divergence}; "
    "M = choose(A > 0, 1 - (p > mu) * (D > {high}), 1 - (p < mu) * (D > {low}))",
}
"""Function of losses/policy -> what a token adds: rho its ratio, A its advantage, p its probability."""

PERCEPTION_FORMULA = (
    "-{perception_loss_weight} * min(D, {largest}) + {der_loss_weight1} * H + {der_loss_weight2} * H_m "
    "where D = p_m / p - log(p_m / p) - 1"
)
"""What PAPO adds to a token: H and H_m are entropies, _m is said with a masked picture."""

TRUST_FORMULAS = {
    "binary_tv": "abs(p - mu)",
    "binary_kl": "mu * log(mu / p) + (1 - mu) * log((1 - mu) / (1 - p))",
    "topk_tv": "sum_k(abs(p_k - mu_k)) / 2",
    "topk_kl": "sum_k(mu_k * log(mu_k / p_k))",
}
"""Value of `divergence_type` -> how far the policy is from the sampler, which drew the token with the probability mu."""

RATIO_FORMULAS = {
    "token": "p / p_old",
    "sequence": "exp(mean_t(log(p / p_old)))",
    "sequence_token": "sg(exp(mean_t(log(p / p_old)))) * p / sg(p)",
    "sequence_sum": "exp(sum_t(log(p / p_old)))",
}
"""Value of `importance_sampling_level` -> the ratio rho."""

PPO_FORMULAS = {
    "policy": SURROGATE_FORMULAS["clipped"],
    "value": "{vf_coef} * max((v - R)**2, (clip(v, V - {cliprange_value}, V + {cliprange_value}) - R)**2) / 2",
    "advantage": "whitened over the generation: sum_k ({gamma} * {lam})^k * (r_(t+k) + {gamma} * V_(t+k+1) - V_(t+k)), "
    "V = 0 after the last token",
    "k1": "-{kl_coef} * log(p_old / p_ref) + ",
    "k3": "-{kl_coef} * (p_ref / p_old - log(p_ref / p_old) - 1) + ",
    "abs": "-{kl_coef} * |log(p_old / p_ref)| + ",
    "mse": "-{kl_coef} * log(p_old / p_ref)**2 / 2 + ",
}
"""Parts of PPO: the terms of a token, of value v and return R, and what A and r are made of."""

DIVERGENCE_FORMULAS = {
    "forward": "sum_v(q * log(q / p))",
    "reverse": "sum_v(p * log(p / q))",
    "sampled": "sg(log(p / q)) * log(p)",
    "between": "{beta} * sum_v(q * log(q / m)) + (1 - {beta}) * sum_v(p * log(p / m)) where m = (1 - {beta}) * p + {beta} * q",
}
"""Of a token: from the student's distribution p to the teacher's q, for beta 0, 1 and between; of the written token alone."""

NORMALISERS = {
    "per_token": "sum over tokens / {tokens} trained tokens of the step",
    "mean_of_token_means": "mean over the tokens of a completion, sum over completions / {sequences} completions of the step",
    "mean_of_token_sums": "sum over the tokens of a completion, sum over completions / {sequences} completions of the step",
    "per_possible_token": "sum over tokens / ({sequences} completions of the step x {max_completion_length} possible tokens)",
    "per_local_token": "mean over the tokens of a micro-batch, mean over the {batches} micro-batches of the step",
}
"""Function of losses/policy -> what is divided by what."""

ADVANTAGE_FORMULAS = {
    "group": "(r - mean_group(r)) / (std_group(r) + 1e-4)",
    "batch": "(r - mean_group(r)) / (std_batch(r) + 1e-4)",
    "none": "r - mean_group(r)",
    "normalize_then_sum": "(z - mean_batch(z)) / (std_batch(z) + 1e-4) where z = sum_k(weight_k * (r_k - mean_group(r_k)) "
    "/ (std_group(r_k) + 1e-4))",
    "rloo": "r - mean of the other {others} of the group",
}
"""Value of `scale_rewards` (or the name of another rule) -> the advantage A; `std` is the sample's."""


def advantage_formula(rule: str, std: str, epsilon: float = EPSILON) -> str:
    """With another standard deviation than the sample's, the line says so."""
    line = ADVANTAGE_FORMULAS[rule].replace("1e-4", number(epsilon)) if epsilon != EPSILON else ADVANTAGE_FORMULAS[rule]
    return line if std == "sample" else line.replace("std_", f"{std}_std_")


@dataclass(frozen=True)
class Formula:
    """The loss of a run: its terms, what the names in them mean, and what is divided by what."""

    terms: tuple[str, ...]
    divided_by: tuple[str, ...]
    names: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        shown = [f"loss = {term}" if not i else f"     + {term}" for i, term in enumerate(self.terms)]
        divided = [f"  {part}" for part in self.divided_by]
        return [*shown, *divided, *(f"  {name} = {meaning}" for name, meaning in self.names)]


def number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def filled(formula: str, values: Any) -> str:
    """The formula with the numbers of `values`, a mapping or a config, in their places."""
    known = values if isinstance(values, dict) else vars(values)
    return formula.format_map({name: number(value) for name, value in known.items()})


def reference_free_line(name: str, args: Any) -> str:
    """A loss of REFERENCE_FREE_LOSSES with its numbers; labels are smoothed in the line where they are in the run."""
    loss, x = (filled(part, args) for part in REFERENCE_FREE_FORMULAS[name])
    smoothing = getattr(args, "label_smoothing", 0.0)
    if not smoothing:
        return loss.replace("(x", f"({x}").replace("- x", f"- {x}")
    return f"-(1 - {smoothing:g}) * log(sigmoid(x)) - {smoothing:g} * log(sigmoid(-x)) where x = {x}"


def of_answers(of_means: bool, alpha: float) -> tuple[tuple[str, str], ...]:
    """What the names in a loss without a reference mean."""
    logps = "mean of log(policy) over an answer's tokens" if of_means else "sum of log(policy) over an answer's tokens"
    if not alpha:
        return (("D", "m_c - m_r"), ("m", logps)) if of_means else (("D", "s_c - s_r"), ("s", logps))
    shape = f"(1 - exp(-{number(alpha)} * m)) / {number(alpha)}"
    return (("D", "R_c - R_r"), ("R", shape), ("m", logps))


Totals = dict[str, str]
"""What the step divides by, in words: tokens, sequences, units, batches."""


def divergence_formula(beta: float, totals: Totals, names: tuple[tuple[str, str], ...]) -> Formula:
    """The loss of a student that is compared with a teacher."""
    line = DIVERGENCE_FORMULAS[{0: "forward", 1: "reverse"}.get(beta, "between")]
    return Formula((filled(line, {"beta": beta}),), (filled(NORMALISERS["per_token"], totals),), names)


def policy_formula(name: str, args: Any, totals: Totals, advantage: str) -> Formula:
    """Surrogate, ratio, advantage and divisor of a policy loss; a method adds its own terms."""
    loss = POLICY_LOSSES[name]
    level = chosen_level(name, loss, importance_sampling_level=getattr(args, "importance_sampling_level", None))
    divided = filled(
        NORMALISERS[loss.normaliser.__name__], totals | {"max_completion_length": args.max_completion_length}
    )
    names = (("rho", RATIO_FORMULAS[level]), ("A", advantage))
    return Formula((surrogate_line(name, args),), (divided,), names + old_policy_names(args))


def old_policy_names(args: Any) -> tuple[tuple[str, str], ...]:
    """Whose p_old is, where the step does not begin with it."""
    on_sampler = getattr(args, "centres_on_sampler", False)
    return (("p_old", "probability under the weights that wrote the token"),) if on_sampler else ()


def surrogate_line(name: str, args: Any) -> str:
    """The surrogate of a policy loss with its numbers."""
    kind = POLICY_LOSSES[name].surrogate.__name__
    values = dict(vars(args))
    given = (values.get("epsilon"), values.get("epsilon_high"))
    if kind == "clipped":
        low, high = clip_range(*given, 0.2)
        values |= {"below": 1 - low, "above": 1 + high}
        kind = "clipped" if values.get("delta") is None else "clipped with delta"
    if kind == "gmpo":
        values["low"], values["high"] = clip_range(*given, 0.4)
    if kind == "dppo":
        values["divergence"] = TRUST_FORMULAS[values["divergence_type"]]
        values["low"], values["high"] = clip_range(*given, trust_radius(values["divergence_type"]))
    values["cap"] = CISPO_CAP if given[1] is None else given[1]
    return filled(SURROGATE_FORMULAS[kind], values)
