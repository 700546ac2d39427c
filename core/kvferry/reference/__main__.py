"""``python -m kvferry.reference``: write every generated document of a checkout; ``--check`` only looks."""

import argparse
import sys
from pathlib import Path

from kvferry.reference.documents import outdated, write

MARK = "core/kvferry/reference"
"""What a checkout has and nothing else."""


def main() -> int:
    """Write, or check; exit status 1 where something differs under ``--check``, 2 outside of a checkout."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something differs")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout; the working folder if not given")
    options = parser.parse_args()
    if not (options.root / MARK).is_dir():
        print(f"{options.root.resolve()} is no checkout of kvferry: it has no {MARK}", file=sys.stderr)
        return 2
    for path in (found := list(outdated(options.root)) if options.check else write(options.root)):
        print(f"{path}: {'differs; run `make generated`' if options.check else 'written'}")
    return 1 if options.check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
