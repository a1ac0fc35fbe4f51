"""Cases of distillation: from a teacher in memory or behind a server, with another tokenizer, or from the model itself.

Both libraries are given the same completions (completions.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.parity.case import Case
from benchmarks.parity.completions import MAX_LENGTH

OURS = {"keep_rollouts": False, "rollout_engine": "transformers"}
ONCE = {"max_completion_length": MAX_LENGTH, "shuffle_dataset": False}
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05}  # AdamW amplifies rounding
AGAIN: dict[str, Any] = {"num_iterations": 3, "max_steps": 6, **SGD}
LEARNT = ("loss", "grad_norm", "weights:*")


def gkd(name: str, **options: Any) -> Case:
    """On the dataset's completions: those of the student are drawn by another engine. In TRL's order of rows, which is seeded
    otherwise."""
    theirs = {"train_sampling_strategy": "sequential"}
    ours = {**OURS, "shuffle_dataset": False}
    return Case(
        f"gkd-{name}", "gkd", "messages", {"lmbda": 0.0, **options}, ours, theirs, teacher="other", splits=("1x4",)
    )


def distillation(name: str, **options: Any) -> Case:
    named = (f"distillation-{name}", "distillation", "prompt_only", {**ONCE, **options}, OURS)
    return Case(*named, teacher="other", written_by="engine", differs_when_split={"entropy": "step-means"})


def served(name: str, **options: Any) -> Case:
    """From a teacher behind our server, whose answers TRL is given, too."""
    return replace(
        distillation(name, **options),
        name=f"server-distillation-{name}",
        method="server_distillation",
        differs_when_split=dict.fromkeys(LEARNT, "server-tokens-of-the-step"),
        splits=("1x4",),
    )


def rows_taught(method: str, name: str, rows: str = "messages", **options: Any) -> Case:
    """IW-OPD and GOLD, which read completions of a dataset, in a shuffled order."""
    options = {"max_completion_length": MAX_LENGTH, "lmbda": 0.0, **options}
    ours = {**OURS, "shuffle_dataset": True}
    return Case(
        f"{method.replace('_', '-')}-{name}", method, rows, options, ours, teacher="other", written_by="engine",
        splits=("1x4",),
    )  # fmt: skip


def iw_opd(name: str, **options: Any) -> Case:
    return rows_taught("iw_opd", name, **{"lmbda": 1.0, **options})


def jsd(name: str, **options: Any) -> Case:
    return iw_opd(f"jsd-{name}", distillation_objective="jsd", lmbda=0.0, **options)


def gold(name: str, rows: str = "messages", **options: Any) -> Case:
    return rows_taught("gold", name, rows, **options)


def in_groups(method: str, name: str, rows: str, *rewards: str, **options: Any) -> Case:
    """Methods with several completions of a prompt."""
    options = {**ONCE, "num_generations": 4, **options}
    return Case(
        f"{method}-{name}", method, rows, options, OURS | ({"reward_workers": 0} if rewards else {}), rewards=rewards,
        written_by="engine", splits=("1x8",),
    )  # fmt: skip


def sdft(name: str, **options: Any) -> Case:
    return in_groups("sdft", name, "privileged", **options)


def sdpo(name: str, *rewards: str, **options: Any) -> Case:
    return in_groups("sdpo", name, "privileged", *(rewards or ("brevity",)), success_reward_threshold=0.15, **options)


def minillm(name: str, *rewards: str, **options: Any) -> Case:
    case = in_groups("minillm", name, "prompt_only", *(rewards or ("brevity",)), **options)
    return replace(case, teacher="other", written_by="function", trl_version="1.10.0")


def ssd(name: str, **options: Any) -> Case:
    """One completion of each prompt."""
    options = {**ONCE, **options}
    return Case(
        f"ssd-{name}", "ssd", "prompt_only", options, OURS, written_by="engine", trl_version="1.10.0", splits=("1x4",)
    )


UNWRITTEN = dict.fromkeys((*LEARNT, "on_policy_loss"), "written-tokens")
BEHIND = dict.fromkeys((*LEARNT, "off_policy_loss"), "uld-boundaries")
WORDS = dict.fromkeys((*LEARNT, "off_policy_loss", "matched_loss", "unmatched_loss"), "uld-words")
OF_LOSS = dict.fromkeys(
    ("self_distillation/distillation_loss", "s*/distillation_loss"), "distillation-loss-of-completions"
)
ACTIVE = dict.fromkeys((*LEARNT, "self_distillation/policy_loss"), "sdpo-active")
SUCCESSES = {"self_distillation/success_sample_fraction": "sdpo-successes"}
GAINS = dict.fromkeys((*LEARNT, "entropy", "clip_ratio/*"), "minillm-gain")
LONG_TERM = dict.fromkeys(GAINS, "minillm-long-term")
ULD: dict[str, Any] = {"use_uld_loss": True, "rows": "prompt_completion", **SGD}


def declared(case: Case, differs: dict[str, str], witness: str | None = None) -> Case:
    return replace(case, differs=differs, witness=witness)


def corrected(case: Case, name: str, **differs: str) -> Case:
    return replace(case, corrected=name, differs=differs)


def merging(case: Case) -> Case:
    """The teacher has another tokenizer."""
    return replace(case, teacher="merging", teacher_tokenizer="merging_tokenizer")


def including_step(case: Case) -> Case:
    return replace(case, ours={**case.ours, "long_term_includes_step": True})


ROWS_CASES = [
    *(gkd(f"beta-{beta}", beta=beta) for beta in (0.0, 0.5, 1.0)),
    *(distillation(f"beta-{beta}", beta=beta) for beta in (0.0, 0.3, 1.0)),
    distillation("temperature", temperature=0.7, **SGD),
    declared(iw_opd("written"), UNWRITTEN, "iw-opd-counted"),
    corrected(iw_opd("counted"), "written_tokens"),
    corrected(iw_opd("gamma", iw_opd_gamma=1.5, temperature=0.7), "written_tokens"),
    jsd("sampled", beta=0.3),
    jsd("argmax", beta=0.3, reverse_kl_top_1_mode="argmax"),
    jsd("top-3", beta=0.3, loss_top_k=3),
    jsd("top-3-forward", beta=0.0, loss_top_k=3),
    jsd("top-3-reverse", beta=1.0, loss_top_k=3, loss_add_tail=False),
    jsd("whole", beta=1.0, loss_top_k=0),
    gold("dataset"),
    gold("reverse", beta=1.0, temperature=0.7),
    declared(gold("written", lmbda=1.0), UNWRITTEN, "gold-counted"),
    corrected(gold("counted", lmbda=1.0), "written_tokens"),
    declared(gold("uld", **ULD), BEHIND, "gold-uld-shifted"),
    replace(gold("uld-shifted", **ULD), trl={"uld_token_merge_strategy": "bayesian"}),
    declared(merging(gold("uld-merging", **ULD)), BEHIND, "gold-uld-merging-boundaries"),
    corrected(merging(gold("uld-merging-boundaries", **ULD)), "boundaries"),
    corrected(
        merging(gold("uld-weighted", uld_crossentropy_weight=0.3, uld_distillation_weight=2.0, **ULD)), "boundaries",
        off_policy_loss="uld-term",
    ),
    corrected(merging(gold("uld-hybrid", uld_use_hybrid_loss=True, **ULD)), "boundaries", **WORDS),
]  # fmt: skip

SERVED_CASES = [
    served("top-3", beta=0.0, loss_top_k=3, **SGD),
    served("top-1", beta=0.0, **SGD),
    served("renormalised", beta=0.0, loss_top_k=3, loss_add_tail=False),
    served("between", beta=0.3),
    served("between-renormalised", beta=0.3, loss_add_tail=False),
    replace(served("written", beta=1.0), splits=("1x4", "2x2")),
]

SELF_TAUGHT_CASES = [
    *(
        declared(case, OF_LOSS)
        for case in (
            sdft("topk", distillation_topk=5),
            sdft("tail", distillation_topk=5, distillation_add_tail=True, distillation_alpha=0.0),
            sdft("full", distillation_mode="full_logits", teacher_model_kind="live", temperature=0.7),
            sdft("sampled", distillation_mode="sampled_token", distillation_alpha=1.0),
            sdft("ema", distillation_mode="full_logits", teacher_model_kind="ema", teacher_update_rate=0.3),
            sdft("skip", distillation_topk=5, num_loss_tokens_to_skip=3),
            sdft("from-teacher", distillation_topk=5, generate_from_teacher=True),
            sdft("again", distillation_topk=5, distillation_is_clip=1.02, **AGAIN),
            replace(sdft("lora", distillation_topk=5), adapter="new"),
        )
    ),
    replace(
        sdft("lora-ema", distillation_topk=5, teacher_model_kind="ema", teacher_update_rate=0.3), adapter="loaded",
        differs={**OF_LOSS, **dict.fromkeys(LEARNT, "sdft-ema-start")}, witness="sdft-lora-ema-copied",
    ),
    replace(
        sdft("lora-ema-copied", distillation_topk=5, teacher_model_kind="ema", teacher_update_rate=0.3), adapter="loaded",
        differs=OF_LOSS, corrected="ema_from_copy",
    ),
    declared(sdpo("plain"), {**OF_LOSS, **SUCCESSES, **ACTIVE}, "sdpo-active"),
    corrected(sdpo("active"), "active_samples", **OF_LOSS, **SUCCESSES),
    corrected(
        sdpo("mixed", distillation_weight=0.6, distillation_mode="full_logits", distillation_alpha=0.5), "active_samples",
        **OF_LOSS, **SUCCESSES,
    ),
    declared(sdpo("feedback", include_environment_feedback=True), {**OF_LOSS, **SUCCESSES}),
    corrected(sdpo("again", distillation_weight=0.5, **AGAIN), "active_samples", **OF_LOSS, **SUCCESSES),
    declared(
        sdpo("policy", distillation_weight=0.0, **AGAIN),
        {**SUCCESSES, **dict.fromkeys(("*feedback*", "*reprompt*"), "sdpo-unasked")},
    ),
    declared(ssd("plain"), dict.fromkeys(("completions/*",), "ssd-lengths")),
    ssd("unfiltered", filter_empty=False, temperature=0.7),
]  # fmt: skip

MINILLM_CASES = [
    declared(including_step(minillm("plain")), GAINS, "minillm-gain"),
    corrected(including_step(minillm("gain")), "gain_of_tokens"),
    replace(declared(minillm("long-term"), LONG_TERM, "minillm-after-step"), corrected="gain_of_tokens"),
    corrected(minillm("after-step"), "gain_after_step"),
    corrected(minillm("policy", single_step_decomposition=False), "gain_of_tokens"),
    corrected(minillm("step", rkl_advantage=False), "gain_of_tokens"),
    declared(including_step(minillm("discounted-plain", gamma=0.9)), GAINS, "minillm-discounted"),
    corrected(including_step(minillm("discounted", gamma=0.9)), "gain_of_tokens"),
    corrected(including_step(minillm("discounted-sum", gamma=0.9, length_normalization=False)), "gain_of_tokens"),
    corrected(including_step(minillm("temperature", kd_temperature=0.7)), "gain_of_tokens"),
    replace(
        corrected(including_step(minillm("unrewarded", num_generations=1)), "gain_of_tokens"), rewards=(), first_rows=16,
        ours={**OURS, "long_term_includes_step": True},
        differs=dict.fromkeys(("reward*", "frac_reward_zero_std"), "minillm-unrewarded"),
    ),
]  # fmt: skip

TEACHER_CASES = [*ROWS_CASES, *SERVED_CASES, *SELF_TAUGHT_CASES, *MINILLM_CASES]
