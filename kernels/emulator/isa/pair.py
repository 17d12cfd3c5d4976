"""CTAs that work together: the pair of ``cta_group::2``, multicast masks, CTAs that have gone.

PTX ISA 9.1 section 9.7.16.5: two CTAs of a cluster whose ranks differ in the last bit are a pair,
and every tcgen05 instruction of a kernel names the same ``.cta_group``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import EmulatorFault
from ..schedule import CTA_WINDOW_MASK

if TYPE_CHECKING:
    from ..state import Cta, Warp


def group_of(w: Warp, cta_group: int) -> tuple[Cta, ...]:
    """The CTAs that a tcgen05 instruction of the warp works on: its own, or the even and the odd
    one of its pair. Raises tcgen05_mixed_cta_group, cta_pair_missing and cluster_cta_exited."""
    cta = w.cta
    check_group(cta, cta_group)
    if cta_group == 1:
        return (cta,)
    peer = pair_peer(cta)
    return (cta, peer) if cta.rank < peer.rank else (peer, cta)


def check_group(cta: Cta, cta_group: int) -> None:
    if cta.cta_group == cta_group:
        return
    if cta.cta_group is not None:
        raise EmulatorFault(
            "tcgen05_mixed_cta_group",
            f"a tcgen05 instruction with .cta_group::{cta_group} after one with .cta_group::"
            f"{cta.cta_group}: all of a kernel's must be the same",
        )
    cta.cta_group = cta_group


def pair_peer(cta: Cta) -> Cta:
    """The other CTA of the pair; it must still be there."""
    peers, rank = cta.machine.ctas, cta.rank ^ 1
    if rank >= len(peers):
        raise EmulatorFault(
            "cta_pair_missing",
            f".cta_group::2 in a cluster of {len(peers)} CTA(s): CTA {cta.rank} has no peer",
        )
    check_alive(peers[rank], ".cta_group::2")
    return peers[rank]


def check_alive(cta: Cta, what: str) -> None:
    """Raise cluster_cta_exited if every warp of the CTA has ended: its memory is gone."""
    if not any(warp.alive for warp in cta.warps):
        raise EmulatorFault(
            "cluster_cta_exited",
            f"{what} of CTA {cta.rank} of the cluster, which has exited: a CTA must not end before"
            " the others' last access to it (barrier.cluster)",
            rank=cta.rank,
        )


def destinations(w: Warp, address: int, mask: int) -> list[tuple[Cta, int]]:
    """The CTAs of a multicast's mask, each with the address at the same offset in its memory."""
    peers = w.cta.machine.ctas
    if not mask or mask >> len(peers):
        raise EmulatorFault(
            "cluster_bad_mask",
            f"multicast to CTA mask {mask:#x} of a cluster of {len(peers)}",
            mask=mask,
        )
    at = address & CTA_WINDOW_MASK
    found = [(cta, at) for rank, cta in enumerate(peers) if mask >> rank & 1]
    for cta, _ in found:
        check_alive(cta, "a multicast")
    return found
