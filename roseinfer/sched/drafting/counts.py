"""Counts of drafts by proposer and position."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ProposerCounts:
    """Verified drafts of one proposer. `steps`: rows that verified any. Index 0 is the first draft of a row.

    Output tokens of these rows = `steps` + the sum of `accepted`: each row also gets the token behind its last right
    draft.
    """

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count a row with `drafted` drafts, of which the first `accepted` became output."""
        self.steps += 1
        missing = drafted - len(self.drafted)
        if missing > 0:
            self.drafted += [0] * missing
            self.accepted += [0] * missing
        for position in range(drafted):
            self.drafted[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1
