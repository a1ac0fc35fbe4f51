"""Feed: between those who write groups and the trainer that takes windows of them. Safe to call from any thread.

The trainer says how far it is (`trained`) and asks for windows (`next_window`, which waits). Workers ask for work (`pull`) and hand
groups in (`finish`). What begins, who is next and what is too old is decided by `pacing`; who has which fate is in the `ledger`;
what was finished and taken is in the `journal` before anything acts on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from posttrain.rollout.feed.group import Group, Work
from posttrain.rollout.feed.idle import IdleTimes
from posttrain.rollout.feed.journal import Journal, Key
from posttrain.rollout.feed.ledger import FINISHED, ISSUED, PLANNED, Ledger
from posttrain.rollout.feed.pacing import DROP, IN_ORDER, Lead, Pace, fair_share, may_begin, next_window

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # how often a thread that waits checks whether the run has failed or stopped
REPORT_SECONDS = 5.0  # how often a process that waits reports that to the others
GATHER_SECONDS = 60.0  # for which workers that were started and have not asked yet have their share kept for them
SAY_SECONDS = 10.0  # without a group, after which the log says who is waited for; then after twice as long
STALE, ZERO_VARIANCE = "stale", "zero_variance"
MANY = 2**31
WRITTEN_AGAIN = "What cannot be read is written again, where its weights still exist."
Found = TypeVar("Found")


class Feed:
    """One for a run."""

    def __init__(
        self,
        pace: Pace,
        lead: Lead,
        prompt_of: Callable[[int], tuple[int, int]],
        row_of: Callable[[int], Any],
        journal: Journal | None = None,
        patience: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prompt_of` a number of this feed: its number in the run, and its row of the dataset; `row_of` reads that. A wait
        for a window is given up after `patience` seconds without a group."""
        self.pace, self.lead, self.journal, self.clock = pace, lead, journal, clock
        self.prompt_of, self.row_of = prompt_of, row_of
        self.patience = patience
        self.ledger, self.idle = Ledger(), IdleTimes()
        self.groups: dict[int, Group] = {}  # finished, not taken
        self.windows = 0  # taken
        self.step = 0  # optimizer steps that are done
        self.waited = 0.0  # seconds that the trainer waited for the last window
        self.stopped = False
        self.while_waiting: Callable[[], None] | None = None  # called every REPORT_SECONDS while a window is waited for
        self._expected, self._expected_until = 1, 0.0  # workers that were started together
        self._round = 0  # of the last window: how often groups of it were replaced
        self._first_readable = 0  # number; a stream was read past what came before
        self._dropped: dict[int, str] = {}  # since the last window was taken: the journal has them with the next
        self._taken_before: dict[Key, dict[str, Any]] = {}  # what a run before this one took, from the journal
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    # ---- the trainer's side ------------------------------------------------------------------------------------------

    def trained(self, step: int) -> None:
        """So many optimizer steps are done, and their weights are published where a worker wants them."""
        with self._changed:
            self.step = step
            self._plan()
            self._changed.notify_all()

    def oldest_label(self) -> int:
        """Of weights that a worker may still have to write with, once the next step is done."""
        with self._changed:
            is_exact, live = self.pace.order == IN_ORDER, self.ledger.live.values()
            labels = [entry.label for entry in live if is_exact and entry.fate != FINISHED]
            return min(labels, default=self.published + 1)

    @property
    def published(self) -> int:
        """The newest label."""
        return self.step - self.step % self.pace.sync_steps

    def next_window(self) -> list[Group]:
        """The groups of the next window, by their numbers; waits until there are enough."""
        with self._changed:
            self.waited = 0.0
            groups = self._take((self.windows, 0), self.pace.groups)
            self.windows, self._round = self.windows + 1, 0
            return groups

    def further(self, count: int) -> list[Group]:
        """As many more for the window that was taken last, in the place of groups that teach nothing."""
        with self._changed:
            self._round += 1
            if not count:
                return []
            self.ledger.replace(count, ZERO_VARIANCE)
            self._plan()
            self._changed.notify_all()
            return self._take((self.windows - 1, self._round), count)

    def _take(self, key: Key, count: int) -> list[Group]:
        began = self.clock()
        self.idle.note_trainer(False, began)
        numbers, dropped = self._until(lambda: self._choice(key, count), f"window {key[0]} waits")
        if self._taken_before.pop(key, None) is None and self.journal is not None:
            self.journal.take(key, numbers, dropped)
        self._dropped = {}
        self.ledger.take(numbers)
        now = self.clock()
        self.waited += now - began
        self.idle.note_trainer(True, now)
        self._changed.notify_all()
        return [self.groups.pop(number) for number in numbers]

    def has_window(self) -> bool:
        """Whether `next_window` would return at once. What is too old is dropped by the question."""
        with self._changed:
            return self._choice((self.windows, 0), self.pace.groups) is not None

    def _until(self, ready: Callable[[], Found | None], who: str) -> Found:
        """Wait until `ready` finds something. The log says for whom; without a group for `patience` seconds it ends."""
        finished, since, say_at, reported = -1, self.clock(), SAY_SECONDS, self.clock()
        while (found := ready()) is None:
            self._raise_error()
            self._changed.wait(LOOK_SECONDS)
            if self.while_waiting is not None and self.clock() - reported > REPORT_SECONDS:
                self._changed.release()  # others hand groups in meanwhile
                try:
                    self.while_waiting()
                finally:
                    self._changed.acquire()
                reported = self.clock()
            now = self.clock()
            if self.ledger.totals[FINISHED] != finished:
                finished, since, say_at = self.ledger.totals[FINISHED], now, SAY_SECONDS
            elif now - since > self.patience:
                raise TimeoutError(
                    f"{self._nothing_came(now - since, who)} Raise `heartbeat_stale_after_s` where episodes may take as long, or "
                    "bound them with `episode_timeout`."
                )
            elif now - since > say_at:
                logger.warning("%s", self._nothing_came(now - since, who))
                say_at *= 2
        return found

    def _nothing_came(self, seconds: float, who: str) -> str:
        waiting = len(self.ledger.numbers(PLANNED))
        return (
            f"No group was finished for {seconds:.0f} s (`heartbeat_stale_after_s` is {self.patience:g}), and {who}. "
            + f"Being written: {self.being_written() or 'nothing'}."
            + (f" {waiting} groups wait for a worker." if waiting else "")
        )

    def being_written(self, worker: str | None = None) -> str:
        """Groups, by whom and for how long: the three oldest of a worker, or of all."""
        with self._changed:
            numbers = self.ledger.numbers(ISSUED) if worker is None else self.ledger.held_by(worker)
            held = sorted((self.ledger.live[number].since, number) for number in numbers)[:3]
            now = self.clock()
            return ", ".join(f"prompt {n} by {self.ledger.live[n].worker} for {now - since:.0f} s" for since, n in held)

    def _choice(self, key: Key, count: int) -> tuple[list[int], dict[int, str]] | None:
        replayed = self._taken_before.get(key)
        if replayed is not None and len(replayed["numbers"]) == count:
            for number, reason in replayed["dropped"].items():
                self.ledger.drop(number, reason)
                self.groups.pop(number, None)
            return replayed["numbers"], replayed["dropped"]
        # Rewards with noise, or a GPU, may find others to replace than the run before did: from here on it is another run.
        self._taken_before.clear()
        self._dropped |= self._drop_stale(key[0])
        choice = next_window(self.pace, self.ledger.live, key[0], self.lead.value, count)
        return ([*choice.numbers], self._dropped) if choice.numbers else None

    def _drop_stale(self, window: int) -> dict[int, str]:
        """Of `on_stale="drop"`: what neither this window nor a later one may take."""
        if self.pace.on_stale != DROP:
            return {}
        old = [n for n, entry in self.ledger.live.items() if self.pace.last_window(entry.label) < window]
        for number in old:
            self.ledger.drop(number, STALE)
            self.groups.pop(number, None)
        return dict.fromkeys(old, STALE)

    def wait_until_written(self, label: int) -> None:
        """Until every group that older weights than `label` must write is finished: those weights may go then."""
        with self._changed:
            is_written = lambda: all(  # noqa: E731
                entry.label >= label for entry in self.ledger.live.values() if entry.fate != FINISHED
            )
            self._until(
                lambda: is_written() or None, f"the checkpoint of step {label} waits for what older weights must write"
            )
            if self.journal is not None:
                self.journal.sync()

    def wait_until_given_back(self) -> None:
        """Until no worker writes: all have noticed that there are newer weights, and begin anew with them."""
        with self._changed:
            self._until(lambda: not self.ledger.numbers(ISSUED) or None, "new weights wait for what is being written")

    # ---- the workers' side -------------------------------------------------------------------------------------------

    def expect(self, workers: int) -> None:
        """So many were started just now."""
        with self._changed:
            self._expected, self._expected_until = workers, self.clock() + GATHER_SECONDS

    def pull(self, worker: str, label: int, most: int = MANY) -> list[Work]:
        """Up to `most` groups for a worker whose weights have this label, and up to its share of all. Nothing begins with weights
        that others have replaced: what begins is counted by how far the training is, and would be older than that count says."""
        with self._changed:
            self._plan()
            waiting = sorted(self.ledger.numbers(PLANNED))
            if self.pace.order == IN_ORDER:
                waiting = self._next_batch(label)
            elif label < self.published:
                return []
            else:
                most = min(most, self._share(worker, len(waiting)))
            if self.pace.most_in_flight is not None:
                most = min(most, self.pace.most_in_flight - len(self.ledger.numbers(ISSUED)))
            most, now = max(most, 0), self.clock()
            issue, written_again = self.ledger.issue, self._finished_beside(waiting[:most])
            issued = [
                Work(number, issue(number, worker, label, now), label, *self.prompt_of(number))
                for number in waiting[:most]
            ]
            issued += [Work(number, 0, label, *self.prompt_of(number), counts=False) for number in written_again]
            self.idle.note(worker, not self.ledger.holds(worker), now)
            return sorted(issued, key=lambda work: work.number)

    def _share(self, worker: str, waiting: int) -> int:
        expected = self._expected if self.clock() < self._expected_until else 1
        workers = max(len(self.idle) + (worker not in self.idle), expected)
        issued, held = self.ledger.numbers(ISSUED), self.ledger.held_by(worker)
        return fair_share(waiting + len(issued), len(held), workers)

    def _finished_beside(self, numbers: list[int]) -> list[int]:
        """In order: what was begun at once with these and is finished, where a worker died in between. Without it they would be
        written beside fewer, and their last bits be others."""
        live = self.ledger.live
        if self.pace.order != IN_ORDER or self.pace.most_in_flight is not None or not numbers:
            return []  # where few are written at once, what is beside a group is a matter of time
        first = live[numbers[0]]
        begun_at_once = range(max(first.batch, self._first_readable), first.batch + first.batch_size)
        return [n for n in begun_at_once if n not in live or live[n].fate == FINISHED]

    def oldest_needed(self) -> int:
        """The lowest number that may be written, be it once more beside others."""
        with self._changed:
            open_batches = (entry.batch for entry in self.ledger.live.values() if entry.fate != FINISHED)
            return min(open_batches, default=self.ledger.begun) if self.pace.order == IN_ORDER else self.ledger.begun

    def oldest_open(self) -> int:
        """The lowest number that is neither taken nor dropped."""
        with self._changed:
            return min(self.ledger.live, default=self.ledger.begun)

    def forget_before(self, number: int) -> None:
        """No checkpoint needs lower ones in the journal."""
        with self._changed:
            self.journal.remove_before(number)

    def _next_batch(self, label: int) -> list[int]:
        """In order, what was begun at once is issued at once: the last bits of a completion depend on what is written beside it.
        Where too much waits already, nothing but what the next window needs."""
        live = self.ledger.live
        waiting = [n for n in sorted(self.ledger.numbers(PLANNED)) if live[n].label == label]
        if not waiting or (self._is_full and waiting[0] not in sorted(live)[: self.pace.groups]):
            return []
        return [number for number in waiting if live[number].batch == live[waiting[0]].batch]

    def _plan(self) -> None:
        """Begin what may begin. Of a run that is replayed nothing begins before its last recorded window is taken.

        In order, a group is written by the weights that are the newest when it begins, and it begins when the count of trained and
        replaced groups allows it, whatever waits: neither depends on time. What a run before this one has written is taken over.
        """
        if self.stopped or self._taken_before or (self._is_full and self.pace.order != IN_ORDER):
            return
        ledger, trained, batch = self.ledger, self.step // self.pace.steps, self.ledger.begun
        count = may_begin(self.pace, ledger.begun, ledger.dropped, trained, self.lead.value)
        for _ in range(count):
            number = ledger.begin(self.published, batch, count)
            if self.journal is not None and number in self.journal.places:
                self._adopt(number)

    @property
    def _is_full(self) -> bool:
        return self.pace.most_waiting is not None and len(self.groups) >= self.pace.most_waiting

    def finish(self, group: Group) -> bool:
        """False: another worker has the number by now; the group is not used."""
        content = group.to_bytes() if self.journal is not None else b""
        with self._changed:
            is_current = self.ledger.finish(group.number, group.attempt, "")
            if is_current:
                entry = self.ledger.live[group.number]
                entry.label, group.finished_step, group.finished_at = group.label, self.step, self.clock()
                self.idle.note(entry.worker, not self.ledger.holds(entry.worker), group.finished_at)
                if self.journal is not None:
                    self.journal.append(group.number, group.attempt, content)
                self.groups[group.number] = group
                self._changed.notify_all()
            return is_current

    def give_back(self, worker: str) -> None:
        """A worker ended, or begins anew: what it held is issued again."""
        with self._changed:
            for number in self.ledger.held_by(worker):
                self.ledger.give_back(number, self.ledger.live[number].attempt)
            self.idle.forget(worker, self.clock())
            self._changed.notify_all()

    def holds(self, worker: str) -> bool:
        """Whether it has something that is not finished."""
        with self._changed:
            return self.ledger.holds(worker)

    def idle_seconds(self) -> dict[str, float]:
        """For how long workers held nothing since the last question."""
        with self._changed:
            return self.idle.since_asked(self.clock())

    def counts(self) -> dict[str, float]:
        """Of groups, at one moment: begun = taken + dropped + in flight + waiting."""
        with self._changed:
            waiting = len(self.groups)
            now = {"begun": self.ledger.begun, "in_flight": len(self.ledger.live) - waiting, "waiting": waiting}
            return now | self.ledger.totals

    def overlap_seconds(self) -> float:
        """For how long the trainer trained while a worker wrote, since the last question."""
        with self._changed:
            return self.idle.both_since_asked(self.clock())

    def label_for(self, label: int) -> int | None:
        """Which weights a worker that has `label` should have next; None: it is well served.

        In order, those of the oldest group that is not being written, once none is left for its own; else the newest.
        """
        with self._changed:
            if self.pace.order != IN_ORDER:
                return self.published if label < self.published else None
            wanted = sorted({self.ledger.live[number].label for number in self.ledger.numbers(PLANNED)})
            return None if label in wanted or not wanted else wanted[0]

    def wait(self, seconds: float = LOOK_SECONDS) -> None:
        """Until something has changed."""
        with self._changed:
            if not self.stopped:
                self._changed.wait(seconds)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def stop(self, error: BaseException | None = None) -> None:
        """Nothing begins any more; with an `error`, a trainer that waits for a window gets it."""
        with self._changed:
            self.stopped, self._error = True, self._error or error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
        if self.stopped:
            raise RuntimeError("The rollouts were stopped, and a window was asked for.")

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        with self._changed:
            if self.journal is not None:
                self.journal.sync()
            return {
                "ledger": self.ledger.state(),
                "windows": self.windows,
                "lead": self.lead.value,
                "quiet": self.lead.hardly,
            }

    def load_state(self, state: dict[str, Any]) -> None:
        """Groups come from the journal, also those that were finished after the checkpoint: windows that were taken then are taken
        again, the same groups in the same order, and what was finished and not taken is not written twice. `step` is the
        checkpoint's by now: older weights are gone."""
        with self._changed:
            self.groups.clear()
            self.ledger.load_state(state["ledger"])
            self._first_readable = min(self.ledger.live, default=self.ledger.begun)
            self.windows, self.lead.value, self.lead.hardly = state["windows"], state["lead"], state["quiet"]
            if self.journal is None:
                return
            # In order, what is next depends on no record, and each number begins in its turn.
            if self.pace.order != IN_ORDER:
                self._taken_before = {k: taken for k, taken in self.journal.windows().items() if k[0] >= self.windows}
                while self.ledger.begun <= max(self.journal.places, default=-1):
                    self.ledger.begin(self.step)
            for number in [*self.ledger.live]:
                self._adopt(number)
            lost = {k for k, taken in self._taken_before.items() if not self.groups.keys() >= {*taken["numbers"]}}
            for key in [key for key in self._taken_before if lost and key >= min(lost)]:
                del self._taken_before[key]
            self.journal.say_damage(WRITTEN_AGAIN)
            self._refuse_unwritable()

    def _refuse_unwritable(self) -> None:
        """In order: raise for groups that only weights of before the checkpoint could write."""
        live = self.ledger.live
        lost = [n for n, entry in live.items() if entry.fate != FINISHED and entry.label < self.step]
        if self.pace.order != IN_ORDER or not lost:
            return
        named, oldest = ", ".join(map(str, sorted(lost)[:8])), min(live[number].label for number in lost)
        raise ValueError(
            f"{self.journal.folder} has no readable group of the prompts with the numbers {named}: it is damaged, or files are "
            f"missing. In order the weights of step {oldest} write them, and those are gone at step {self.step}. Resume from a "
            f"checkpoint of step {oldest} or before (`resume_from_checkpoint='OUTPUT/checkpoint-N'`), or let the newest weights "
            "write them: `async_order='window'` and `resume_allow_changes=['async_order', 'update_in_flight']`."
        )

    def _adopt(self, number: int) -> None:
        """A group that the journal has is finished; one that it has not is written, once more."""
        content, ledger, entry = self.journal.read(number), self.ledger, self.ledger.live[number]
        if content is None:
            entry.fate = PLANNED
            return self.journal.say_damage(WRITTEN_AGAIN)
        group = self.groups[number] = Group.from_bytes(content, self.row_of)
        if entry.fate != FINISHED:
            ledger.finish(number, ledger.issue(number, "", group.label), "")
        entry.label, entry.attempt = group.label, group.attempt
