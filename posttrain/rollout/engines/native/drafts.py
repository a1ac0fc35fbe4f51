"""Drafts: a step that may write several tokens of a row, exactly those that as many steps would write.

What a row wrote before is looked up for what may follow now (Saxena, prompt lookup decoding, 2023), and the model reads those
drafts together with the row's last token, as lines of one step. Noise is counted, so the token number n of a row is a function of
the tokens before it: each line draws with the noise of its own number, and a row takes the token of a line where the draft that
the line was fed is the token that was drawn before it. Nothing is rejected at random, and no probability is compared. What a wrong
draft left on a page is written over by the token that comes to stand there, before any line looks at that place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.rollout.engines.native.cache import PAGE
from posttrain.rollout.engines.native.rows import Lines
from posttrain.rollout.engines.native.scheduler import Running
from posttrain.rollout.engines.native.step import Program, Sampler
from posttrain.rollout.engines.noise import words
from posttrain.rollout.engines.sampling import draw

MAX_LINES = {"cuda": 64, "cpu": 8}
"""Of a step with drafts. On CUDA a step of so many rows mostly reads the weights, as a step of one does. On a CPU only a few more
rows than one do not take as much longer."""
LEAST_ACCEPTED = {"cuda": 0.2, "cpu": 1.0}
"""Drafts that a step must have accepted on average: by how much it takes longer than one without. On a CPU that is what
`benchmarks/rollout_drafts.py --always` shows (one row and 4 drafts, 135M weights: 1.9 times as long); on CUDA it is an estimate."""
LONGEST, SHORTEST = 3, 2  # tokens that must be alike for what followed them to be a draft
NONE = -1  # where there is no draft, and in the history where a token stands for an image


class DraftedProgram:
    """The step of `program` with `drafts` tokens drafted for each row; like that it can be captured as a graph."""

    def __init__(self, program: Program, drafts: int, max_rows: int) -> None:
        self.program, self.rows, self.innermost, self.drafts = program, program.rows, program.innermost, drafts
        slots, pages = self.rows.table.shape
        self.max_rows = min(max_rows, slots)
        room = len(self.rows.ids) * (drafts + 1)
        # The last column of each takes what is not accepted.
        how = {"dtype": torch.int64, "device": self.rows.table.device}
        self.history = torch.zeros(self.max_rows, pages * PAGE + 1, **how)
        self.ids = torch.zeros(self.max_rows, room + 1, **how)
        self.logps = torch.zeros(2, self.max_rows, room + 1, device=how["device"])  # sampling, policy
        self.counts = torch.zeros(3, self.max_rows, **how)  # since the last look: tokens written, steps, drafts

    def put(self, running: Sequence[Running]) -> None:
        """Copy the tokens so far to the device; the steps add theirs by themselves."""
        tokens = [_draftable(run) for run in running]
        history = np.full((len(tokens), max(map(len, tokens))), NONE, np.int64)
        for row, ids in enumerate(tokens):
            history[row, : len(ids)] = ids
        self.history[: len(tokens), : history.shape[1]].copy_(torch.from_numpy(history))

    def restart(self) -> None:
        """Results are written from the first column again."""
        self.counts.zero_()

    def run(self, rows: int, table_width: int, sampler: Sampler) -> None:
        """One step. No value is read by the host, and every tensor that outlives the step stays where it is."""
        own = self.rows.lines(rows, table_width)
        drafts = drafts_from(self.history[:rows, : table_width * PAGE], own.positions, self.drafts)
        fed = torch.cat([own.tokens[:, None], drafts], 1)  # (rows, lines of each)
        ahead = torch.arange(fed.shape[1], device=fed.device)
        left = (own.remaining[:, None] - ahead).clamp(min=0) * (fed != NONE)
        logits = self.program.logits(_lines_of(own, fed, left, ahead))
        bases, numbers = (self.rows.field(name, rows)[:, None] for name in ("bases", "numbers"))
        noise = words(bases.expand_as(fed), numbers + ahead).flatten()
        # Without a grammar all rows of the mask are alike.
        drawn = draw(logits, noise, sampler.rule, sampler.bias, None, sampler.part(sampler.allowed, 1))
        ids, *logps = (x.view(fed.shape) for x in (drawn.ids, drawn.sampling_logps, drawn.policy_logps))
        stops = (ids[..., None] == sampler.stop_ids).any(-1)
        follows = (ids[:, :-1] == fed[:, 1:]) & ~stops[:, :-1]
        taken = (left > 0) & pad(follows, (1, 0), value=True)
        taken = taken.cumprod(1).bool()  # up to the first line that is not
        self._keep(rows, ids, logps, taken, (left[:, 1:] > 0).sum(1))
        self._move_on(rows, ids, stops, taken)

    def _keep(self, rows: int, ids: Tensor, logps: list[Tensor], taken: Tensor, drafted: Tensor) -> None:
        """The tokens that rows take go to the results and to their history."""
        written, steps, drafts = self.counts[:, :rows]
        ahead = torch.arange(ids.shape[1], device=ids.device)
        columns = torch.where(taken, written[:, None] + ahead, self.ids.shape[1] - 1)
        self.ids[:rows].scatter_(1, columns, ids)
        for kept, new in zip(self.logps[:, :rows], logps, strict=True):
            kept.scatter_(1, columns, new)
        places = self.rows.field("positions", rows)[:, None] + 1 + ahead
        self.history[:rows].scatter_(1, torch.where(taken, places, self.history.shape[1] - 1), ids)
        written += taken.sum(1)
        steps += taken[:, 0]
        drafts += drafted

    def _move_on(self, rows: int, ids: Tensor, stops: Tensor, taken: Tensor) -> None:
        """As `step.advance_rows` does, by as many tokens as each row takes."""
        tokens, positions, numbers, remaining = (
            self.rows.field(name, rows) for name in ("tokens", "positions", "numbers", "remaining")
        )
        count = taken.sum(1)
        left = torch.where((stops & taken).any(1), 0, remaining - count)
        is_active = left > 0
        latest = ids.gather(1, (count - 1).clamp(min=0)[:, None]).squeeze(1)
        tokens.copy_(torch.where(is_active, latest, tokens))
        positions += count * is_active
        numbers += count
        remaining.copy_(left)

    def drawn(self, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows, columns) ids, (2, rows, columns) log-probs, and (3, rows) how many of them are written, in how many steps, of how
        many drafts; here the host waits."""
        return tuple(x.cpu().numpy() for x in (self.ids[:rows], self.logps[:, :rows], self.counts[:, :rows]))


