"""Images: opened under limits, decoded to RGB in one place, converted. Not imported before a dataset has images.

`from posttrain.data.images import shrink`: what is public is imported from its module when it is used.
"""

from typing import Any

_HOMES = {
    "posttrain.data.images.conversion": ("contact_sheet", "shrink", "tile", "to_bytes", "to_rgb"),
    "posttrain.data.images.dataset_columns": ("crop_by_boxes", "embed_images", "images_from_folder", "paths_to_images"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'posttrain.data.images' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME_OF[name]), name)
