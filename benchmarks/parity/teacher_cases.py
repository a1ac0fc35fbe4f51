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
    split = dict.fromkeys((*LEARNT, "on_policy_loss"), "server-tokens-of-the-step")
    return replace(
        distillation(name, **options),
        name=f"server-distillation-{name}",
        method="server_distillation",
        differs_when_split={"entropy": "step-means", **split},
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
    return rows_taught("iw_opd", name, **options)


def jsd(name: str, **options: Any) -> Case:
    return iw_opd(f"jsd-{name}", distillation_objective="jsd", **options)


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
    return in_groups("sdpo", name, "privileged", *(rewards or ("brevity",)), success_reward_threshold=0.2, **options)


def minillm(name: str, *rewards: str, **options: Any) -> Case:
    case = in_groups("minillm", name, "prompt_only", *(rewards or ("brevity",)), **options)
    return replace(case, teacher="other", written_by="function", trl_version="1.10.0")


def ssd(name: str, **options: Any) -> Case:
    """One completion of each prompt."""
    options = {**ONCE, **options}
    return Case(
        f"ssd-{name}", "ssd", "prompt_only", options, OURS, written_by="engine", trl_version="1.10.0", splits=("1x4",)
    )


TEACHER_CASES = [
    *(gkd(f"beta-{beta}", beta=beta) for beta in (0.0, 0.5, 1.0)),
    *(distillation(f"beta-{beta}", beta=beta) for beta in (0.0, 0.3, 1.0)),
    distillation("temperature", temperature=0.7, **SGD),
    served("top-3", beta=0.0, loss_top_k=3),
    served("top-1", beta=0.0),
    served("renormalised", beta=0.0, loss_top_k=3, loss_add_tail=False),
    served("between", beta=0.3),
    served("between-renormalised", beta=0.3, loss_add_tail=False),
    served("written", beta=1.0),
    iw_opd("dataset"),
    iw_opd("gamma", iw_opd_gamma=1.5, temperature=0.7),
    iw_opd("written", lmbda=1.0),
    jsd("sampled", beta=0.3),
    jsd("argmax", beta=0.3, reverse_kl_top_1_mode="argmax"),
    jsd("top-3", beta=0.3, loss_top_k=3),
    jsd("top-3-forward", beta=0.0, loss_top_k=3),
    jsd("top-3-reverse", beta=1.0, loss_top_k=3, loss_add_tail=False),
    jsd("whole", beta=1.0, loss_top_k=0),
    gold("dataset"),
    gold("reverse", beta=1.0, temperature=0.7),
    gold("written", lmbda=1.0),
    sdft("topk", distillation_topk=5),
    sdft("tail", distillation_topk=5, distillation_add_tail=True, distillation_alpha=0.0),
    sdft("full", distillation_mode="full_logits", teacher_model_kind="live", temperature=0.7),
    sdft("sampled", distillation_mode="sampled_token", distillation_alpha=1.0),
    sdft("ema", distillation_mode="full_logits", teacher_model_kind="ema", teacher_update_rate=0.3),
    sdft("skip", distillation_topk=5, num_loss_tokens_to_skip=3),
    sdft("from-teacher", distillation_topk=5, generate_from_teacher=True),
    sdft("again", distillation_topk=5, distillation_is_clip=1.02, **AGAIN),
    sdpo("plain"),
    sdpo("mixed", distillation_weight=0.6, distillation_mode="full_logits", distillation_alpha=0.5),
    sdpo("feedback", include_environment_feedback=True),
    sdpo("again", distillation_weight=0.5, **AGAIN),
    sdpo("policy", distillation_weight=0.0, **AGAIN),
    minillm("plain"),
    minillm("policy", single_step_decomposition=False),
    minillm("step", rkl_advantage=False),
    minillm("gamma", gamma=0.9),
    ssd("plain"),
    ssd("unfiltered", filter_empty=False, temperature=0.7),
]  # fmt: skip
