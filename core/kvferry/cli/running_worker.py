"""Asks a running worker for its own plan, plugins and state, over HTTP."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvferry_plugins.errors import ConfigError, KvferryError

if TYPE_CHECKING:
    from kvferry_plugins.types import Plan


def ask_status(address: str, *, named: str = "--worker") -> dict[str, Any]:
    """Fetch ``/status``.

    Args:
        address: ``http://HOST:PORT`` as the worker's ready line has it, or ``HOST:PORT``.
        named: what the operator gave it as, for errors.

    Raises:
        ConfigError: that is no address.
        KvferryError: nobody answers there, or not as a worker does.
    """
    from http.client import HTTPException, InvalidURL

    from kvferry.cli.bounded_fetch import fetch

    url = _status_url(address, named)
    try:
        status = json.loads(fetch(url))
        status["plan"]["decisions"], status["transceiver"], status["plugins"]
    except InvalidURL as error:
        raise _no_address(address, named, error) from error
    except ConnectionError as error:
        raise KvferryError(f"no worker answers at {url}: {error}; is it still running?") from error
    except (HTTPException, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise KvferryError(f"what answers at {url} is no kvferry worker: {error!r:.300}") from error
    result: dict[str, Any] = status
    return result


@contextmanager
def reading(*addresses: str) -> Iterator[None]:
    """Read what workers said: what makes no sense is theirs, not this command's. Raises KvferryError, naming them."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if not addresses:
            raise
        message = (
            f"the worker at {' or at '.join(addresses)} describes itself as no version does that this kvferry knows"
        )
        raise KvferryError(f"{message}: {error!r:.300}; compare it with the kvferry that it runs") from error


def _status_url(address: str, named: str) -> str:
    """Raises ConfigError for what can be no address."""
    from urllib.parse import urlsplit

    url = f"{address if '://' in address else f'http://{address}'}".rstrip("/") + "/status"
    try:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.port == 0:
            raise ValueError("scheme, host or port is missing")
        parts.hostname.encode("idna")
    except ValueError as error:
        raise _no_address(address, named, error) from error
    return url


def _no_address(address: str, named: str, error: Exception) -> ConfigError:
    return ConfigError(f"{named} {address!r} is no http://HOST:PORT, as a worker's ready line has it: {error}")


def plan_of(status: Mapping[str, Any]) -> "Plan":
    """Rebuild the plan from a worker's status, as far as an explanation needs it."""
    from kvferry_plugins.types import Candidate, Decision, Plan, Providers

    plain = status["plan"]
    decisions = tuple(
        Decision(**{**each, "candidates": tuple(Candidate(**candidate) for candidate in each["candidates"])})
        for each in plain["decisions"]
    )
    return Plan(
        architecture=plain["model"]["architecture"],
        execution_architecture=plain["model"]["execution_architecture"],
        decisions=decisions,
        effective=plain["effective"],
        manager=plain["kv_cache_manager"],
        backend=plain["transceiver"]["backend"],
        runtime=plain["transceiver"]["runtime"],
        providers=Providers(**plain["providers"]),
        warnings=tuple(plain["warnings"]),
    )


def print_state(status: Mapping[str, Any]) -> None:
    """Print what goes on in a worker: a line a fact, then the transceiver's own words."""
    state = "ready" if status["ready"] else f"not ready: {status['not_ready']}"
    click.echo(f"\nworker       {status['role']}, {state}")
    click.echo(f"plugins      {', '.join(f'{name} ({origin})' for name, origin in status['plugins'].items())}")
    if status.get("parent"):
        click.echo(f"parent       process {status['parent']['pid']}, {_inherited(status['parent']['plugins'])}")
    click.echo(f"jobs         {_pairs(status['engine'])}")
    for number, group in enumerate(status["manager"]["groups"]):
        click.echo(f"blocks       group {number}: {_pairs(group)}")
    click.echo(f"transfers    {json.dumps(status['transceiver'], indent=1)}")


def _inherited(plugins: Any) -> str:
    if plugins == "same":
        return "with the same plugins"
    named = (
        f"{each['plugin']}: {each['parent'] or 'not on'} there, {each['here'] or 'not on'} here" for each in plugins
    )
    return f"with other plugins ({'; '.join(named)})"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
