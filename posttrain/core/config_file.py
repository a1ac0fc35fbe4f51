"""A YAML file of options: plain values only. No tags, no aliases that multiply, no key twice, only variables that harm nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20
MAX_VALUES = 1 << 18
"""With every alias written out; nine lines of aliases of aliases are a billion."""
ENVIRONMENT = "env"
VARIABLES = frozenset((
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT",
    "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE",
    "NCCL_CUMEM_ENABLE", "NCCL_BUFFSIZE", "NCCL_NET_GDR_LEVEL", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_XET",
    "HF_HUB_ENABLE_HF_TRANSFER", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_VERBOSITY",
    "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY", "ACCELERATE_LOG_LEVEL", "TQDM_DISABLE", "VLLM_LOGGING_LEVEL",
    "VLLM_ATTENTION_BACKEND", "VLLM_NO_USAGE_STATS", "WANDB_PROJECT", "WANDB_ENTITY", "WANDB_NAME", "WANDB_RUN_GROUP",
    "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_JOB_TYPE", "WANDB_TAGS", "WANDB_NOTES", "WANDB_MODE", "WANDB_DISABLED",
    "WANDB_SILENT", "WANDB_WATCH", "WANDB_LOG_MODEL", "MLFLOW_EXPERIMENT_NAME", "COMET_PROJECT_NAME", "COMET_MODE",
    "CLEARML_PROJECT", "CLEARML_TASK", "SWANLAB_PROJECT", "TRACKIO_PROJECT", "NO_COLOR", "FORCE_COLOR",
))  # fmt: skip
"""What a file of options may set, since such files are passed around: devices, threads, logs, names of projects. Nothing that
decides what code is run (`CXX`, `LD_PRELOAD`), where secrets are sent (`HF_ENDPOINT`, `WANDB_BASE_URL`) or where files are read."""


class ConfigFileError(ValueError):
    """The file cannot be taken; the message names it, the line or key, and what to do."""


def read_config(path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(options, environment variables)."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigFileError(f"There is no file {path}. Give a YAML file of options, or options as --name value.")
    if file.stat().st_size > MAX_BYTES:
        raise ConfigFileError(f"{path} has {file.stat().st_size:,} bytes; a file of options has at most {MAX_BYTES:,}.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    values = parsed(text, path)
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigFileError(f"{path} holds no mapping of option names to values, such as `learning_rate: 1e-5`.")
    return values, _environment(values.pop(ENVIRONMENT, None), path)


def parsed(text: str, path: str) -> Any:
    """The plain values of a YAML text; ConfigFileError where there are other things, or too many."""
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader without tags, with a limit on what aliases multiply, and with an error for a key that stands twice."""

        def get_single_node(self) -> Any:
            node = super().get_single_node()
            if node is not None and _values(node, {}, path) > MAX_VALUES:
                raise ConfigFileError(f"{path} has more than {MAX_VALUES:,} values, counting what its aliases repeat.")
            return node

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if getattr(event, "tag", None) is not None:
                line = event.start_mark.line + 1
                raise ConfigFileError(f"{path}, line {line}: the tag {event.tag!r} is not taken; write a plain value.")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            self.flatten_mapping(node)
            seen = set()
            for key, _ in node.value:
                name = self.construct_object(key, deep=True)
                if isinstance(name, str) and name in seen:
                    raise ConfigFileError(f"{path}, line {key.start_mark.line + 1}: `{name}` stands there twice.")
                seen.add(name if isinstance(name, str) else id(key))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigFileError(f"{path} is not YAML: {reason[:300]}") from error
    except RecursionError as error:
        raise ConfigFileError(f"{path} is nested too deeply for a file of options.") from error


def _values(node: Any, known: dict[int, int | None], path: str) -> int:
    """Values of a node, as many as there are with its aliases written out; each node is counted once."""
    if id(node) not in known:
        known[id(node)] = None  # it is being counted
        parts = node.value if isinstance(node.value, list) else ()
        inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_values(part, known, path) for part in inner)
    count = known[id(node)]
    if count is None:
        raise ConfigFileError(f"{path}, line {node.start_mark.line + 1}: an alias stands inside of what it stands for.")
    return count


def _environment(given: Any, path: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise ConfigFileError(f"{path}: `{ENVIRONMENT}` is not a mapping of variables to values.")
    for name, value in given.items():
        if name not in VARIABLES:
            raise ConfigFileError(
                f"{path}: `{ENVIRONMENT}` sets {name}={value!r}. A file of options may set only variables that neither decide what "
                "code is run nor where anything is sent (docs/command-line.md lists them). Set it in the shell if you mean it."
            )
        if not str(value).isprintable():
            raise ConfigFileError(f"{path}: `{ENVIRONMENT}` sets {name} to {value!r}, which has control characters.")
        if isinstance(value, dict | list):
            raise ConfigFileError(
                f"{path}: `{ENVIRONMENT}` sets {name} to a {type(value).__name__}; give text or a number."
            )
    return {name: "" if value is None else str(value) for name, value in given.items()}
