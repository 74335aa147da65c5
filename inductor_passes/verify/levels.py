"""Messages that are said to be narrow between hosts and wide inside them: on which groups they are.

A certificate states the group over which its codes travel. No two ranks of that group may share a host, and what it
carries is of another type than the collective was. Whatever else the certificate adds has to stay on one host, in the
type that the collective had. That the codes take no other way is the value proof's to show, see ``values.narrowed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inductor_passes.report import Finding
from inductor_passes.verify.certificate import Certificate
from inductor_passes.verify.snapshot import CollectiveRecord, ReferenceSnapshot


def compared(
    before: ReferenceSnapshot,
    after: ReferenceSnapshot,
    certificates: Sequence[Certificate],
    ranks_per_host: int | None,
) -> Iterator[Finding]:
    """What is not as the certificates say.

    Args:
        ranks_per_host: global ranks ``h * n`` to ``h * n + n - 1`` share host ``h``; None: not known.
    """
    for certificate in certificates:
        stated = {one.over for one in certificate.narrowed}
        if stated - {()}:
            removed = [before.collectives[n] for n in certificate.removed if n in before.collectives]
            added = [after.collectives[n] for n in certificate.added if n in after.collectives]
            for node, said in _wrong(stated, removed, added, ranks_per_host):
                yield Finding("narrowed", node, f"{certificate.rewrite} narrows between hosts only, but {said}")


def _wrong(
    stated: set[tuple[int, ...]],
    removed: Sequence[CollectiveRecord],
    added: Sequence[CollectiveRecord],
    ranks_per_host: int | None,
) -> Iterator[tuple[str, str]]:
    """Names of nodes, and what is wrong about them."""
    where = added[0].name if added else ""
    if ranks_per_host is None:
        yield where, "nobody says which ranks share a host"
        return
    if len(stated) != 1:
        yield where, f"it states {len(stated)} groups for that: {sorted(stated)}"
        return
    (between,) = stated
    if _hosts(between, ranks_per_host) != len(between):
        yield where, f"ranks {list(between)} are not on a host each"
    wide = {dtype for one in removed for dtype in one.dtypes}
    for one in added:
        if one.ranks == between:
            if set(one.dtypes) & wide:
                yield one.name, f"{one} is wide between hosts"
        elif _hosts(one.ranks, ranks_per_host) != 1:
            yield one.name, f"{one} goes between hosts on ranks {list(one.ranks)}, not {list(between)}"
        elif set(one.dtypes) != wide:
            yield one.name, f"{one} inside a host is not of the type that there was: {', '.join(sorted(wide))}"


def _hosts(ranks: Sequence[int], ranks_per_host: int) -> int:
    return len({rank // ranks_per_host for rank in ranks})
