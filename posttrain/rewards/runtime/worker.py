"""The child process that runs reward functions: `python -m posttrain.rewards.runtime.worker PARENT_PID`.

It reads pickled messages from the trainer and answers in JSON on a socket that was its standard input and output; the
user's prints go to standard error. It imports nothing heavy and never the user's script: functions arrive by value. Plain
functions run on the main thread (where signals, and so the time limits of math-verify, work), async ones on a loop beside it.

Messages to the worker:  {"do": "hello" | "state" | "load" | "call", ...}
Answers:                 {"loaded": key} or {"unloadable": key, "message"}; {"began": call}, where it is asked for;
                         {"call": call, "rss": bytes, ...answer}
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from posttrain.rewards.runtime.frames import LARGEST_ANSWER, answer_frame, read_frame, write_all
from posttrain.rewards.runtime.invoke import ERROR, Wants, described, invoke, invoke_async, is_async

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def main() -> None:
    parent = int(sys.argv[1])
    incoming, outgoing = _take_socket()
    _be_the_first_to_go()
    _die_with(parent)
    Worker(incoming, outgoing).run()


def _take_socket() -> tuple[int, int]:
    """Move both directions out of the way of the user's code: prints go to standard error, reads find nothing."""
    incoming, outgoing = os.dup(0), os.dup(1)  # not inherited by programs that a reward starts
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # A forked child would keep the socket open after this process has died, and its death would go unseen.
    os.register_at_fork(after_in_child=lambda: (os.close(incoming), os.close(outgoing)))
    return incoming, outgoing


def _die_with(parent: int) -> None:
    """On Linux the kernel ends this process with its parent, even a parent that was killed; elsewhere the socket's end does.

    Nor does it let programs of the same user, such as those that a reward starts, trace this process or take its socket.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    control = ctypes.CDLL(None, use_errno=True).prctl
    control(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    control(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)


def _be_the_first_to_go() -> None:
    """Where memory runs out because of a reward, the kernel should end the worker and not the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # not Linux, or not allowed: nothing is lost but the preference
        return


class Worker:
    """Takes messages in order; answers may come in any order."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing
        self.writing = threading.Lock()
        self.waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.functions: dict[int, tuple[Callable[..., Any], Wants]] = {}
        self.state: Any = None
        self.loop: Any = None
        self.doing = {"hello": self.hello, "state": self.set_state, "load": self.load, "call": self.call}

    def run(self) -> None:
        threading.Thread(target=self.listen, daemon=True, name="listen").start()
        while True:
            message = self.waiting.get()
            self.doing[message["do"]](message)

    def listen(self) -> None:
        """Runs beside a busy main thread, so that the end of the trainer is seen at once."""
        while (payload := read_frame(self.incoming)) is not None:
            self.waiting.put(pickle.loads(payload))
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with whatever a reward has started
        os._exit(0)

    def send(self, answer: dict[str, Any]) -> None:
        data = answer_frame(answer)
        if len(data) > LARGEST_ANSWER:
            message = f"its answer has {len(data):,} bytes, more than {LARGEST_ANSWER:,}: log less with `log_extra`."
            data = answer_frame({"call": answer["call"], "fault": [ERROR, message], "seconds": answer["seconds"]})
        with self.writing:
            write_all(self.outgoing, data)

    # ---------------------------------------------------------------------------------------------------- messages

    def hello(self, message: dict[str, Any]) -> None:
        """Modules are found as the trainer finds them; the trainer's own environment is handed on."""
        sys.path[:] = message["path"]
        for name, value in message["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def set_state(self, message: dict[str, Any]) -> None:
        self.state = pickle.loads(message["state"])

    def load(self, message: dict[str, Any]) -> None:
        key = message["key"]
        try:
            function = pickle.loads(message["function"])
            self.functions[key] = (function, Wants(function))
        except BaseException as error:  # imports of the user's modules may fail in any way
            self.send({"unloadable": key, "message": described(error)})
        else:
            self.send({"loaded": key})

    def call(self, message: dict[str, Any]) -> None:
        number = message["call"]
        function, wants = self.functions[message["key"]]
        try:
            arguments = pickle.loads(message["arguments"])
        except BaseException as error:  # a column of a class that cannot be imported here
            fault = [ERROR, f"its arguments cannot be read: {described(error)}"]
            self.send({"call": number, "fault": fault, "seconds": 0})
            return
        arguments["trainer_state"] = self.state
        if message["announce"]:
            self.send({"began": number})
        if is_async(function):
            self.call_async(number, function, wants, arguments, message["limit"])
        else:
            self.send({"call": number, "rss": resident_bytes(), **invoke(function, wants, arguments)})

    def call_async(
        self, number: int, function: Callable[..., Any], wants: Wants, arguments: dict[str, Any], limit: float | None
    ) -> None:
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True, name="async rewards").start()

        async def answer() -> None:
            result = await invoke_async(function, wants, arguments, limit)
            self.send({"call": number, "rss": resident_bytes(), **result})

        asyncio.run_coroutine_threadsafe(answer(), self.loop)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main()
