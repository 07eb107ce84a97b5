"""An engine's runner whose model several processes share: this one, as rank 0, and those of the other ranks."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from roseinfer.core.config.engine import EngineConfig
from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.make import make_group
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.shared_store import SharedStore
from roseinfer.ranks.boot import RankBoot
from roseinfer.ranks.leader import end_on_loss
from roseinfer.ranks.others import OtherRanks
from roseinfer.runner.build import BuiltRunner, build_runner
from roseinfer.runner.device import rank_device


def build_led(config: EngineConfig, folder: Path, others: OtherRanks) -> tuple[BuiltRunner, LiveGroup]:
    """Rank 0's part and its group, for a `LeadingRunner`, and have `others`, which have been started, build theirs.
    They are closed if this fails.

    Raises what `build_runner` raises, of whichever rank.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(others.close)
        others.boot(config, folder)
        try:
            others.await_here()
            group = others.join(lambda: _group(config, SharedStore(others.store, others.go_on), others.name, 0))
            undo.callback(group.close)
            end_on_loss(others, group, starts=True)
            built = build_runner(config, folder, group)
            end_on_loss(others, group)
            others.started()
        except Exception as error:
            reason = others.failure_behind(error)
            if reason is error:
                raise
            raise reason from error
        undo.pop_all()
    return built, group


def build_rank(boot: RankBoot, say_here: Callable[[], None]) -> tuple[BuiltRunner, LiveGroup]:
    """The part of another rank, and its group. `say_here` is called when it is about to join that."""
    group = _group(boot.config, SharedStore(boot.store), boot.group, boot.rank, say_here)
    return build_runner(boot.config, Path(boot.folder), group), group


def _group(
    config: EngineConfig, store: SharedStore, name: str, rank: int, before: Callable[[], None] = lambda: None
) -> LiveGroup:
    size = config.model.tensor_parallel_size
    device = rank_device(config.model.device, rank, size)
    before()
    return make_group(Rendezvous(store, name, rank, size), device)
