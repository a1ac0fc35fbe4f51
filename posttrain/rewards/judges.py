"""Judges: who says which of two answers is the better one. TRL's interface, without its faults, and judges as rewards of groups.

    judge = ChatJudge("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-7B-Instruct", orders="both")
    judge.judge(["What is 2 + 2?"], [["4", "5"]])          # [0]: the first is better
    GRPOTrainer(model, reward_funcs=judge, ...)            # wrapped by judge_reward

`judging.py` has the base classes, `chat_judge.py` the judges that ask a server.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from posttrain.rewards.chat_judge import ChatJudge, HfPairwiseJudge, JudgeError, OpenAIPairwiseJudge
from posttrain.rewards.judging import (
    CALLER,
    FAILED,
    TIE,
    BaseBinaryJudge,
    BaseJudge,
    BasePairwiseJudge,
    BaseRankJudge,
    ScoringJudge,
    Verdict,
    checked_pairs,
    plain_lines,
    refuse_without_scores,
)
from posttrain.rewards.runtime.invoke import ERROR, INVALID
from posttrain.rewards.runtime.options import RewardOptions
from posttrain.rewards.runtime.values import InvalidValue, entries_of, number_of

__all__ = [
    "FAILED",
    "TIE",
    "AllTrueJudge",
    "BaseBinaryJudge",
    "BaseJudge",
    "BasePairwiseJudge",
    "BaseRankJudge",
    "ChatJudge",
    "HfPairwiseJudge",
    "JudgeError",
    "JudgeReward",
    "OpenAIPairwiseJudge",
    "PairRMJudge",
    "RewardModelJudge",
    "judge_reward",
    "named_judge",
]


class AllTrueJudge(BaseBinaryJudge):
    """1 where all of its judges say 1; a failure of one is a failure."""

    def __init__(self, judges: Sequence[BaseBinaryJudge]) -> None:
        self.judges = list(judges)
        for judge in self.judges:
            if not isinstance(judge, BaseBinaryJudge):
                raise TypeError(f"AllTrueJudge combines binary judges; {type(judge).__name__} is not one.")
        if not self.judges:
            raise ValueError("AllTrueJudge has no judges: give at least one binary judge.")

    def judge(
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        answers = [judge.judge(prompts, completions, gold_completions, shuffle_order) for judge in self.judges]
        return [FAILED if not set(row) <= {0, 1} else int(all(row)) for row in zip(*answers, strict=True)]


class PairRMJudge(BasePairwiseJudge):
    """TRL's judge on llm-blender's PairRM; here it is refused with what to use in its place."""

    def __init__(self) -> None:
        raise ValueError(
            "PairRMJudge needs the package llm-blender, which posttrain does not use. Take RewardModelJudge with a reward model, "
            "or ChatJudge with a language model behind an OpenAI-compatible endpoint."
        )

    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[float]:
        raise NotImplementedError  # there is no instance


class RewardModelJudge(ScoringJudge):
    """P(first wins) = sigmoid(r(first) - r(second)), by Bradley and Terry: a judge with no opinion about places.

    `model` is a reward model by id, path or module, or a ModelReward. One given by name is loaded to the GPU of this process, if
    there is one; `loading` are the arguments of ModelReward.
    """

    runs, reads_messages, soft = CALLER, True, True

    def __init__(self, model: Any, tokenizer: Any = None, **loading: Any) -> None:
        import torch

        from posttrain.rewards.process_reward import model_reward

        if not isinstance(model, torch.nn.Module):
            loading.setdefault("device", "cuda" if torch.cuda.is_available() else None)
        self.model = model_reward(model, tokenizer, **loading)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model.name!r})"

    def verdicts(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Sequence[Any]],
        shuffle_order: bool = True,
        soft: bool = True,
        temperature: float = 1.0,
        seconds: float | None = None,
    ) -> list[Verdict]:
        """Every completion is scored once, in however many pairs it is."""
        pairs = checked_pairs(prompts, completions)
        places: dict[tuple[str, str], int] = {}
        asked, members = [], []
        for prompt, *pair in pairs:
            for completion in pair:
                key = (json.dumps(prompt, default=str), json.dumps(completion, default=str))
                if key not in places:
                    places[key] = len(asked)
                    asked.append((prompt, completion))
                members.append(places[key])
        rewards = self._rewards(asked)
        return [
            _compared(rewards[members[2 * place]], rewards[members[2 * place + 1]], temperature)
            for place in range(len(pairs))
        ]

    def _rewards(self, asked: list[tuple[Any, Any]]) -> list[tuple[float, str]]:
        """(reward, why there is none) of each; NaN where there is none."""
        from posttrain.rewards.runtime.results import Judged, Outcomes  # numpy: a worker does not need it

        outcomes = Outcomes([self.model.name], RewardOptions(), None)
        self.model.judge(0, [Judged(prompt, completion, []) for prompt, completion in asked], outcomes)
        results = outcomes.results(len(asked))
        why = {failure.sample: failure.message for failure in results.failures}
        return [
            (value, why.get(n, "the model has no opinion.")) for n, value in enumerate(results.values[:, 0].tolist())
        ]


def _compared(first: tuple[float, str], second: tuple[float, str], temperature: float) -> Verdict:
    for value, why in (first, second):
        if math.isnan(value):
            return Verdict(kind=ERROR, reason=why)
    gap = (second[0] - first[0]) / temperature
    return Verdict(1 / (1 + math.exp(gap)) if gap < 700 else 0.0)


# ---- a judge as a reward of groups -----------------------------------------------------------------------------------------


def judge_reward(judge: BaseJudge, *, soft: bool | None = None, shuffle_order: bool = True) -> JudgeReward:
    """A reward function out of a judge, which sees the completions of a prompt together.

    Two completions: (1, 0) for winner and loser, (0.5, 0.5) for a tie; with `soft` (P, 1 - P). More: of a pairwise judge the share
    of comparisons that a completion wins, each with each; of a rank judge (n - 1 - place) / (n - 1). A binary judge gives its 1 or
    0. None for what could not be judged; in a run it is a failure: masked and counted, or whatever `reward_on_error` says.
    `soft` None: as the judge was made (ChatJudge(soft=True), RewardModelJudge).
    """
    if not isinstance(judge, BaseRankJudge | BasePairwiseJudge | BaseBinaryJudge):
        raise TypeError(
            f"{type(judge).__name__} is neither a rank judge nor a pairwise or a binary one: subclass one of these."
        )
    if soft:
        refuse_without_scores(judge)
    return JudgeReward(judge, getattr(judge, "soft", False) if soft is None else soft, shuffle_order)


class JudgeReward:
    """What `judge_reward` makes. RewardSet reads `whole_groups` and `runs`."""

    def __init__(self, judge: BaseJudge, soft: bool, shuffle_order: bool) -> None:
        self.judge, self.soft, self.shuffle_order = judge, soft, shuffle_order
        self.seconds: float | None = None  # of a call; RewardSet sets it for judges that keep the time themselves
        self.__name__ = type(judge).__name__

    @property
    def func(self) -> BaseJudge:
        """As of a partial: what decides how this travels to a worker."""
        return self.judge

    @property
    def whole_groups(self) -> bool:
        return not isinstance(self.judge, BaseBinaryJudge)

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        gold_completions: list[Any] | None = None,
        group_numbers: list[int] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        log_failure: Callable[[int, str, str], None] | None = None,
    ) -> list[float | None]:
        """`group_numbers`: which completions belong together; None: those of equal prompts. `gold_completions` are for binary
        judges."""
        if not self.judge.reads_messages:
            prompts, completions = [plain_lines(one) for one in prompts], [plain_lines(one) for one in completions]
        if isinstance(self.judge, BaseBinaryJudge):
            answers = self.judge.judge(prompts, completions, gold_completions, self.shuffle_order)
            found = [[_decided(answer, (0, 1))] for answer in entries_of(answers, len(prompts))]
        else:
            members: dict[Any, list[int]] = {}
            for place, number in enumerate(group_numbers or [json.dumps(prompt, default=str) for prompt in prompts]):
                members.setdefault(number, []).append(place)
            how = self._ranked if isinstance(self.judge, BaseRankJudge) else self._won
            found = how(prompts, completions, [*members.values()])
            self._log_ties(found, log_metric)
        values: list[float | None] = []
        for place, verdicts in enumerate(found):
            usable = [verdict.first_wins for verdict in verdicts if not verdict.is_failure]
            values.append(sum(usable) / len(usable) if usable else None)
            if not usable and log_failure is not None:
                log_failure(place, verdicts[0].reason if verdicts else ALONE, verdicts[0].kind if verdicts else INVALID)
        return values

    def _log_ties(self, found: list[list[Verdict]], log_metric: Callable[[str, float], None] | None) -> None:
        judged = [verdict.first_wins == TIE for verdicts in found for verdict in verdicts if not verdict.is_failure]
        if judged and log_metric is not None:
            log_metric(f"rewards/{self.__name__}/ties", sum(judged) / len(judged))

    def _won(self, prompts: list[Any], completions: list[Any], groups: list[list[int]]) -> list[list[Verdict]]:
        """Of each completion its comparisons, as the probability that it wins."""
        pairs = [pair for members in groups for pair in itertools.combinations(members, 2)]
        asked = [prompts[i] for i, _ in pairs], [[completions[i], completions[j]] for i, j in pairs]
        found: list[list[Verdict]] = [[] for _ in prompts]
        verdicts = verdicts_of(self.judge, *asked, self.shuffle_order, self.soft, self.seconds) if pairs else ()
        for (i, j), verdict in zip(pairs, verdicts):
            found[i].append(verdict)
            found[j].append(verdict.swapped())
        return found

    def _ranked(self, prompts: list[Any], completions: list[Any], groups: list[list[int]]) -> list[list[Verdict]]:
        found: list[list[Verdict]] = [[] for _ in prompts]
        compared = [members for members in groups if len(members) > 1]
        asked = [prompts[members[0]] for members in compared], [[completions[i] for i in one] for one in compared]
        answers = entries_of(self.judge.judge(*asked, self.shuffle_order), len(compared)) if compared else ()
        for members, ranks in zip(compared, answers):
            order = [*map(int, ranks)] if ranks is not None and not isinstance(ranks, int | float) else []
            if sorted(order) != [*range(len(members))]:
                for i in members:
                    reason = f"the judge answered {ranks!r}, no order of {len(members)} completions."
                    found[i] = [Verdict(reason=reason)]
                continue
            for place, i in enumerate(order):
                found[members[i]] = [Verdict((len(members) - 1 - place) / (len(members) - 1))]
        return found

    def beside(self) -> Callable[..., Any]:
        """The same as an async function, for judges that wait for servers: several groups at once."""
        return _Beside(self)


def verdicts_of(
    judge: BasePairwiseJudge,
    prompts: Sequence[Any],
    pairs: Sequence[Sequence[Any]],
    shuffle_order: bool = True,
    soft: bool = False,
    seconds: float | None = None,
) -> list[Verdict]:
    """What any pairwise judge says of these pairs; where it is not asked for probabilities, 1, 0 or TIE."""
    if isinstance(judge, ScoringJudge):
        found = judge.verdicts(prompts, pairs, shuffle_order, soft, seconds=seconds)
        return found if soft else [one if one.is_failure else Verdict(1 - one.winner) for one in found]
    more = {"return_scores": True} if soft else {}
    answers = entries_of(judge.judge([*prompts], [*pairs], shuffle_order, **more), len(pairs))
    return [_decided(answer, None if soft else (0, TIE, 1), falling=not soft) for answer in answers]


ALONE = "it is the only completion of its prompt that can be judged, and a judge compares completions."


def _decided(answer: Any, allowed: tuple[float, ...] | None, falling: bool = False) -> Verdict:
    """The answer of a user's judge; `allowed` None: any probability. `falling`: 0 is the first and so the better."""
    try:
        value = number_of(answer)
    except InvalidValue as error:
        return Verdict(reason=str(error))
    if value is None or value == FAILED:
        return Verdict(kind=ERROR, reason=f"the judge answered {answer!r}, which is a failure of its own.")
    if not 0 <= value <= 1 if allowed is None else value not in allowed:
        wanted = "a probability" if allowed is None else " or ".join(f"{one:g}" for one in allowed)
        return Verdict(reason=f"the judge answered {answer!r}; it must answer {wanted}, or {FAILED} where it failed.")
    return Verdict(1 - value if falling else value)


