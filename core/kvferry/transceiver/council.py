"""How the ranks of an instance come to one outcome of a request: each reports its own, rank 0 decides and tells.

Cancelled beats failed beats completed, and completed needs all. The engine of every rank hears the verdict alone.
A report that is not "completed" makes rank 0 tell the others to stop; the verdict follows when all have reported.
"""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvferry.transceiver.channel import Address
from kvferry.transceiver.shared import Shared
from kvferry.transceiver.wire import AnyMessage, Ended, Subject, Verdict
from kvferry_plugins.errors import KvferryError, PeerLostError, TransferCancelledError, TransferError
from kvferry_plugins.types import Outcome, Role, TransferEvent

REMEMBERED = 4096
"""Verdicts that are kept for ranks that are behind, oldest forgotten first."""

ABSENT = "absent"
"""What a rank reports of a request that it has not heard of."""

_WEIGHT: Mapping[str, int] = {ABSENT: 0, "completed": 1, "failed": 2, "cancelled": 3}

Stopper = Callable[[Subject, Outcome, KvferryError], bool]
"""End a request that runs here; False: it is not here."""


class Session(Protocol):
    """A send or a receive."""

    @property
    def subject(self) -> Subject:
        """What the ranks of this instance call it."""


class Colleagues(Protocol):
    """The other ranks, as far as outcomes need them: ``Ranks``."""

    lost: PeerLostError | None

    def send(self, rank: int, message: AnyMessage) -> None:
        """Tell one."""

    def rank_of(self, address: Address) -> int | None:
        """Who is at an address."""


