"""A model plugin that answers what a test says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry_plugins import hookimpl


class FakeModelPlugin:
    """Facts about one architecture, as an instance that can be injected.

    The runtime and the defaults are handed out as given, right or wrong: whoever asks must check them.

    Attributes:
        name: what the plugin is called; None lets ``isolated_registry`` call it ``fake-1``, ``fake-2``, …
    """

    def __init__(
        self,
        architecture: str,
        *,
        runtime: Any = None,
        defaults: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.architecture = architecture
        self.runtime = runtime
        self.defaults = defaults
        self.name = name

    def __repr__(self) -> str:
        return f"FakeModelPlugin({self.architecture!r}, runtime={self.runtime!r}, defaults={self.defaults!r})"

    @hookimpl
    def preferred_transceiver_runtime(self, architecture: str) -> Any:
        """Answer with the runtime, for this architecture alone."""
        return self.runtime if architecture == self.architecture else None

    @hookimpl
    def model_defaults(self, architecture: str) -> Mapping[str, Any] | None:
        """Answer with the defaults, for this architecture alone."""
        return self.defaults if architecture == self.architecture else None

    def write_module(self, folder: Path, name: str | None = None) -> Path:
        """Write this plugin as ``NAME.py``, for ``-p NAME`` with the folder on ``PYTHONPATH``.

        Args:
            folder: where the module goes.
            name: the module's, and so the plugin's, name; by default this plugin's own.

        Raises:
            ValueError: neither the plugin nor the call has a name.
        """
        name = name or self.name
        if name is None:
            raise ValueError("write_module needs a name: pass one, or give the plugin one")
        path = folder / f"{name}.py"
        path.write_text(_MODULE.format(fake=repr(self)), encoding="utf-8")
        return path


_MODULE = '''"""Written by FakeModelPlugin.write_module."""

from kvferry_plugins.testing import FakeModelPlugin

_fake = {fake}
preferred_transceiver_runtime = _fake.preferred_transceiver_runtime
model_defaults = _fake.model_defaults
'''
