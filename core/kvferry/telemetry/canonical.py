"""JSON of which one value has one text: what is sent, hashed and compared."""

import hashlib
import json
from typing import Any


def canonical(value: Any) -> str:
    """Write a value as JSON with sorted keys, without spaces, in ASCII. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return ``sha256:…`` of the canonical text."""
    return f"sha256:{hashlib.sha256(canonical(value).encode()).hexdigest()}"
