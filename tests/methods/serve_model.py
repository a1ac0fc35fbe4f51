"""`python tests/methods/serve_model.py ARGUMENTS`: the server of `model_server.py` as a program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.methods.model_server import main

if __name__ == "__main__":
    main(sys.argv[1:])
