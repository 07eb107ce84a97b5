"""Tables of docs/reference/support.md against the data that `roseinfer doctor` and the errors at start use."""

from pathlib import Path

from roseinfer.core.support import GPU_FEATURES, GPU_GENERATIONS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"


def table(head: str) -> list[list[str]]:
    """Return the rows of the table whose first cell is `head`."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |")) + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_generations_of_gpus() -> None:
    assert table("generation") == [
        [
            one.name,
            ", ".join(f"{major}.{minor}" for major, minor in one.capabilities),
            one.examples,
            one.tested or "no",
        ]
        for one in GPU_GENERATIONS
    ]


def test_features_of_gpus() -> None:
    expected = []
    for feature in GPU_FEATURES:
        cells = []
        for generation in GPU_GENERATIONS:
            runs = {feature.runs_on(capability) for capability in generation.capabilities}
            assert len(runs) == 1, "a column of the table cannot say that only some GPUs of a generation have it"
            cells.append("yes" if runs.pop() else "no")
        expected.append([feature.name, *cells])
    assert table("feature") == expected
