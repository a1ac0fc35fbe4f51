"""UnreadableImages: rows that a run leaves out because their images cannot be read any more, counted and named."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from posttrain.core.batch import TokenBatch

logger = logging.getLogger(__name__)

METRIC = "data/unreadable_images"
FEW, SHARE = 10, 100
"""Of the rows of a run, this many and one in so many may be left out: more is a disk or a network that is gone."""


class UnreadableImages:
    """Of this process. A run that leaves out more than a few rows ends: it would train on whatever is left."""

    def __init__(self) -> None:
        self.rows, self._named = 0, set[str]()

    def note(self, passes: Sequence[TokenBatch]) -> int:
        """Name what these batches left out, each image once; the number of images."""
        found = [reason for part in passes for reason in part.left_out]
        self.rows += sum(part.num_samples for part in passes) + len(found)
        for reason in dict.fromkeys(found):
            if reason not in self._named:
                logger.warning(f"A row is left out: {reason}")
        self._named.update(found)
        if len(self._named) > FEW + self.rows // SHARE:
            raise RuntimeError(
                f"{len(self._named)} of {self.rows} rows had to be left out because their images cannot be read: more than {FEW} "
                f"and one in {SHARE}. The last: {found[-1]} Restore the images, and resume from the last checkpoint."
            )
        return len(found)
