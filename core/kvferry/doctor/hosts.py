"""Which endpoints are on this machine alone."""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit


def beyond_loopback(endpoints: Iterable[str]) -> tuple[str, ...]:
    """Return the endpoints that are not on loopback."""
    return tuple(endpoint for endpoint in endpoints if not is_loopback(endpoint))


def is_loopback(endpoint: str) -> bool:
    """Tell whether ``tcp://HOST:PORT`` is reached from this machine alone. Names are not looked up."""
    host = host_of(endpoint)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_unspecified(endpoint: str) -> bool:
    """Tell whether the host is ``0.0.0.0`` or ``::``, where one can listen and not connect."""
    try:
        return ipaddress.ip_address(host_of(endpoint)).is_unspecified
    except ValueError:
        return host_of(endpoint) == "*"


def host_of(endpoint: str) -> str:
    """Return the host in lower case, without brackets; empty where there is none."""
    try:
        return (urlsplit(endpoint).hostname or "").partition("%")[0]
    except ValueError:
        return ""
