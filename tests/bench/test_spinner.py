import threading
import time

import pytest

from kvferry.bench.processes import Child
from kvferry.bench.spinner import Spinner


@pytest.mark.parametrize("locked", [True, False])
def test_it_spins_only_while_it_is_on(locked):
    before = threading.active_count()
    spinner = Spinner()
    spinner.turn(True, locked=locked)
    begun = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - begun > 0.02
    spinner.turn(False)
    assert threading.active_count() == before


def test_in_a_process_of_its_own_it_ends_with_its_input():
    with Child("kvferry.bench.spinner") as child:
        assert child.ask("spin", on=True, locked=True) == {}
        process = child.process
    assert process.returncode == 0
