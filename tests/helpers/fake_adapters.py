"""LoRA adapters of the fake runner: folders that take some calls to read, and slots that are checked."""

from collections.abc import Mapping
from hashlib import sha256

from roseinfer.core.adapters import Adapter, AdapterPool, AdapterRead
from roseinfer.core.plan import StepPlan
from roseinfer.sched.adapters import AdapterSlots

SIZE = 100  # bytes of an adapter
READ_S = 0.05


def adapter(name: str, rank: int = 8, path: str | None = None) -> Adapter:
    """Return an adapter; its folder has its name, and its content too."""
    return Adapter(name, sha256(name.encode()).hexdigest(), path or f"/adapters/{name}", rank, SIZE)


class FakeAdapterFiles:
    """Folders by path, each with its adapter or an error. `host`: digests in host memory.

    A read is done at the `calls`-th call of `take_read` after it. Folders that are not in `folders` hold what their
    last part says.
    """

    def __init__(self, calls: int = 2, folders: Mapping[str, Adapter | str] | None = None) -> None:
        self.calls, self.folders = calls, dict(folders or {})
        self.host: set[str] = set()
        self.read_paths: list[str] = []
        self._pending: list[tuple[str, str, int]] = []

    def read(self, name: str, path: str) -> None:
        self.read_paths.append(path)
        self._pending.append((name, path, self.calls))

    def take_read(self) -> list[AdapterRead]:
        waited = [(name, path, left - 1) for name, path, left in self._pending]
        self._pending = [read for read in waited if read[2] > 0]
        done = []
        for name, path, _ in [read for read in waited if read[2] <= 0]:
            found = self.folders.get(path, adapter(path.rpartition("/")[2]))
            if isinstance(found, Adapter):
                self.host.add(found.digest)
                done.append(AdapterRead(name, path, READ_S, found))
            else:
                done.append(AdapterRead(name, path, READ_S, error=found))
        return done

    def forget(self, digest: str) -> None:
        self.host.remove(digest)


def make_slots(
    files: FakeAdapterFiles, num_slots: int = 2, host: int = 100, pinned: tuple[Adapter, ...] = ()
) -> AdapterSlots:
    """Return the scheduler's side. `host`: adapters that fit into host memory. `pinned`: they are there already."""
    files.host |= {each.digest for each in pinned}
    return AdapterSlots(AdapterPool(num_slots, 16, SIZE, SIZE / 0.002), files, host * SIZE, pinned)


class FakeAdapterSlots:
    """Slots of the fake runner. A slot that is being loaded holds nothing until its step is collected."""

    def __init__(self, files: FakeAdapterFiles, num_slots: int) -> None:
        self.held: list[str | None] = [None] * num_slots
        self._files = files
        self._of_seats: dict[int, tuple[int, str]] = {}  # slot and adapter
        self._in_flight: dict[int, set[int]] = {}  # slots that rows use, by step

    def submit(self, plan: StepPlan) -> dict[int, str]:
        """Begin the loads of a plan, and return the adapters of its seats, those of earlier plans included."""
        for seat in plan.released:
            self._of_seats.pop(seat, None)
        for slot, digest in plan.adapter_loads:
            assert digest in self._files.host, "an adapter is loaded from host memory"
            assert not any(slot in slots for slots in self._in_flight.values()), "a row in flight uses the slot"
            self.held[slot] = None
        for admission in plan.admitted:
            if admission.adapter_slot >= 0:
                held = self.held[admission.adapter_slot]
                assert held is not None, "the slot is empty or being loaded"
                self._of_seats[admission.seat] = admission.adapter_slot, held
        used = [self._of_seats[row.seat] for row in plan.rows if row.seat in self._of_seats]
        assert all(self.held[slot] == digest for slot, digest in used), "another adapter is in the slot"
        self._in_flight[plan.step] = {slot for slot, _ in used}
        return {seat: digest for seat, (_, digest) in self._of_seats.items()}

    def collect(self, plan: StepPlan) -> None:
        del self._in_flight[plan.step]
        for slot, digest in plan.adapter_loads:
            self.held[slot] = digest
