"""What turns plugins on and off: layers, lowest first, each with where it comes from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvferry_plugins.errors import ConfigError

USER, PROJECT, CONFIGURATION, ENVIRONMENT, FLAG = "user", "project", "configuration", "environment", "flag"


@dataclass(frozen=True, slots=True)
class Layer:
    """The toggles of one file, variable or flag."""

    source: str
    """How it is named to the operator: a path, a variable, a flag as written."""
    enable: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    prefer: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    external_only: tuple[str, ...] | None = None
    """If not None: the external plugins that stay; all other external ones leave."""
    kind: str = ""
    """``user``, ``project``, ``configuration``, ``environment`` or ``flag``."""

    @property
    def is_flag(self) -> bool:
        """A flag's unknown name is an error even in a disable; what it enables ranks as injected."""
        return self.kind == FLAG


@dataclass(frozen=True, slots=True)
class Toggles:
    """All layers, lowest first; the last one that speaks of a plugin decides."""

    layers: tuple[Layer, ...] = ()
    strict: bool = False
    """Whether any plugin that fails is fatal."""


def flag_layers(flags: Sequence[str]) -> tuple[Layer, ...]:
    """Read the values of ``-p``, in their order: ``NAME``, ``module:X``, ``distribution:NAME`` or ``no:NAME``."""
    return tuple(_flag_layer(flag.strip()) for flag in flags)


def _flag_layer(flag: str) -> Layer:
    prefix, colon, rest = flag.partition(":")
    if not flag or (colon and not rest.strip()):
        raise ConfigError(f"-p {flag!r} names no plugin; write -p NAME, -p module:MODULE or -p no:NAME", setting="-p")
    if prefix == "no" and colon:
        return Layer(f"-p {flag}", disable=(rest.strip(),), kind=FLAG)
    return Layer(f"-p {flag}", enable=(flag,), kind=FLAG)


def environment_layers(environ: Mapping[str, str]) -> tuple[Layer, ...]:
    """Read KVFERRY_DISABLE_PLUGIN_AUTOLOAD, KVFERRY_PLUGINS and KVFERRY_DISABLE_PLUGINS, in that order."""
    layers = []
    if environ.get("KVFERRY_DISABLE_PLUGIN_AUTOLOAD", "").strip() == "1":
        layers.append(Layer("KVFERRY_DISABLE_PLUGIN_AUTOLOAD=1", external_only=(), kind=ENVIRONMENT))
    if "KVFERRY_PLUGINS" in environ:
        layers.append(Layer("KVFERRY_PLUGINS", external_only=_names(environ["KVFERRY_PLUGINS"]), kind=ENVIRONMENT))
    disabled = _names(environ.get("KVFERRY_DISABLE_PLUGINS", ""))
    if disabled:
        layers.append(Layer("KVFERRY_DISABLE_PLUGINS", disable=disabled, kind=ENVIRONMENT))
    return tuple(layers)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
