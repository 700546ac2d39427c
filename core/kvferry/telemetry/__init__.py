"""What of a plan may be told to others: categories, booleans and numbers that a committed manifest allows.

Nothing here sends anything. A plugin's ``plan_resolved`` may call ``capture`` and send what it returns.
"""

from kvferry.telemetry.capture import Capture, capture
from kvferry.telemetry.manifest import Manifest, committed_manifest

__all__ = ["Capture", "Manifest", "capture", "committed_manifest"]
