"""What a verb that starts workers tells them of itself, for as long as it runs."""

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from kvferry.registry.door import Registry


def tell_children(registry: "Registry") -> None:
    """Have the workers that this verb starts compare their plugins with ours; see ``kvferry.registry.inheritance``."""
    from kvferry.registry.inheritance import VARIABLE, announce_plugin_set

    before = os.environ.get(VARIABLE)
    announce_plugin_set(registry, os.environ)

    def restore() -> None:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before

    click.get_current_context().call_on_close(restore)
