"""Runs the python blocks of one page in one namespace: JSON in by stdin, JSON out by the descriptor in argv[1]."""

import json
import os
import sys
import traceback


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        namespace = {"__name__": "__page__"}
        sys.path.insert(0, os.getcwd())
        for line in sys.stdin:
            block = json.loads(line)
            error = None
            try:
                exec(compile("\n" * block["line"] + block["code"], block["page"], "exec"), namespace)
            except BaseException:
                error = traceback.format_exc()
            print(json.dumps({"error": error}), file=answers, flush=True)


if __name__ == "__main__":
    main()
