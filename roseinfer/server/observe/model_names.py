"""Names of a server's models by the numbers of their engines."""

from bisect import bisect_right


class ModelNames:
    """Name of the model of each engine. The engines of a model have consecutive numbers from `first` on."""

    def __init__(self, name: str) -> None:
        self.names = [name]
        self._firsts = [0]

    def add(self, name: str, first: int) -> None:
        """Add a model whose engines follow those of the models before."""
        assert first > self._firsts[-1], "models are added in the order of their engines"
        self.names.append(name)
        self._firsts.append(first)

    @property
    def several(self) -> bool:
        return len(self.names) > 1

    def of(self, engine: int) -> str:
        return self.names[bisect_right(self._firsts, engine) - 1]
