"""Tenants' recent shares of the machine, so that one tenant's load does not delay the others."""

from math import exp

HALF_LIFE_S = 30.0
MIN_EXCESS_RATIO = 1.25  # of an equal share
# Tenant ids are free text: many tenants with little work must not count against one that works.
MAX_EXCESS = 3.0


class TenantShares:
    """Started work of each tenant, which decays with a half-life of 30 s."""

    def __init__(self) -> None:
        self._work: dict[str, float] = {}
        self._total = 0.0
        self._decay = 0.693 / HALF_LIFE_S
        self._last_s = 0.0

    def charge(self, tenant: str, work_s: float, now_s: float) -> None:
        self._forget(now_s)
        self._work[tenant] = self._work.get(tenant, 0.0) + work_s
        self._total += work_s

    def excess(self, tenant: str, now_s: float) -> float:
        """Return how far a tenant exceeds an equal share: 0 up to 1.25 times that share, 1 at twice it, 3 at most."""
        self._forget(now_s)
        if len(self._work) < 2:
            return 0.0
        equal = self._total / len(self._work)
        ratio = self._work.get(tenant, 0.0) / equal if equal else 0.0
        return min(ratio - 1, MAX_EXCESS) if ratio > MIN_EXCESS_RATIO else 0.0

    def _forget(self, now_s: float) -> None:
        if now_s - self._last_s < 1.0:
            return
        decay = exp(-self._decay * (now_s - self._last_s))
        self._last_s = now_s
        self._work = {tenant: decay * work for tenant, work in self._work.items() if decay * work > 1e-3}
        self._total = sum(self._work.values())
