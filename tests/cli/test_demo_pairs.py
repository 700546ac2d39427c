import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.testing import isolated_registry

BACKENDS = [answer.value for answer in isolated_registry().transfer_backends()]
DECLARED = sorted((runtime, backend.name) for backend in BACKENDS for runtime in backend.runtimes)


@pytest.mark.parametrize(
    ("runtime", "backend", "mapped"),
    [
        *(pytest.param(*pair, False, id="-".join(pair)) for pair in DECLARED),
        pytest.param("CPP", "UCX", True, id="CPP-UCX-MAPPED"),
    ],
)
def test_the_output_equals_aggregated_decoding_on_every_declared_pair(
    tmp_path: Path, runtime: str, backend: str, mapped: bool
) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"cache_transceiver_config: {{kv_transfer_shared_memory: {json.dumps(mapped)}}}")
    arguments = [
        "--backend",
        backend,
        "--runtime",
        runtime,
        "--max-tokens",
        "6",
        "--prompt",
        "The capital of France is",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "kvferry", "demo", "--json", "--config", str(config), *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    transceiver = answer["plan"]["transceiver"]
    assert (transceiver["runtime"], transceiver["backend"]) == (runtime, backend)
    (prompt,) = answer["prompts"]
    assert answer["equal"] is True
    assert prompt["output_token_ids"] == prompt["aggregated_token_ids"]
    assert len(prompt["output_token_ids"]) == 6
    assert prompt["bytes"] > 0
