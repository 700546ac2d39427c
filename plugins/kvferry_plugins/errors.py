"""Every error that kvferry raises on purpose.

::

    KvferryError
    ├── ConfigError (also a ValueError)      the input is wrong: exit status 2
    │   └── ResolutionError                  several at once, in .blockers
    ├── PluginError
    │   ├── PluginLoadError                  a required plugin is not there, or did not load
    │   ├── PluginConflictError              two plugins of one rank disagree: .plugins
    │   └── HookError                        a hook raised, or answered outside its vocabulary
    ├── BackendUnavailableError              declared, but its library is not installed here
    ├── HandshakeError                       two workers that cannot understand each other: .fields
    ├── TransferError                        one hand-off failed: .request_id, .field, .gone
    │   ├── TransferTimeoutError             (also a TimeoutError) .state says where the time went
    │   ├── TransferCancelledError
    │   └── PeerLostError                    (also a ConnectionError) the peer's process or connection is gone
    ├── ForkedProcessError                   used in a fork of the process that built it: .parent
    ├── CacheFullError                       (also a MemoryError) no block left: .needed, .free, .total
    └── CorruptBlockError                    a block that a lower tier kept came back damaged
"""

from collections.abc import Iterable, Sequence


class KvferryError(Exception):
    """Base of every error that kvferry raises on purpose; its message says what to do next."""


class ConfigError(KvferryError, ValueError):
    """The input is wrong: a file, key, flag or address.

    What to do: mend what the message names, as it says.

    Attributes:
        setting: the dotted key that is to blame, or None where it is a file as a whole.
    """

    def __init__(self, message: str, *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting


class ResolutionError(ConfigError):
    """Several blockers at once, in the order of the resolution's steps.

    What to do: mend all of them; they are numbered.

    Attributes:
        blockers: the errors, each as it would have been raised alone.
    """

    def __init__(self, blockers: Sequence[KvferryError]) -> None:
        lines = "\n".join(f"  {number}. {blocker}" for number, blocker in enumerate(blockers, 1))
        super().__init__(f"{len(blockers)} settings cannot be resolved:\n{lines}")
        self.blockers = tuple(blockers)


class PluginError(KvferryError):
    """Something about a plugin.

    What to do: ``kvferry plugins show NAME`` prints the plugin's state and the whole chain of causes.

    Attributes:
        plugin: the plugin's name.
        distribution: the distribution that brought it, or None.
    """

    def __init__(self, message: str, *, plugin: str | None = None, distribution: str | None = None) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.distribution = distribution


class PluginLoadError(PluginError):
    """A plugin that has to be active is not: unknown, disabled or failed.

    What to do: ``kvferry plugins show NAME`` says which and why; mend it, enable it, or stop asking for it.
    """


class PluginConflictError(PluginError):
    """Two plugins of one rank disagree.

    What to do: write the ``plugins.prefer`` line that the message quotes, or leave one of them out.

    Attributes:
        plugins: the names of those that disagree, sorted.
    """

    def __init__(self, message: str, *, plugins: Iterable[str]) -> None:
        super().__init__(message)
        self.plugins = tuple(sorted(plugins))


class HookError(PluginError):
    """A hook raised, or answered outside its vocabulary.

    What to do: leave the plugin out (``-p no:NAME``) and tell its author; ``kvferry doctor`` finds it before a start.

    Attributes:
        hook: the hook that was asked.
    """

    def __init__(self, message: str, *, hook: str, plugin: str, distribution: str | None = None) -> None:
        super().__init__(message, plugin=plugin, distribution=distribution)
        self.hook = hook


class BackendUnavailableError(KvferryError):
    """A declared backend or runtime cannot be built here; the message says what to install.

    What to do: run the command that the message names, or choose another backend or runtime.
    """


class HandshakeError(KvferryError):
    """The peer was refused: the two workers cannot understand each other.

    What to do: set the fields that the message lists alike on both sides, and restart; ``kvferry preflight`` compares
    them before anything starts.

    Attributes:
        fields: field → (our value, the peer's value), the fatal differences only.
    """

    def __init__(self, message: str, *, fields: dict[str, tuple[object, object]] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})


class TransferError(KvferryError):
    """One hand-off failed; the worker goes on.

    What to do: prefill the request again.

    Attributes:
        request_id: the request, as its engine knows it.
        field: the parameter that is to blame, where it is one.
        gone: the context worker has no such request any more: only another prefill helps.
    """

    def __init__(
        self, message: str, *, request_id: int | None = None, field: str | None = None, gone: bool = False
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.field = field
        self.gone = gone


class TransferTimeoutError(TransferError, TimeoutError):
    """A clock ran out.

    What to do: see where the time went (``state``): to the peer, to the prefill, to the router, or to the transport.

    Attributes:
        state: the session state in which the time went.
    """

    def __init__(self, message: str, *, request_id: int | None = None, state: str = "") -> None:
        super().__init__(message, request_id=request_id)
        self.state = state


class TransferCancelledError(TransferError):
    """Somebody cancelled the request, here or at the peer.

    What to do: nothing.
    """


class PeerLostError(TransferError, ConnectionError):
    """The peer's process or its connection is gone.

    What to do: see whether it runs, and whether our public key is among its ``peers``; prefill the request again.
    """


class ForkedProcessError(KvferryError):
    """A transceiver or an agent, or ``build``, was used in a fork of a process that had built one.

    What to do: start that process with multiprocessing's ``spawn`` or with ``subprocess``, or fork before anything is
    built and build in the child. The parent goes on undisturbed.

    Attributes:
        parent: the process's id that was forked.
        runtime: of what the parent has.
        backend: of what the parent has.
        plugin: the plugin that made it, or None where nobody knows.
        distribution: that plugin's, as printed.
    """

    def __init__(
        self,
        message: str,
        *,
        parent: int,
        runtime: str,
        backend: str,
        plugin: str | None = None,
        distribution: str | None = None,
    ) -> None:
        super().__init__(message)
        self.parent = parent
        self.runtime = runtime
        self.backend = backend
        self.plugin = plugin
        self.distribution = distribution


class CacheFullError(KvferryError, MemoryError):
    """No block left; nothing was changed.

    What to do: retry later; where ``needed`` is above ``total``, raise ``kv_cache_config.max_tokens``.

    Attributes:
        needed: blocks that the call needed.
        free: blocks that it could have had (free, or cached and evictable).
        total: blocks of the pool.
    """

    def __init__(self, message: str, *, needed: int, free: int, total: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.total = total


class CorruptBlockError(KvferryError):
    """A block that a lower tier kept is truncated or fails its checksum; it is forgotten, and never served.

    What to do: nothing, its tokens are computed again; if it comes back, look at the disk.
    """
