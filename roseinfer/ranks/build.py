"""Build the runner of an engine whose model several processes share: rank 0's part, and those of the other ranks."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roseinfer.core.adapters import AdapterRead
from roseinfer.core.config.engine import EngineConfig
from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.make import make_group
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.shared_store import SharedStore
from roseinfer.ranks.adapters import LeadingAdapters
from roseinfer.ranks.boot import RankBoot
from roseinfer.ranks.leader import exit_on_loss
from roseinfer.ranks.other_ranks import OtherRanks
from roseinfer.runner.build import BuiltRunner, build_runner
from roseinfer.runner.device import rank_device


def build_leader(config: EngineConfig, folder: Path, others: OtherRanks) -> tuple[BuiltRunner, LiveGroup]:
    """Build rank 0's part and its group, for a `LeadingRunner`, while `others` build theirs.

    `others` have been started; they are closed if this fails. Raises what `build_runner` raises on any rank.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(others.close)
        others.boot(config, folder)
        try:
            others.await_ready_to_join()
            store = SharedStore(others.store, others.check_open)
            group = others.join(lambda: _join_group(config, store, others.name, 0))
            undo.callback(group.close)
            exit_on_loss(others, group, starting=True)
            built = build_runner(config, folder, group)
            exit_on_loss(others, group)
            others.mark_started()
            if built.adapters is not None:
                built = replace(built, adapters=LeadingAdapters(built.adapters, others))
        except Exception as error:
            cause = others.cause_of(error)
            if cause is error:
                raise
            raise cause from error
        undo.pop_all()
    return built, group


def build_rank(
    boot: RankBoot, report_ready: Callable[[], None], report_read: Callable[[AdapterRead], None]
) -> tuple[BuiltRunner, LiveGroup]:
    """Build another rank's part and its group. Call `report_ready` before it joins the group, and `report_read` for
    each adapter that is read later, in the thread that reads.
    """
    store = SharedStore(boot.store)
    group = _join_group(boot.config, store, boot.group, boot.rank, report_ready)
    return build_runner(boot.config, Path(boot.folder), group, report_read), group


def _join_group(
    config: EngineConfig, store: SharedStore, name: str, rank: int, before: Callable[[], None] = lambda: None
) -> LiveGroup:
    size = config.model.tensor_parallel_size
    device = rank_device(config, rank, size)
    before()
    return make_group(Rendezvous(store, name, rank, size), device, on_one_gpu=config.ranks_on_one_gpu)
