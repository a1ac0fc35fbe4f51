import pytest

from tests.serve.served_app import Served
from tests.serve.serving import Rig


@pytest.fixture
def rig():
    """Makes rigs, and stops their threads afterwards."""
    made = []

    def make(**options):
        made.append(Rig(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def served():
    """Makes applications, and closes their servers afterwards."""
    made = []

    def make(**options):
        made.append(Served(**options))
        return made[-1]

    yield make
    for one in made:
        one.server.close()