@dataclass(slots=True)
class Case:
    """A request that has ended on some ranks, as rank 0 knows it."""

    deadline: float
    reports: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Rank → outcome and reason."""
    stopped: bool = False
    """The ranks that have not reported were told to end it."""
    overdue: tuple[int, str] | None = None
    """A rank that did not report in time, and what is said of it."""


class Council:
    """One rank's part in it. Belongs to the loop's thread."""

    def __init__(self, shared: Shared, ranks: Colleagues) -> None:
        self._shared = shared
        self._ranks = ranks
        self.stoppers: dict[Role, Stopper] = {}
        self._waiting: dict[Subject, TransferEvent] = {}
        """Ended here, and reported."""
        self._told: OrderedDict[Subject, Verdict] = OrderedDict()
        """Verdicts about requests that this rank has not heard of yet."""
        self._cases: dict[Subject, Case] = {}
        self._decided: OrderedDict[Subject, Verdict] = OrderedDict()
        self._verdicts: Counter[str] = Counter()

    # --- this rank -----------------------------------------------------------------------------------------------

    def report(self, session: Session, event: TransferEvent) -> None:
        """A request ended here: the engine hears of it when it has ended everywhere."""
        if self._alone:
            self._shared.finish(event)
            return
        subject = session.subject
        told = self._told.pop(subject, None)
        if self._ranks.lost is not None:
            self._deliver_lost(event, self._ranks.lost)
        elif told is not None and told.final:
            self._deliver(event, told)
        else:
            self._waiting[subject] = event
            if told is None:  # else "absent" was said of it, and the verdict is under way
                self._say(Ended(subject, event.outcome, str(event.error or "")[:4000]))

    def revoke(self, role: Role, request_id: int, outcome: Outcome, error: KvferryError) -> None:
        """A request that has ended well here, but is not decided, is to end otherwise on all ranks."""
        for subject, event in list(self._waiting.items()):
            if (subject.role, subject.request) == (role.value, request_id) and _weighs(outcome, event.outcome):
                self._waiting[subject] = replace(event, outcome=outcome, error=error, blocks=0, aux=b"")
                self._say(Ended(subject, outcome, str(error)[:4000]))

    def objection(self, session: Session) -> tuple[Outcome, KvferryError] | None:
        """Why a request that begins here is over already, if it is."""
        if self._alone:
            return None
        subject = session.subject
        if self._ranks.lost is not None:
            return "failed", _own(self._ranks.lost, subject)
        told = self._told.get(subject)
        return (_outcome(told), _error(told)) if told is not None else None

    def on_verdict(self, address: Address, verdict: Verdict) -> None:
        """Rank 0 has decided, or wants a request ended here."""
        if self._ranks.rank_of(address) == 0:
            self._apply(verdict)
        else:
            self._shared.counters["misdirected_messages"] += 1

    def _apply(self, verdict: Verdict) -> None:
        subject = verdict.subject
        if subject in self._waiting:
            if verdict.final:
                self._deliver(self._waiting.pop(subject), verdict)
            return
        if verdict.outcome == "completed":
            self._shared.counters["late_verdicts"] += 1
            return
        known = subject in self._told
        _remember(self._told, subject, verdict)
        stop = self.stoppers.get(Role(subject.role)) if subject.role in list(Role) else None
        is_here = not known and stop is not None and self._stop_here(stop, verdict)
        if not is_here and not verdict.final:
            self._say(Ended(subject, ABSENT))

    def _stop_here(self, stop: Stopper, verdict: Verdict) -> bool:
        """End what runs here; its report is answered by the verdict at once if that is final."""
        if not verdict.final:
            del self._told[verdict.subject]
        if stop(verdict.subject, _outcome(verdict), _error(verdict)):
            return True
        _remember(self._told, verdict.subject, verdict)
        return False

    def _deliver(self, event: TransferEvent, verdict: Verdict) -> None:
        self._verdicts[verdict.outcome] += 1
        if event.outcome != verdict.outcome:
            event = replace(event, outcome=_outcome(verdict), error=_error(verdict), blocks=0, aux=b"")
        self._shared.finish(event)

    def _deliver_lost(self, event: TransferEvent, error: PeerLostError) -> None:
        if event.outcome == "completed":
            subject = Subject(event.role.value, event.request_id, bytes(16))
            event = replace(event, outcome="failed", error=_own(error, subject), blocks=0, aux=b"")
        self._shared.finish(event)

    def lose(self, error: PeerLostError) -> None:
        """A rank is lost, and with it every verdict that was not spoken."""
        self._cases.clear()
        waiting, self._waiting = self._waiting, {}
        for event in waiting.values():
            self._deliver_lost(event, error)

    # --- rank 0 --------------------------------------------------------------------------------------------------

    def _say(self, ended: Ended) -> None:
        world = self._shared.world
        assert world is not None
        if world.rank == 0:
            self._hear(0, ended)
        else:
            self._ranks.send(0, ended)

    def on_ended(self, address: Address, ended: Ended) -> None:
        """A rank's report."""
        rank = self._ranks.rank_of(address)
        if rank is None or self._shared.world is None or self._shared.world.rank != 0 or ended.outcome not in _WEIGHT:
            self._shared.counters["misdirected_messages"] += 1
        else:
            self._hear(rank, ended)

    def _hear(self, rank: int, ended: Ended) -> None:
        decided = self._decided.get(ended.subject)
        if decided is not None:
            self._shared.counters["late_reports"] += 1
            self._tell(rank, decided)
            return
        case = self._cases.setdefault(ended.subject, Case(self._shared.now() + self._patience))
        if rank in case.reports and not _weighs(ended.outcome, case.reports[rank][0]):
            self._shared.counters["doubled_reports"] += 1
            return
        case.reports[rank] = (ended.outcome, ended.reason)
        if ended.outcome == ABSENT:
            self._shared.counters["absent_reports"] += 1
        if not self._decide(ended.subject, case) and _WEIGHT[ended.outcome] > _WEIGHT["completed"]:
            self._stop_others(
                ended.subject, case, Verdict(ended.subject, ended.outcome, rank, ended.reason, final=False)
            )

    def _decide(self, subject: Subject, case: Case) -> bool:
        """Speak the verdict once every rank has reported."""
        if len(case.reports) < self._size:
            return False
        rank, (outcome, reason) = max(case.reports.items(), key=lambda item: _WEIGHT[item[1][0]])  # the first of equals
        if case.overdue is not None and outcome != "cancelled":
            outcome, (rank, reason) = "failed", case.overdue
        verdict = Verdict(subject, outcome, rank, reason)
        self._cases.pop(subject, None)
        _remember(self._decided, subject, verdict)
        for each in range(self._size):
            self._tell(each, verdict)
        return True

    def _stop_others(self, subject: Subject, case: Case, verdict: Verdict) -> None:
        """Have the ranks end it that have not said how it ended."""
        if not case.stopped:
            case.stopped = True
            for rank in [rank for rank in range(self._size) if rank not in case.reports]:
                self._tell(rank, verdict)

    def _tell(self, rank: int, verdict: Verdict) -> None:
        if rank == 0:
            self._apply(verdict)
        else:
            self._ranks.send(rank, verdict)

    def tick(self) -> None:
        """Rank 0: end the requests that some rank never began."""
        now = self._shared.now()
        for subject, case in list(self._cases.items()):
            if not case.stopped and now >= case.deadline:
                late = next(rank for rank in range(self._size) if rank not in case.reports)
                case.overdue = late, "it did not say how the request ended; does its engine run the same requests?"
                self._stop_others(subject, case, Verdict(subject, "failed", *case.overdue, final=False))

    # --- for all -------------------------------------------------------------------------------------------------

    @property
    def _alone(self) -> bool:
        return self._shared.world is None or self._shared.world.alone

    @property
    def _size(self) -> int:
        assert self._shared.world is not None
        return len(self._shared.world.members)

    @property
    def _patience(self) -> float:
        """From the first report to the last: as long as a rank that began at that moment may take."""
        clocks = self._shared.clocks
        return 2 * clocks.admission + (clocks.transfer if clocks.transfer is not None else float("inf"))

    @property
    def watched(self) -> bool:
        """Whether a clock runs."""
        return bool(self._cases)

    def shutdown(self) -> None:
        """Deliver what nobody will decide any more."""
        self.lose(PeerLostError("this worker is shutting down, before the other ranks agreed"))

    def dump(self) -> dict[str, object]:
        """Plain values for ``status_dump``."""
        now = self._shared.now()
        return {
            "waiting": [
                {"request_id": event.request_id, "role": event.role.value, "here": event.outcome}
                for event in list(self._waiting.values())
            ],
            "cases": [
                {
                    "request_id": subject.request,
                    "role": subject.role,
                    "reports": {str(rank): outcome for rank, (outcome, _) in sorted(dict(case.reports).items())},
                    "stopped": case.stopped,
                    "seconds_left": round(case.deadline - now, 3) if case.deadline != float("inf") else None,
                }
                for subject, case in list(self._cases.items())
            ],
            "told_early": len(self._told),
            "verdicts": dict(self._verdicts),
        }


def _weighs(outcome: str, former: str) -> bool:
    """Whether an outcome overrules a former one of the same rank."""
    return _WEIGHT[outcome] > _WEIGHT[former] > _WEIGHT[ABSENT]


def _remember(known: OrderedDict[Subject, Verdict], subject: Subject, verdict: Verdict) -> None:
    known[subject] = verdict
    while len(known) > REMEMBERED:
        known.popitem(last=False)


def _outcome(verdict: Verdict) -> Outcome:
    return "cancelled" if verdict.outcome == "cancelled" else "failed" if verdict.outcome == "failed" else "completed"


def _error(verdict: Verdict) -> TransferError:
    """What the engine hears of an end on another rank."""
    kind = TransferCancelledError if verdict.outcome == "cancelled" else TransferError
    number = verdict.subject.request
    message = (
        f"request {number} was {verdict.outcome}" if verdict.outcome == "cancelled" else f"request {number} failed"
    )
    return kind(f"{message} on rank {verdict.rank}: {verdict.reason}", request_id=number)


def _own(error: PeerLostError, subject: Subject) -> PeerLostError:
    """The same error for one request."""
    own = copy.copy(error)
    own.request_id = subject.request
    return own