class _Beside:
    """A JudgeReward whose calls run on threads of their own, so that they do not keep each other waiting."""

    def __init__(self, reward: JudgeReward) -> None:
        self.reward, self.concurrency = reward, reward.judge.concurrency

    async def __call__(
        self, prompts: list[Any], completions: list[Any], log_metric: Any = None, log_failure: Any = None
    ) -> list[float | None]:
        import asyncio  # here: half of a worker's start-up, and workers do not need it
        from concurrent.futures import Future

        outcome: Future[list[float | None]] = Future()
        outcome.set_running_or_notify_cancel()  # from here on it gets its result, whether or not it is still waited for

        def run() -> None:
            try:
                outcome.set_result(self.reward(prompts, completions, log_metric=log_metric, log_failure=log_failure))
            except BaseException as error:  # raised where it is waited for
                outcome.set_exception(error)

        threading.Thread(target=run, daemon=True, name="judge of a group").start()
        return await asyncio.wrap_future(outcome)


# ---- judges by name --------------------------------------------------------------------------------------------------------

NAMED = "judge:"
NAMED_OPTIONS: dict[str, Callable[[str], Any]] = {
    "orders": str,
    "soft": lambda text: bool(("0", "1").index(text)),
    "api_key_env": str,
    "prompt_file": lambda text: Path(text).expanduser().read_text(encoding="utf-8"),
    "max_tokens": int,
    "max_requests": int,
    "timeout": float,
    "deadline": float,
    "retries": int,
    "backoff": float,
    "concurrency": int,
    "seed": int,
}
"""Options that may follow the name of a chat judge -> how their text is read; `prompt_file` has the `system_prompt`."""


def named_judge(text: str) -> ChatJudge | str:
    """judge:MODEL@http://HOST/v1?orders=both -> a ChatJudge; judge:MODEL, which compares with a reward model, -> MODEL."""
    path, _, query = text.removeprefix(NAMED).partition("?")
    model, at, url = path.rpartition("@")
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        if unknown := [option for option in given if option not in NAMED_OPTIONS or not at]:
            known = f"it must be one of {', '.join(NAMED_OPTIONS)}" if at else "a judge by a reward model has none"
            raise ValueError(f"unknown option {unknown[0]!r}; {known}.")
        if not at:
            return path
        options = {option: _read_option(option, value) for option, value in given.items()}
        if "prompt_file" in options:
            options["system_prompt"] = options.pop("prompt_file")
        return ChatJudge(url, model, **options)
    except (ValueError, OSError) as error:
        raise ValueError(f"{text}: {error}") from error


def _read_option(option: str, text: str) -> Any:
    try:
        return NAMED_OPTIONS[option](text)
    except ValueError as error:
        raise ValueError(f"`{option}` cannot be {text!r}.") from error
