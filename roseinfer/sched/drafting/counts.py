"""Counts of drafts by proposer and position."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ProposerCounts:
    """Verified drafts of one proposer. `steps`: rows that began with one of them. Index 0 is the first draft of a row.

    Over all proposers, output tokens of these rows = `steps` + the sum of `accepted`: each row also gets the token
    after its last right draft.
    """

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int, first: int = 0) -> None:
        """Count `drafted` drafts of a row, of which the first `accepted` became output. `first`: drafts before them."""
        self.steps += first == 0
        missing = first + drafted - len(self.drafted)
        if missing > 0:
            self.drafted += [0] * missing
            self.accepted += [0] * missing
        for position in range(first, first + drafted):
            self.drafted[position] += 1
        for position in range(first, first + accepted):
            self.accepted[position] += 1
