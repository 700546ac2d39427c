#!/usr/bin/env bash
# A newcomer's path, timed: install → explain → a plugin of one's own → test it → lock the set.
#
#     docs/newcomer.sh [FOLDER]        # a new one if none is given; nothing outside of it is written
#
# The plugin's files are those that docs/write-a-model-plugin.md shows: this script takes them out of the page.
set -euo pipefail

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
page=$source/docs/write-a-model-plugin.md
folder=${1:-$(mktemp -d)}
limit=600
SECONDS=0

mkdir -p "$folder" && cd "$folder"
export XDG_CONFIG_HOME=$PWD/config XDG_STATE_HOME=$PWD/state
unset PYTHONPATH ${!KVFERRY_*} ${!TRTLLM_USE_*}

run() {
    printf '\n\033[1m[%3d s] $ %s\033[0m\n' "$SECONDS" "$*"
    "$@"
}

take() { # a file, as the page shows it: the first block whose first line names it
    mkdir -p "$(dirname "$1")"
    awk -v name="$1" '
        /^```/ { if (taking) exit; opened = !opened; first = opened; next }
        first  { first = 0; taking = ($0 == "# " name || $0 == "// " name); next }
        taking { print; found = 1 }
        END    { exit !found }' "$page" > "$1"
    echo "wrote $1"
}

echo "== install, in $folder"
run python3 -m venv venv
PATH=$PWD/venv/bin:$PATH
run pip wheel --quiet --no-deps --wheel-dir wheels "$source"
run pip install --quiet -c "$source/constraints.txt" wheels/kvferry-*.whl pytest
run kvferry --version

echo; echo "== explain"
take engine.yaml
take acme-7b/config.json
run kvferry explain --config engine.yaml --model acme-7b

echo; echo "== a plugin of one's own"
take pyproject.toml
take acme_kvferry/__init__.py
run pip install --quiet -e .
run kvferry plugins list
run kvferry plugins show acme
kvferry explain --config engine.yaml --model acme-7b > with-plugin.txt
run grep -A1 -E '^(tokens_per_block|transceiver_runtime):' with-plugin.txt
grep -q 'acme: preference of AcmeForCausalLM' with-plugin.txt

echo; echo "== test it"
take test_acme.py
take test_conformance.py
run pytest -q test_acme.py test_conformance.py

echo; echo "== the same set everywhere, and the other worker"
run kvferry plugins lock
run kvferry plugins verify
run kvferry preflight engine.yaml engine.yaml --model acme-7b

printf '\nDone in %d s; %s holds it all.\n' "$SECONDS" "$folder"
((SECONDS < limit)) || { echo "that is more than $limit s" >&2; exit 1; }
