import numpy as np
import pytest

from kvferry.bench.memcpy import Copier

PIECES, PIECE = 64, 4096


@pytest.fixture
def copier():
    copier = Copier(PIECES * PIECE, PIECE)
    copier.source[:] = np.random.default_rng(1).integers(0, 256, PIECES * PIECE, dtype=np.uint8)
    copier.destination[:] = 0
    return copier


def test_a_whole_copy_takes_all_bytes(copier):
    assert copier.write() > 0
    assert (copier.destination == copier.source).all()


def test_a_block_is_copied_alone(copier):
    copier.write_one_block()
    assert (copier.destination[:PIECE] == copier.source[:PIECE]).all()
    assert not copier.destination[PIECE:].any()


def test_pieces_in_order_stay_where_they_are(copier):
    copier.write_pieces(PIECES)
    assert (copier.destination == copier.source).all()


def test_shuffled_pieces_go_from_one_permutation_to_another(copier):
    copier.write_pieces(PIECES, seed=5)
    generator = np.random.default_rng(5)
    sources, destinations = generator.permutation(PIECES), generator.permutation(PIECES)
    expected = np.empty((PIECES, PIECE), dtype=np.uint8)
    expected[destinations] = copier.source.reshape(PIECES, PIECE)[sources]
    assert (copier.destination.reshape(PIECES, PIECE) == expected).all()
