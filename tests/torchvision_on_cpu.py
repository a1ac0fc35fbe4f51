"""torchvision's wheel beside a CPU build of torch: what image processors use of it is plain torch, once it can be imported."""

from __future__ import annotations

from importlib import metadata, util


def make_importable() -> None:
    """Declare the operators that torchvision looks up at its import and that its CUDA build cannot register here.

    Without them `import torchvision` fails, and with it the import of every model class of transformers, text models too.
    `torchvision.ops` stays unusable. Call it before anything imports torchvision; in processes of their own, too.
    """
    import torch

    if util.find_spec("torchvision") is None or "cpu" not in torch.__version__:
        return
    if "cpu" in metadata.version("torchvision") or hasattr(torch.ops.torchvision, "nms"):
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
