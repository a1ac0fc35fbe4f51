"""Servers that join a run, and leave it: a file with an address on each line, read again and again.

A server that is added is fed, probed and then asked (`Fleet.join`); one whose line goes is asked for nothing more. The addresses of
the options are not in the file and stay. Hosts named in the file are sent the run's token, so the file must be this user's.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from posttrain.rollout.engines.vllm.fleet import Fleet
from posttrain.rollout.engines.vllm.fleet_members import AnyClient, Member

log = logging.getLogger(__name__)

READ_SECONDS = 2.0

Connect = Callable[[str], AnyClient]


class Roster:
    """From `start` to `close`."""

    def __init__(self, file: Path, fleet: Fleet, connect: Connect, seconds: float = READ_SECONDS) -> None:
        self._file, self._fleet, self._connect, self._seconds = file, fleet, connect, seconds
        self._known: dict[str, str] = {}  # line -> name of the server, of those that came by this file
        self._said: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="roster of servers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(self._seconds):
            try:
                self.look()
            except Exception:  # the run continues with the servers that it has
                log.exception("%s could not be followed.", self._file)

    def look(self) -> None:
        lines = self._lines()
        if lines is None:
            return
        self._said &= {*lines, str(self._file)}  # a line that comes back is read anew
        for line in [line for line in self._known if line not in lines]:
            self._fleet.leave(self._known.pop(line))
        for line in lines:
            if line not in self._known and line not in self._said:
                self._add(line)

    def _add(self, line: str) -> None:
        try:
            client = self._connect(line)
        except (ValueError, OSError) as error:
            self._say(line, f"{line!r} in {self._file} is no server that can join: {error}")
            return
        if client.name in {member.name for member in self._fleet.members}:
            self._say(line, f"{client.name} in {self._file} is one of this run's servers already.")
            return
        self._known[line] = client.name
        self._fleet.join(Member(client))

    def _lines(self) -> list[str] | None:
        """None: what is there is not to be followed."""
        try:
            descriptor = os.open(self._file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
                self._say(str(self._file), f"{self._file} is not followed: others than this user may write to it.")
                return None
            lines = (line.partition("#")[0].strip() for line in file)
            return [line for line in dict.fromkeys(lines) if line]

    def _say(self, what: str, sentence: str) -> None:
        """Once."""
        if what not in self._said:
            self._said.add(what)
            log.warning(sentence)
