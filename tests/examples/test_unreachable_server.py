"""Examples end with one line if they reach no server, as each is tried before the server was started."""

import runpy
import socket
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_no_server(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr("sys.argv", [file.name, "--base-url", url])
    with pytest.raises(SystemExit) as raised:
        runpy.run_path(str(file), run_name="__main__")
    message = raised.value.code if isinstance(raised.value.code, str) else capsys.readouterr().out
    assert message.strip() == f"{url}: Connection error."
