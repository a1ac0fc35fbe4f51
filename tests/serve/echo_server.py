"""Our server around the engine without a model: `PYTHON tests/serve/echo_server.py --model echo ...`, with the server's arguments.

As `PYTHON posttrain/serve` the folder is imported as a package of its own, so this needs no posttrain in the environment.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "posttrain" / "serve"


def launch_of_the_folder():
    spec = importlib.util.spec_from_file_location("serve_main", FOLDER / "__main__.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    launch = main._as_package(FOLDER)
    for name, module in list(sys.modules.items()):  # what the engine of the tests imports are the server's own classes
        if name.partition(".")[0] == main.PACKAGE:
            sys.modules[name.replace(main.PACKAGE, "posttrain.serve", 1)] = module
    return launch


def serve(launch, arguments):
    """Until it is stopped; its exit status."""
    from tests.serve.echo_engine import EchoEngine, numbered_weights

    launch.make_engine = lambda args: EchoEngine(numbered_weights(args.initial_version), **args.engine_args)
    return launch.main(arguments)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(serve(launch_of_the_folder(), sys.argv[1:]))