def _draftable(run: Running) -> np.ndarray:
    """Its tokens; those of images are none that could be fed alone, and may lie beyond the vocabulary."""
    tokens = run.request.tokens()
    for image in run.request.prompt.images:
        tokens[image.start : image.stop] = NONE
    return tokens


def _lines_of(own: Lines, fed: Tensor, left: Tensor, ahead: Tensor) -> Lines:
    """A line for each token that is fed; those out of use stand where their row stands."""

    def repeated(of_rows: Tensor) -> Tensor:
        return of_rows[:, None].expand(-1, len(ahead), *of_rows.shape[1:]).flatten(0, 1)

    return Lines(
        table=repeated(own.table),
        tokens=fed.clamp(min=0).flatten(),
        positions=(own.positions[:, None] + ahead * (left > 0)).flatten(),
        prefixes=repeated(own.prefixes),
        remaining=left.flatten(),
        shifts=repeated(own.shifts),
        of_each_row=len(ahead),
    )


def drafts_from(history: Tensor, positions: Tensor, count: int) -> Tensor:
    """(rows, places) tokens, (rows,) where the last of each row stands -> (rows, count) what may follow; NONE: nothing was found.

    It is what followed the latest place that looks like the row's end by LONGEST tokens, else by SHORTEST. Where that is so near
    that the end of the row is reached, what lies between is repeated.
    """
    width = history.shape[1]
    place = torch.arange(width, device=history.device)
    alike, rank = place < positions[:, None], history.new_full((), NONE)
    for back in range(LONGEST):
        token = history.gather(1, (positions - back).clamp(min=0)[:, None])
        alike = alike & (pad(history[:, : width - back], (back, 0), value=NONE - 1) == token)
        if back + 1 >= SHORTEST:  # more tokens alike count more than any later place
            rank = torch.where(alike, place + back * width, rank)
    found = rank.amax(1)
    start = torch.where(found == NONE, positions, found % width)
    period = (positions - start).clamp(min=1)
    places = start[:, None] + 1 + torch.arange(count, device=history.device) % period[:, None]
    drafts = history.gather(1, places.clamp(max=width - 1))
    return torch.where((found == NONE)[:, None], NONE, drafts)


class Trial:
    """Whether drafts pay: by how many a step were accepted in the last look, or, if it had none, would have been."""

    is_on = False

    def __init__(self, least: float, drafts: int) -> None:
        self._least, self._drafts = least, drafts

    def note(self, steps: int, accepted: int) -> None:
        """Of a look with drafts, the steps of all its rows together."""
        self.is_on = accepted >= self._least * steps

    def look_back(self, run: Running, written: int) -> None:
        """Of a look without: look up, on the host, what it began to write after the first `written` tokens of a completion."""
        tokens, known = _draftable(run), len(run.request.prompt.ids) + written
        ahead = tokens[known : known + self._drafts]
        if not len(ahead):  # a stop string took everything back
            return
        drafts = drafts_from(torch.from_numpy(tokens)[None].long(), torch.tensor([known - 1]), len(ahead))[0].numpy()
        right = int((drafts == ahead).cumprod().sum())
        self.is_on = right >= self._least or right == len(ahead)
