"""Agents: tools and environments as a trainer uses them: schemas in prompts, episodes, rewards of environments, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from posttrain.data.images.media import FOLDER, MediaFolder
from posttrain.data.render.conversation import TOOL_ROLE, USER_ROLE
from posttrain.data.render.turn_suffix import TurnSuffix
from posttrain.rollout.collector import Collected
from posttrain.rollout.episodes.environment import COLUMN, Environments
from posttrain.rollout.episodes.tool_episode import EpisodeRules, ToolEpisodes
from posttrain.rollout.episodes.tool_results import ShownImages
from posttrain.rollout.episodes.tools import Toolbox
from posttrain.rollout.episodes.writing import AnyRows
from posttrain.trainer.online.rollout_metrics import Numbers, tool_metrics

if TYPE_CHECKING:
    from posttrain.data.render.renderer import Renderer
    from posttrain.rollout.engines.protocol import RolloutEngine
    from posttrain.trainer.options.online import OnlineConfig
    from posttrain.trainer.vision import Vision

AGENT_OPTIONS = (
    "max_tool_calling_iterations",
    "tool_timeout",
    "max_tool_result",
    "episode_timeout",
    "tool_image_role",
)
"""Options that mean nothing without tools or an environment."""
IMAGE_PIXELS = 1024 * 1024
"""Images of tools with more are shrunk, unless `image_max_pixels` says otherwise: an episode may show many of them."""


class Agents:
    """Made before anything is loaded: a tool without a description must not cost a model's loading time."""

    suffix: TurnSuffix | None = None  # none where there is nothing to call, as in an environment of one turn

    def __init__(self, tools: Sequence[Callable[..., Any]] | Toolbox | None, environment_factory: Any) -> None:
        if callable(tools) or isinstance(tools, str):
            raise TypeError(f"`tools` must be a list of functions, not {type(tools).__name__}.")
        self.toolbox = tools if isinstance(tools, Toolbox) else Toolbox(list(tools or ()))
        self.environments: Environments | None = None
        if environment_factory is not None:
            self.environments = Environments(environment_factory, self.toolbox)

    def set_up(self, renderer: Renderer, args: OnlineConfig, dataset: Any, vision: Vision | None = None) -> Any:
        """Takes the limits, and gives the dataset or what stands for a missing one.

        A template that cannot carry on after a tool's result, or drops its image, is refused here, before a prompt is read.
        """
        self.toolbox.timeout, self.toolbox.max_result = args.tool_timeout, args.max_tool_result
        if self.schemas:
            role = args.tool_image_role or TOOL_ROLE
            self.suffix = TurnSuffix(renderer, self.schemas, args.chat_template_kwargs, role)
        if args.tool_image_role is not None or self.say_images():
            self._show_images(args, vision)
        return self._placeholder(args) if dataset is None else dataset

    # ---- images ------------------------------------------------------------------------------------------------------

    @property
    def shows_images(self) -> bool:
        """Whether tools or environments may return images."""
        return self.toolbox.images is not None

    def say_images(self) -> bool:
        """By the annotations of what they return."""
        kinds = [] if self.environments is None else self.environments.kinds.values()
        return any(tool.shows_images for tool in self.toolbox.tools.values()) or any(
            kind.shows_images for kind in kinds
        )

    def _show_images(self, args: OnlineConfig, vision: Vision | None) -> None:
        if vision is None:
            raise ValueError(
                "Tools or environments return images (by their annotations, or by `tool_image_role`), and this model reads texts "
                "only. Take a vision-language model, or tools that return texts."
            )
        why = None if self.suffix is None else self.suffix.why_no_images()
        if why is not None and self.suffix.image_role == TOOL_ROLE:
            raise ValueError(
                f"The chat template cannot show an image that a tool returned in the tool's turn: {why} Set `tool_image_role` to "
                f"{USER_ROLE!r}: images then stand in a user's turn after the results."
            )
        if why is not None:
            raise ValueError(
                f"The chat template cannot show an image in a user's turn after the result of a tool: {why} Set "
                "`chat_template_path` to a template that does."
            )
        vision.media = MediaFolder(Path(args.output_dir) / FOLDER)
        limits = replace(vision.limits, max_pixels=args.image_max_pixels or IMAGE_PIXELS, allow_urls=False)
        self.toolbox.images = ShownImages(vision.media, limits)

    # ---- data --------------------------------------------------------------------------------------------------------

    @property
    def several(self) -> bool:
        return self.environments is not None and self.environments.several

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of everything that may be called in some episode."""
        if self.environments is None:
            return self.toolbox.schemas
        return [schema for kind in self.environments.kinds.values() for schema in kind.schemas]

    def prepare_options(self) -> dict[str, Any]:
        """Arguments of PrepareOptions."""
        if self.environments is None:
            return {"tools": self.schemas}
        kinds = self.environments.kinds
        if self.several:  # each row has the tools of its own environment: see ToolEpisode
            needed, allowed, tools = (COLUMN,), {COLUMN: tuple(kinds)}, None
        else:
            (kind,) = kinds.values()
            needed, allowed, tools = tuple(kind.needed_columns), {}, self.schemas or None
        return {
            "tools": tools,
            "allow_blank_prompts": True,
            "required_columns": needed,
            "allowed_values": allowed,
        }

    def _placeholder(self, args: OnlineConfig) -> Dataset | None:
        """Empty prompts for an environment that brings its own; None where a dataset is needed."""
        if self.environments is None or self.several or args.max_steps <= 0:
            return None
        schedule = args.schedule()
        windows = -(-args.max_steps * schedule.accumulation // schedule.window)
        return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * (windows * schedule.prompts)})

    # ---- rewards -----------------------------------------------------------------------------------------------------

    def with_rewards(
        self, rewards: Any, weights: Sequence[float] | None, tokenizers: Any
    ) -> tuple[list[Any], list[float] | None, list[Any] | None]:
        """The user's rewards and those of the environments, which weigh 1."""
        given = [] if rewards is None else list(rewards) if isinstance(rewards, list | tuple) else [rewards]
        own = [] if self.environments is None else self.environments.rewards()
        if weights is not None and len(weights) == len(given):
            weights = [*weights, *[1.0] * len(own)]
        if tokenizers is not None:
            tokenizers = [*(tokenizers if isinstance(tokenizers, list | tuple) else [tokenizers]), *[None] * len(own)]
        return [*given, *own], weights, tokenizers

    # ---- episodes ----------------------------------------------------------------------------------------------------

    def stop_ids(self, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
        """A turn that calls a tool may end with a token of its own."""
        closing = () if self.suffix is None else (self.suffix.closing,)
        return tuple(dict.fromkeys((*stop_ids, *closing)))

    def episodes(self, renderer: Renderer, engine: RolloutEngine, args: OnlineConfig) -> ToolEpisodes:
        """What makes the episodes of each window."""
        rules = EpisodeRules(
            renderer,
            self.suffix,
            self.toolbox,
            max_rounds=args.max_tool_calling_iterations,
            max_prompt=args.max_length,
            context=getattr(engine, "context", None),
            timeout=args.episode_timeout,
            template_kwargs=args.chat_template_kwargs or {},
            renders_by_row=self.several,
        )
        return ToolEpisodes(rules, None if self.environments is None else self.environments.take)

    def metrics(self, collected: Collected) -> Numbers:
        names = list(dict.fromkeys(schema["function"]["name"] for schema in self.schemas))
        return tool_metrics(collected.rollouts, names, self.environments is not None)


def make_agents(
    tools: Sequence[Callable[..., Any]] | Toolbox | None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
    rollout_func: Any,
) -> Agents | None:
    """None where there is nothing to call."""
    if not tools and environment_factory is None:
        return None
    if rollout_func is not None:
        raise ValueError("`rollout_func` writes rollouts itself: `tools` and `environment_factory` would not be used.")
    return Agents(tools, environment_factory)


def refuse_agent_options(args: OnlineConfig) -> None:
    ignored = sorted(set(AGENT_OPTIONS) & args.set_by_user())
    if ignored:
        raise ValueError(
            f"`{ignored[0]}` is set, but there are neither `tools` nor an `environment_factory`. Leave it out."
        )


def rows_for(agents: Agents | None, rows: AnyRows, name: str) -> AnyRows:
    """The rows, where they suit agents: calls and results are messages, and plain text has no place for them."""
    if agents is not None and not rows.prepared.detection.conversational:
        raise ValueError(
            f"Tools and environments need prompts that are lists of messages; those of {name} are plain texts. Give "
            '[{"role": "user", "content": ...}].'
        )
    return rows
