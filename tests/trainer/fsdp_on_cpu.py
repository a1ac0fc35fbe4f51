"""FSDP2 between CPU processes: what accelerate does between GPUs, on gloo.

accelerate reads its FSDP plugin only where the processes compute on accelerators (`AcceleratorState.__init__`); between CPU
processes it drops the plugin and trains whole copies. torch's `fully_shard` itself runs on gloo. So the kind of the group is
renamed before accelerate looks at it; everything after that is accelerate's and torch's own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType


def allow() -> None:
    """From here on FSDP options are honoured in this process although it computes on the CPU."""
    made = PartialState.__init__

    def init(self: PartialState, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


@contextmanager
def allowed() -> Iterator[None]:
    """As `allow`, for a while: DDP between CPU processes cannot be set up meanwhile."""
    made = PartialState.__init__
    allow()
    try:
        yield
    finally:
        PartialState.__init__ = made
