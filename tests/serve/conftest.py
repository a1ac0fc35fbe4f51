import pytest

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
