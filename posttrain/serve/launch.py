"""Arguments, the token, the socket, the engine, and the loop that serves, in that order."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .auth import SHORTEST_TOKEN, TOKEN_VARIABLE, TokenFileError, read_token_file, token_file_of, write_token
from .engine.protocol import Engine
from .http.connections import KERNEL_QUEUE, TAKEN_AT_ONCE, bounded_protocol, most_connections
from .wire.shared_blocks import default_folder

if TYPE_CHECKING:  # the arguments can be shown where the packages of the server are not installed
    from .server import RolloutServer, ServerOptions

log = logging.getLogger("posttrain_serve")

REFUSED, START_FAILED, START_TOO_SLOW, PARENT_GONE = 2, 3, 4, 5
"""Exit statuses."""
PARENT_SECONDS = 0.5
CLOSED_BYTES = 1 << 12
"""Of an image, where none is taken: bodies that are refused must not fill the memory."""
OTHER_BODIES_BYTES = 2 << 30
"""Besides those of parts of weights; prompts above that wait at the trainer, which asks again."""


class StartError(Exception):
    """Why the server does not start."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="posttrain vllm-serve", description="Serve a model to trainers.")
    p.add_argument("--model", required=True, help="folder or name of the model")
    p.add_argument("--host", default="127.0.0.1", help="address to listen on")
    p.add_argument("--port", type=int, default=8000, help="0: any free one, printed in the log")
    p.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the token, of mode 0600 (default: the variable {TOKEN_VARIABLE}, or a token that is drawn and left where "
        "trainers of this user on this machine find it)",
    )
    p.add_argument("--dtype", default="auto")
    p.add_argument("--context-length", type=int, help="default: that of the model")
    p.add_argument("--memory-share", type=float, default=0.9, help="of the GPU's memory")
    p.add_argument("--tensor-parallel", type=int, default=1)
    p.add_argument("--logprobs-mode", default="processed_logprobs", choices=["processed_logprobs", "raw_logprobs"])
    p.add_argument(
        "--random-weights", action="store_true", help="load no weights; nothing is served before the first update"
    )
    p.add_argument("--initial-version", type=int, default=0, help="version of the weights in the model's folder")
    p.add_argument(
        "--adapter-folder", type=Path, help="the LoRA adapters that trainers send are written here; turns adapters on"
    )
    p.add_argument(
        "--shared-folder",
        type=Path,
        default=default_folder(),
        help="trainers on this machine leave weights here, in shared memory; a folder of this user's alone, on tmpfs",
    )
    p.add_argument("--most-rank", type=int, default=64, help="largest LoRA rank")
    p.add_argument("--adapter-modules", help="names of the modules that adapters may change, with commas between")
    p.add_argument("--sleep", action="store_true", help="allow /sleep and /wake (GPU)")
    p.add_argument("--images", type=int, default=0, help="most images in a prompt; 0: the model is shown none")
    p.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--engine-args", type=json.loads, default={}, help="JSON object of further vLLM EngineArgs")
    p.add_argument("--most-in-flight", type=int, default=4096)
    p.add_argument("--most-part-mb", type=int, default=272)
    p.add_argument("--most-update-gb", type=float, default=1024.0, help="host memory that one staged version may take")
    p.add_argument("--update-idle-seconds", type=float, default=600.0, help="a silent update is dropped after these")
    p.add_argument("--drop-loaded", action="store_true", help="keep no copy of the serving version in host memory")
    p.add_argument(
        "--stop-seconds", type=float, default=30.0, help="after SIGTERM, for what runs; the rest is handed back"
    )
    p.add_argument("--start-seconds", type=float, default=1800.0, help="give up if the model is not loaded by then")
    p.add_argument("--parent", type=int, help="process that started this one; the server ends when it is gone")
    p.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return p


def read_token(token_file: Path | None, port: int) -> tuple[str, str]:
    """(token, where it is from): the file, the environment, or one that is drawn. Never the arguments, which every user of the
    machine can read."""
    given = os.environ.pop(TOKEN_VARIABLE, "").strip()
    try:
        if token_file is not None:
            return read_token_file(token_file), f"the token of {token_file}"
        if not given:
            return write_token(port), f"a token, which is in {token_file_of(port)}"
    except (TokenFileError, OSError) as error:
        raise StartError(str(error)) from error
    if len(given) < SHORTEST_TOKEN or not given.isascii() or not given.isprintable() or " " in given:
        raise StartError(f"{TOKEN_VARIABLE} is not {SHORTEST_TOKEN} or more printable ASCII characters without blanks.")
    return given, f"the token of {TOKEN_VARIABLE}"


