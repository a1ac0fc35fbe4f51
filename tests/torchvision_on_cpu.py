"""torchvision's wheel beside a CPU build of torch: what image processors use of it is plain torch, once it can be imported.

Without the operators that it looks up at its import, and that its CUDA build cannot register here, `import torchvision` fails,
and with it the import of every model class of transformers, text models too. `make_importable` declares them in this process;
`python -m tests.torchvision_on_cpu` lets every process of the environment declare them when it imports torchvision, and not before:
a worker that needs no torch must not import it. `torchvision.ops` stays unusable.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib import metadata, util
from pathlib import Path
from typing import Any

HOOK = "torchvision_on_cpu"


def make_importable() -> None:
    """Declare the operators, where torch and torchvision are builds that do not fit, before anything imports torchvision."""
    import torch

    if util.find_spec("torchvision") is None or "cpu" not in torch.__version__:
        return
    if "cpu" in metadata.version("torchvision") or hasattr(torch.ops.torchvision, "nms"):
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _BeforeTorchvision:
    """A finder of modules that finds none, and is asked before all others."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            make_importable()


def hook() -> None:
    sys.meta_path.insert(0, _BeforeTorchvision())


if __name__ == "__main__":
    packages = Path(sysconfig.get_path("purelib"))
    (packages / f"{HOOK}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (packages / f"{HOOK}.pth").write_text(f"import {HOOK}; {HOOK}.hook()\n", encoding="utf-8")
