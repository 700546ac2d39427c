"""Keeps stdout for a command that runs for long: what plugins and libraries print meanwhile goes to stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def kept_stdout() -> Iterator[TextIO]:
    """Lead descriptor 1 to stderr inside; yields a stream to where it led before."""
    stdout, is_own = sys.stdout, sys.stdout is sys.__stdout__
    if stdout is None or not is_own:  # somebody has another use for it
        yield stdout
        return
    stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield stdout
        return
    with os.fdopen(kept, "w", encoding=stdout.encoding, errors=stdout.errors) as stream:
        os.dup2(2, 1)
        try:
            yield stream
        finally:
            stdout.flush()
            os.dup2(kept, 1)
