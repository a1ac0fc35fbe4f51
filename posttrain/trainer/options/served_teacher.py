"""Options of a teacher on a server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from posttrain.core.options import refused
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.distilling import TeacherConfig

ON_A_SERVER = "The teacher is on a server, which has loaded it: `teacher_model_server_url`."
SAMPLED = "sampled"


@dataclass
class TeacherServerConfig:
    """Where the teacher's server is, and what happens while it does not answer; mixed in."""

    teacher_model_server_url: str | None = option(
        None, "Address of the teacher's server: `posttrain vllm-serve`, or a plain `vllm serve`."
    )
    teacher_server_urls: dict[str, str] | str | None = option(
        None,
        "Several teachers, each on a server of its own: name -> address; JSON text is accepted. The column `teacher_id` of a row "
        "names the one that is asked about its completions.",
    )
    teacher_server_token_file: str | None = option(
        None,
        "File with that server's token, of mode 0600. None: the variable POSTTRAIN_SERVE_TOKEN, or for a server of yours on this "
        "machine the token that it has drawn.",
    )
    teacher_server_timeout: float = option(
        240.0, "Seconds to wait for the teacher's server at the start, or for one that went away."
    )
    teacher_timeout: float = option(300.0, "Seconds that the teacher's server may take for one completion.")
    teacher_max_unanswered: float = option(
        0.5,
        "Share of the completions of a generation that the teacher may leave unanswered: they are masked and counted "
        "(`teacher/unanswered`). Above it the run stops. 0: no completion; 1: the run always continues.",
    )

    _VALID_DICT_FIELDS = [*TeacherConfig._VALID_DICT_FIELDS, "teacher_server_urls"]

    is_served = True

    def __post_init__(self) -> None:
        if isinstance(self.teacher_server_urls, str):
            self.teacher_server_urls = json.loads(self.teacher_server_urls)
        super().__post_init__()
        for name in ("teacher_server_timeout", "teacher_timeout"):
            check_range(name, getattr(self, name), 0, open_low=True)
        check_range("teacher_max_unanswered", self.teacher_max_unanswered, 0, 1)
        if self.teacher_server_urls is not None and self.teacher_model_server_url is not None:
            raise ValueError(
                "`teacher_model_server_url` names one teacher and `teacher_server_urls` several, by their names: give one of "
                "the two."
            )
        urls = self.teacher_server_urls
        if urls is not None and (not isinstance(urls, dict) or not urls or not all(map(_are_texts, urls.items()))):
            raise ValueError(
                f"`teacher_server_urls` is {urls!r}; it is a mapping of names to addresses, such as "
                '{"maths": "http://127.0.0.1:8000", "code": "http://127.0.0.1:8002"}.'
            )
        if self.is_served:
            self._check_what_is_asked()

    def _check_what_is_asked(self) -> None:
        """Refuse comparisons that need more than a server says: log-probs of given tokens, and the likeliest ones."""
        if self.temperature != 1:
            raise ValueError(
                f"`temperature` is {self.temperature:g}; a server's log-probs of given tokens are those at temperature 1, whatever "
                "is asked, and student and teacher are compared at one temperature: leave it at 1."
            )
        if self.loss_top_k < 1:
            raise ValueError(
                f"`loss_top_k` is {self.loss_top_k}; a server answers with its likeliest tokens and not with the whole vocabulary: "
                "at least 1. `posttrain distillation` compares whole distributions with a teacher beside the student."
            )
        if self.beta > 0 and self.loss_top_k > 1:
            raise ValueError(
                f"`loss_top_k` is {self.loss_top_k} and `beta` {self.beta:g}; above 0 the divergence needs the student's likeliest "
                "tokens, whose log-probs a server does not give: set `beta` to 0, or `loss_top_k` to 1."
            )
        if self.reverse_kl_top_1_mode != SAMPLED:
            raise ValueError(
                f"`reverse_kl_top_1_mode` is {self.reverse_kl_top_1_mode!r}; the server is asked once, when a completion is "
                f"written, and does not know what the student will find likeliest in the update: leave it at {SAMPLED!r}."
            )
        if not self.loss_add_tail and self.loss_top_k == 1 and self.beta in (0, 1):
            raise ValueError(
                "`loss_add_tail` is False and one token is compared: without a tail it has probability 1 in both distributions, "
                "and the loss is always 0. Leave `loss_add_tail` at True, or set `beta` to 0 and `loss_top_k` above 1."
            )

    def teacher_servers(self) -> dict[str, str]:
        """Name of each teacher -> address of its server; one without a name has the empty one."""
        one = {} if self.teacher_model_server_url is None else {"": self.teacher_model_server_url}
        return self.teacher_server_urls or one

    @property
    def top_k_asked(self) -> int:
        """How many of the teacher's likeliest tokens are read; of the token that was written its log-prob is known anyway."""
        return 0 if self.beta == 1 else self.loss_top_k


def _are_texts(pair: tuple[Any, Any]) -> bool:
    return all(isinstance(one, str) and one for one in pair)


@dataclass
class ServedTeacherConfig(TeacherServerConfig):
    """Of a method whose teacher is always on a server: where it is, and what it is asked for; mixed in."""

    loss_top_k: int = option(
        1, "With `beta` 0: how many of the teacher's likeliest tokens are compared. Otherwise it is 1."
    )
    loss_add_tail: bool = option(
        True,
        "All tokens that are not compared count as one more. False: both distributions are renormalised without them.",
    )
    reverse_kl_top_1_mode: str = option(
        SAMPLED,
        "Which token of the student's is compared where `beta` is above 0: 'sampled', the one that was written.",
    )
    teacher_model_name_or_path: str | None = refused(None, ON_A_SERVER)
    teacher_model_revision: str | None = refused(None, ON_A_SERVER)
    teacher_model_init_kwargs: dict[str, Any] | str | None = refused(None, ON_A_SERVER)
