"""The process of a rank that has no model and imports no torch: it does what MODEL says. Run with -m, as a real one.

babbles: says what is no message; fails: a typed error; breaks: any other; lingers: as breaks, but its process does not
end; dies: ends without a word before it is told anything; stays: never ends.
"""

import os
import sys
import time

import msgspec

from roseinfer.core.errors import ConfigError
from roseinfer.ranks.boot import RankBoot, RankSays, last_words
from roseinfer.ranks.process import _say
from roseinfer.ranks.ring import RingReader

MODULE = "tests.helpers.acting_rank"


def main() -> int:
    if sys.stdin.buffer.peek(1)[:1] == b"":
        return 1
    boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankBoot)
    act = boot.config.model.model
    if act == "babbles":
        os.write(boot.status, b"what?\n")
        return 1
    if act == "fails":
        _say(boot, last_words(ConfigError("max_model_len is too much for this rank")))
        return 1
    if act in ("breaks", "lingers"):
        _say(boot, last_words(RuntimeError("no more")))
        time.sleep(600 if act == "lingers" else 0)
        return 1
    _say(boot, RankSays(here=True))
    if act == "stays":
        time.sleep(600)
    if act == "dies":
        time.sleep(0.3)
        os.kill(os.getpid(), 9)
    with RingReader(boot.ring, boot.bell, boot.rank - 1, boot.size - 1, boot.ring_bytes, 0.0) as ring:
        while ring.read()[0] != 4:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
