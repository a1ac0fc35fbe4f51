"""Start the server: `PYTHON path/to/posttrain/serve --model FOLDER --port 8000`.

Run as a folder, in an environment that need not have posttrain: the folder is imported as a package of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "posttrain_serve"


def _as_package(folder: Path) -> ModuleType:
    """This folder as the package `posttrain_serve`. Its own files must not be found as top-level modules."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.launch")


if __name__ == "__main__":
    sys.exit(_as_package(Path(__file__).resolve().parent).main())
