"""Keys and values of the rows of a step side by side: what a CPU attends to fastest.

On pages a row's tokens lie in pieces, which plain torch would have to gather in every layer of every step. Here they are gathered
when who runs changes, and each step adds a column. All rows end at the same column: the newest tokens of all are one column, a
sliding window is the same columns for all, and what a row must not see (the columns before its first token) never changes:

    token t of a row at position p lies in column  last - p + t,   where last is the column that the step writes

Pages stay what is true: what was written is put on them after every look (`keep`), before anyone can be given a page of another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from posttrain.models.attention.softmax import softmax_attention
from posttrain.rollout.engines.native.cache import PAGE, KeyValueStore, Pages

SPARE_COLUMNS = 64
NOTHING = float("-inf")


class DenseRows:
    """(rows, heads, columns, width) keys and values of each layer."""

    def __init__(self, store: KeyValueStore, table: Tensor, positions: Tensor, prefixes: Tensor, steps: int) -> None:
        """Of rows that stand at `positions`, with the pages of `table` (rows, pages); room for `steps` tokens, and some."""
        self._store, self._table, self._positions = store, table, positions.clone()
        self._gaps = (-prefixes) % PAGE
        # Where the next tokens go; where those begin that no page has yet.
        self.column = self._kept = int(positions.max())
        self.columns = columns_for(positions, steps)
        starts = self.column - positions
        is_before = torch.arange(self.column) < starts[:, None]  # (rows, columns so far)
        self._mask = self._mask_of(is_before) if bool(starts.any()) else None
        tokens = (torch.arange(self.column) - starts[:, None]).clamp(min=0)
        places = tokens + self._gaps[:, None] * (tokens >= prefixes[:, None])
        self._keys, self._values = (
            [self._gathered(pages, places, is_before) for pages in tensors] for tensors in (store.keys, store.values)
        )

    def _mask_of(self, is_before: Tensor) -> Tensor:
        """(rows, 1, 1, columns), added to scores."""
        mask = torch.zeros(is_before.shape).masked_fill(is_before, NOTHING)
        return pad(mask, (0, self.columns - is_before.shape[1]))[:, None, None]

    def _gathered(self, pages: Pages, places: Tensor, is_before: Tensor) -> Tensor:
        numbers = self._table.long().gather(1, places // PAGE)
        # Zeros, not what happens to lie there: a weight of 0 times a number that is none would be none.
        found = pages[numbers, :, places % PAGE].masked_fill_(is_before[:, :, None, None], 0)
        made = found.new_empty(len(places), pages.shape[1], self.columns, pages.shape[3])
        made[:, :, : self.column] = found.transpose(1, 2)
        return made

    def attend(
        self,
        place: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """(rows, heads, width) of the new tokens -> (rows, heads, width of values), in the layer at `place`."""
        rows, heads, width = query.shape
        keys, values = self._keys[place], self._values[place]
        key, value = self._store.as_kept(key, value)
        keys[:, :, self.column] = key
        values[:, :, self.column] = value
        seen = slice(max(self.column + 1 - window, 0) if window else 0, self.column + 1)
        keys, values = keys[:, :, seen], values[:, :, seen]
        mask = None if self._mask is None else self._mask[..., seen].to(query.dtype)
        grouped = query.view(rows, keys.shape[1], -1, width)  # query heads of one key head, as if they were its tokens
        if softcap or sinks is not None:
            sinks = None if sinks is None else sinks.view(*grouped.shape[1:3], 1)
            found = softmax_attention(grouped, keys, values, None if mask is None else mask == 0, scale, softcap, sinks)
        else:
            found = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return found.reshape(rows, heads, -1)

    def advance(self) -> None:
        """The step is done in all layers."""
        self.column += 1

    def keep(self) -> None:
        """Put the tokens since the last time on their pages.

        Rows that ended in between kept writing: into the rest of their pages, or to page 0, which belongs to no row.
        """
        steps = self.column - self._kept
        places = self._positions[:, None] + self._gaps[:, None] + torch.arange(steps)
        numbers, last = places // PAGE, self._table.shape[1] - 1
        pages = self._table.long().gather(1, numbers.clamp(max=last)) * (numbers <= last)
        new = slice(self._kept, self.column)
        for kept, dense in ((self._store.keys, self._keys), (self._store.values, self._values)):
            for on_pages, side_by_side in zip(kept, dense):
                on_pages[pages, :, places % PAGE] = side_by_side[:, :, new].transpose(1, 2)
        self._positions += steps
        self._kept = self.column


def columns_for(positions: Tensor, steps: int) -> int:
    return int(positions.max()) + max(steps, SPARE_COLUMNS)