def bind(host: str, port: int) -> socket.socket:
    """The socket, bound before the model is loaded: a port that is taken is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio goes by the protocol's name: without it Nagle's algorithm stays on, and every answer comes 40 ms late.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        raise StartError(f"{host}:{port} cannot be listened on: {error.strerror}.") from error
    return bound


def make_engine(args: argparse.Namespace) -> Engine:
    from .engine.vllm_engine import ADAPTER_MODULES, VLLMEngine, VLLMOptions

    of_the_same_name = {name: value for name, value in vars(args).items() if name in VLLMOptions.__dataclass_fields__}
    modules = tuple(args.adapter_modules.split(",")) if args.adapter_modules else ADAPTER_MODULES
    others = {"adapters": args.adapter_folder is not None, "adapter_modules": modules, "more": args.engine_args}
    return VLLMEngine(VLLMOptions(**(of_the_same_name | others)))


def _options(args: argparse.Namespace) -> ServerOptions:
    from .server import PARTS_AT_ONCE, ServerOptions
    from .weights.update import UpdateLimits
    from .wire.images import MAX_IMAGE_BYTES

    return ServerOptions(
        initial_version=None if args.random_weights else args.initial_version,
        adapter_folder=args.adapter_folder,
        shared_folder=args.shared_folder,
        update=UpdateLimits(int(args.most_update_gb * (1 << 30)), args.update_idle_seconds, not args.drop_loaded),
        most_part_bytes=args.most_part_mb << 20,
        most_bodies_bytes=PARTS_AT_ONCE * (args.most_part_mb << 20) + OTHER_BODIES_BYTES,
        most_image_bytes=MAX_IMAGE_BYTES if args.images else CLOSED_BYTES,
        most_in_flight=args.most_in_flight,
        stop_seconds=args.stop_seconds,
    )


def _give_up_after(seconds: float) -> threading.Timer:
    """Ends the process: nothing gentler can stop a model that hangs while it loads."""

    def give_up() -> None:
        log.error("The model was not loaded within %g s (--start-seconds); giving up.", seconds)
        logging.shutdown()
        os._exit(START_TOO_SLOW)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


def _end_with(parent: int) -> None:
    """End this process, and what it started, as soon as `parent` is no longer its parent.

    A signal of the kernel (PR_SET_PDEATHSIG) would come when the *thread* ends that started this process; and a pipe stays open
    in other children of the parent.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        log.error("Process %s, which started this server, is gone: ending.", parent)
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(PARENT_GONE)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _run(args: argparse.Namespace, make: Callable[[argparse.Namespace], Engine]) -> None:
    try:
        import uvicorn  # noqa: F401 - that it is there is known before the model is loaded

        from .http.app import build_app
        from .server import RolloutServer
    except ImportError as error:
        raise StartError(
            f"{sys.executable} lacks a package of the server ({error}): install starlette, uvicorn, pydantic and "
            "prometheus_client, or posttrain with its extra `serve`."
        ) from error
    if args.parent is not None:
        _end_with(args.parent)
    if not isinstance(args.engine_args, dict):
        raise StartError("--engine-args is not a JSON object.")
    if args.adapter_folder is not None and not args.adapter_folder.is_dir():
        raise StartError(f"The adapter folder {args.adapter_folder} does not exist.")
    bound = bind(args.host, args.port)
    token, origin = read_token(args.token_file, bound.getsockname()[1])
    timer = _give_up_after(args.start_seconds)
    server = RolloutServer(make(args), _options(args))
    timer.cancel()
    server.start()
    try:
        _serve(server, build_app(server, token), origin, bound, args.log_level)
    finally:
        server.close()


def _serve(server: RolloutServer, app: Any, origin: str, bound: socket.socket, level: str) -> None:
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    config: dict[str, Any] = {
        "access_log": False,
        "log_config": None,
        "log_level": level,
        "http": bounded_protocol(AutoHTTPProtocol, most_connections()),
        "backlog": TAKEN_AT_ONCE,
        "ws": "none",
        "lifespan": "on",
    }
    stop = max(int(server.options.stop_seconds), 1)  # for answers to leave

    class Server(uvicorn.Server):
        loop: asyncio.AbstractEventLoop | None = None  # from when it serves

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            bound.listen(KERNEL_QUEUE)  # asyncio goes by one number for this and for what it takes at once
            self.loop = asyncio.get_running_loop()

        def handle_exit(self, sig: int, frame: Any) -> None:
            """SIGTERM, the first time: who asks is answered until what runs has ended, or been handed back."""
            if sig != signal.SIGTERM or server.stopping or self.loop is None:
                super().handle_exit(sig, frame)
                return
            server.stopping = True
            self.loop.call_soon_threadsafe(self._stop_gracefully)

        def _stop_gracefully(self) -> None:
            server.stopper = asyncio.ensure_future(server.stop_gracefully(server.options.stop_seconds))

    web = Server(uvicorn.Config(app, timeout_graceful_shutdown=stop, server_header=False, **config))

    def stop_process() -> None:
        web.should_exit = True

    server.stop_process = stop_process
    _stop_at_sigterm(server)
    host, port = bound.getsockname()[:2]
    log.info(
        "Serving version %s on %s port %s, to callers with %s.", server.versions.serving.version, host, port, origin
    )
    web.run(sockets=[bound])


def _stop_at_sigterm(server: RolloutServer) -> None:
    """A clean stop before and after uvicorn serves, which has handlers of its own (see `handle_exit`) and afterwards raises again
    those signals that it took itself: without this one that would end the process before the engine is closed.
    """

    def stop(number: int, frame: Any) -> None:
        server.stopping = True
        server.stop_process()

    if threading.current_thread() is threading.main_thread():  # Python takes handlers from there only
        signal.signal(signal.SIGTERM, stop)


def main(argv: Sequence[str] | None = None, make: Callable[[argparse.Namespace], Engine] | None = None) -> int:
    """`make`: of another engine than vLLM."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        _run(args, make or make_engine)
    except StartError as error:
        print(f"The server does not start: {error}", file=sys.stderr)
        return REFUSED
    except Exception:
        log.exception("The server failed.")
        return START_FAILED
    return 0
