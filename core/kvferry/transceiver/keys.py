"""This user's CURVE key: who can read the file is the same user, and that is what loopback trusts."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from kvferry.folders import xdg_folder
from kvferry_plugins.errors import ConfigError

KEY_FILE_VARIABLE = "KVFERRY_CURVE_KEY_FILE"


@dataclass(frozen=True, slots=True)
class CurveKey:
    """A Z85 key pair, 40 characters each."""

    public: str
    secret: str = field(repr=False)


def key_path() -> Path:
    """``$KVFERRY_CURVE_KEY_FILE``, else ``$XDG_STATE_HOME/kvferry/curve.key``."""
    named = os.environ.get(KEY_FILE_VARIABLE)
    if named:
        return Path(named)
    return xdg_folder(os.environ, "XDG_STATE_HOME", ".local/state") / "curve.key"


def load_or_make_key(path: Path | None = None) -> CurveKey:
    """Read this user's key pair; make it on first use, readable by the user alone.

    Raises:
        ConfigError: the file cannot be read or written, others may read it, or it holds no key pair.
    """
    path = path or key_path()
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} can be read by others: chmod 600 it, or delete it to get a new key")
        public, secret = path.read_text("ascii").split()
        if zmq.curve_public(secret.encode()).decode() != public:
            raise ValueError("the two keys are no pair")
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the control channel's key file {path} cannot be read or made: {error.strerror or error}; "
            f"set XDG_STATE_HOME or {KEY_FILE_VARIABLE} to a place you may write"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"the control channel's key file {path} holds no key pair: delete it to get a new one"
        ) from error
    return CurveKey(public, secret)


def _make(path: Path) -> None:
    """Write a new pair; of two processes that do this at once, one wins and both read the same file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    public, secret = zmq.curve_keypair()
    handle, draft = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(public + b"\n" + secret + b"\n")
        os.link(draft, path)  # fails, unlike rename, if the other process was first
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
