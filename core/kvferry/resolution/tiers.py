"""Whether the manager that was chosen does anything with the sizes of the tiers."""

from kvferry.config import EngineArgs
from kvferry.resolution.defaults import ModelDefaults
from kvferry.resolution.manager import ManagerChoice
from kvferry.resolution.rules import cache_setting
from kvferry.resolution.vocabulary import DISK_SIZE, HOST_SIZE, MANAGER
from kvferry_plugins.errors import ConfigError


def check_tiers(args: EngineArgs, defaults: ModelDefaults, manager: ManagerChoice) -> tuple[str, ...]:
    """Return a warning where tiers are configured and the manager has none.

    Raises:
        ConfigError: the user wrote both, the tiers and the manager.
    """
    if manager.provider.value.tiers:
        return ()
    sizes = [setting for setting in (HOST_SIZE, DISK_SIZE) if cache_setting(args, defaults, setting)]
    if not sizes:
        return ()
    written = [setting for setting in sizes if setting not in defaults.values]
    if written and manager.decision.source == "user":
        value = str(manager.decision.value).lower()
        raise ConfigError(
            f"{written[0]!r} needs a manager with tiers below the device, and {MANAGER} is {value}: {manager.name} has "
            f"none; set {MANAGER} to {str(not manager.decision.value).lower()}, or leave {' and '.join(written)} out",
            setting=written[0],
        )
    what = f"{' and '.join(sizes)} {'is' if len(sizes) == 1 else 'are'} of no use"
    return (f"{what}: manager {manager.name} has no tiers below the device; set {MANAGER} to true",)
