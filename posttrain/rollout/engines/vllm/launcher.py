"""A server process of this trainer's own: started, waited for, restarted, and ended with the trainer, however that ends."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import posttrain.serve
from posttrain.core.transport import ServerError, ServerGone, ServerSlow
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.transport import Deadlines
from posttrain.rollout.engines.vllm.weight_channel import AUTO
from posttrain.serve.auth import TOKEN_VARIABLE

log = logging.getLogger(__name__)

KILL_SECONDS = 30.0
POLL_SECONDS = 0.1
TAIL = 2000
NATIVE = ("-m", "posttrain.rollout.engines.native.serving")


class ServerProcess:
    """`python path/to/posttrain/serve ...` in a session of its own, with its output in a log file.

    The server looks for its parent (`--parent`) and ends itself when that is gone, so a trainer that is killed leaves nothing
    behind. Unless a token is given one is drawn for each start, and handed over in the environment: a program that takes the
    port while the server is down learns nothing that opens the next one.
    """

    PROGRAM: ClassVar[Path] = Path(posttrain.serve.__file__).parent

    def __init__(
        self,
        arguments: Sequence[str],
        log_file: Path,
        python: str = sys.executable,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        token: str | None = None,
        weight_transport: str = AUTO,
        engine: str = "vllm",  # or "native": our own, for which `python` needs posttrain and no vLLM
    ) -> None:
        self.program = NATIVE if engine == "native" else (str(self.PROGRAM),)
        self.arguments, self.log_file, self.python = list(arguments), Path(log_file), python
        self.port = free_port() if port is None else port
        self.deadlines = deadlines or Deadlines()
        self.starts = 0
        self._draws_tokens, self._token = token is None, new_token() if token is None else token
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of `_process`: a watcher may restart it while the trainer closes it
        self._ending = threading.Lock()  # of its end: it is killed and reaped by one thread
        self._owner, self._closed = os.getpid(), False
        self.client = ServerClient(f"http://127.0.0.1:{self.port}", self._token, self.deadlines, weight_transport)
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"ServerProcess({self.client.name}, {'running' if self.is_running else 'not running'})"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._end() is None

    def _end(self) -> int | None:
        """The status with which the process ended; None while it runs.

        It is only looked at, and reaped by `kill`: until then its number, which is that of its group, is not used again.
        """
        process = self._process
        if process.returncode is not None:
            return process.returncode
        try:
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it was reaped by others, or just now by `kill`
            return process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def start(self) -> None:
        """Begin a process, in the place of the one before; `wait_until_healthy` says when it answers."""
        self.kill()  # what is left of the one before
        command = [self.python, *self.program, *self.arguments]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--parent", str(os.getpid())]
        with self._lock:
            if self._closed:
                raise ServerGone(f"{self.client.name} was closed by this trainer and is not started again.")
            if self._draws_tokens and self.starts:
                self._token = new_token()
                self.client.use_token(self._token)
            environment = os.environ | self._environment | {TOKEN_VARIABLE: self._token}
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            self._process = self._spawned(command, environment)
            self.starts += 1
        log.info("Started the server %s as process %s; its output is in %s.", self.client.name, self.pid, self.log_file)

    def _spawned(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log_file.open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            return subprocess.Popen(command, env=environment, start_new_session=True, **streams)

    def wait_until_healthy(self, give_up: threading.Event | None = None) -> None:
        """Until /health answers; ServerGone where the process ends first, ServerSlow where it takes too long."""
        end = time.monotonic() + self.deadlines.start
        latest = "it was not asked yet"
        while time.monotonic() < end:
            if not self.is_running:
                status = self._end() if self._process else "no process"
                raise ServerGone(
                    f"The server {self.client.name} ended at its start (status {status}). {self.log_tail()}"
                )
            if give_up is not None and give_up.wait(POLL_SECONDS):
                raise ServerGone(f"{self.client.name}: the trainer is closing.")
            if give_up is None:
                time.sleep(POLL_SECONDS)
            try:
                self.client.health()
                return
            except ServerError as error:
                latest = str(error)
        raise ServerSlow(
            f"The server {self.client.name} did not answer within {self.deadlines.start:g} s of its start ({latest}). "
            f"{self.log_tail()}"
        )

    def kill(self) -> None:
        """SIGKILL to the server and all that it started; also ends a process that was stopped."""
        with self._lock:
            process = self._process
        if process is not None:
            with self._ending:
                self._kill_and_reap(process)

    def _kill_and_reap(self, process: subprocess.Popen[bytes]) -> None:
        """Its workers are killed also where the server itself has died; once it is reaped its number may be another's."""
        if process.returncode is not None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.debug("Process %s was gone before it was killed.", process.pid)
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ServerSlow(
                f"Process {process.pid} of {self.client.name} did not end within {KILL_SECONDS:g} s of SIGKILL: the kernel "
                "holds it, perhaps in a driver."
            ) from error

    def restart(self, give_up: threading.Event | None = None) -> None:
        self.start()
        self.wait_until_healthy(give_up)

    def close(self) -> None:
        """End the process; it is not started again."""
        if os.getpid() != self._owner:  # a forked child of the trainer runs this at its end, too
            return
        with self._lock:
            self._closed = True
        atexit.unregister(self.close)
        self.kill()

    def log_tail(self) -> str:
        """The end of its output, for a sentence that says why it is gone."""
        if not self.log_file.is_file():
            return "It wrote nothing."
        with self.log_file.open("rb") as file:
            file.seek(max(self.log_file.stat().st_size - TAIL, 0))
            return f"The end of {self.log_file}:\n{file.read().decode(errors='replace')}"


def new_token() -> str:
    return secrets.token_urlsafe(24)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
