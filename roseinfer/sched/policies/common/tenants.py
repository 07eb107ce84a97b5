"""Who has had how much of the machine lately, so that one tenant's load is not another's misfortune."""

from math import exp

HALF_LIFE_S = 30.0
TOLERANCE = 1.25  # of an equal share
MOST = 3.0  # however small the others are: ids are free text, and many that did little must not outweigh one that works


class TenantShares:
    """Work that was started on each tenant's account, forgotten with a half-life of 30 s."""

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
        """How far a tenant is above an equal share: 0 up to 1.25 times that, 1 at twice it, 3 at most."""
        self._forget(now_s)
        if len(self._work) < 2:
            return 0.0
        equal = self._total / len(self._work)
        ratio = self._work.get(tenant, 0.0) / equal if equal else 0.0
        return min(ratio - 1, MOST) if ratio > TOLERANCE else 0.0

    def _forget(self, now_s: float) -> None:
        if now_s - self._last_s < 1.0:
            return
        keep = exp(-self._decay * (now_s - self._last_s))
        self._last_s = now_s
        self._work = {tenant: keep * work for tenant, work in self._work.items() if keep * work > 1e-3}
        self._total = sum(self._work.values())
