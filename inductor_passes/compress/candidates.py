"""Which collectives may be narrowed, to what, and what that is estimated to save before a step is simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from inductor_passes import _torch
from inductor_passes.compress.emit import KINDS
from inductor_passes.compress.form import Form, form_of
from inductor_passes.config import Narrowing
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.canonical import UNEQUAL
from inductor_passes.ir.ops import Role
from inductor_passes.ir.parameters import names_of
from inductor_passes.ir.view import Collective
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewriting.contract import NOT_AGREED, Facts

#: Element types that are narrowed; wider ones may hold what float32 does not.
WIDE = (torch.float32, torch.bfloat16, torch.float16)
#: A sum of a term per rank is one chain of additions.
MAX_RANKS = 64


class RefusedError(Exception):
    """A collective that is left alone, and why."""

    def __init__(self, reason: Reason, detail: str = "", setting: str = "", gain_ns: int = 0) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.setting, self.gain_ns = reason, detail, setting, gain_ns


@dataclass(frozen=True)
class Price:
    """What a collective costs, all in ns and in bytes that this rank sends.

    Attributes:
        link_ns: on its lane.
        before_ns / after_ns: of the compute lane, to the start (issuing it included) and behind the wait.
        sent_bytes: of the message; twice for a reduction to all ranks.
    """

    link_ns: int
    before_ns: int
    after_ns: int
    sent_bytes: int

    @property
    def all_ns(self) -> int:
        """On all lanes."""
        return self.link_ns + self.before_ns + self.after_ns


@dataclass(frozen=True, eq=False)
class Candidate:
    """A collective that may be narrowed.

    Attributes:
        was / now: its price before and after.
        forced: the settings ask for it whatever it gains.
        kept: what it loses is kept on this rank.
    """

    collective: Collective
    form: Form
    was: Price
    now: Price
    forced: bool
    kept: bool = False

    @property
    def gain_ns(self) -> int:
        """Time saved on all lanes."""
        return self.was.all_ns - self.now.all_ns

    @property
    def compute_ns(self) -> int:
        """Time that the compute lane is busy for longer."""
        return self.now.before_ns + self.now.after_ns - self.was.before_ns - self.was.after_ns


def candidate(collective: Collective, facts: Facts, settings: Narrowing, kept: bool = False) -> Candidate:
    """The cheapest form that a collective may be sent in.

    Args:
        kept: what it loses is kept on this rank.

    Raises:
        RefusedError: it has to stay as it is.
    """
    mode = mode_of(collective, settings.rules)
    if mode == "off":
        called = ", ".join([*sorted(_known(collective)), *names_of([collective.start])])
        raise RefusedError(Reason.DISABLED, f"no entry of compress fits {called}, or it says off", 'compress="auto"')
    _check_form(collective, facts)
    elements, dtype = math.prod(collective.inputs[0].meta["val"].shape), collective.dtypes[0]
    names = settings.dtypes if mode == "auto" else (mode,)
    forms = [form_of(name, settings.block) for name in names]
    allowed = [form for form in forms if form.error <= settings.error]
    if not allowed:
        least = min(float(form.error) for form in forms)
        said = f"a rounding to {' or '.join(names)} errs by up to {least:g}"
        raise RefusedError(Reason.NUMERICS, said, f'compress_error="{least:g}"')
    was = _as_it_is(collective, facts.profile)
    priced = [(price(collective, form, facts.profile, kept), form) for form in allowed]
    priced = [(now, form) for now, form in priced if now.sent_bytes < was.sent_bytes]
    if not priced:
        said = f"a message of {elements} elements of {_short(dtype)} gets no smaller"
        raise RefusedError(Reason.NOT_PROFITABLE, said)
    now, form = min(priced, key=lambda entry: entry[0].all_ns)
    found = Candidate(collective, form, was, now, mode != "auto", kept)
    if not found.forced and found.gain_ns <= 0:
        said = f"{form.name} saves {found.was.link_ns - now.link_ns} ns of link for {found.compute_ns} ns of compute"
        raise RefusedError(Reason.NOT_PROFITABLE, said, _forcing(collective, form), found.gain_ns)
    return found


def mode_of(collective: Collective, rules: Sequence[tuple[str, str]]) -> str:
    """The mode of the first rule that fits a collective; ``off`` where none does, or its parameters differ."""
    names = names_of([collective.start])
    modes = {_first(rules, _known(collective), name) for name in names or ("",)}
    return modes.pop() if len(modes) == 1 else "off"


def _known(collective: Collective) -> set[str]:
    """What a collective's group is called: its name, its description, the mesh dimension in that."""
    group, described = collective.group.name, _torch.group_descriptions().get(collective.group.name, "")
    return {group, described, described.removeprefix("mesh_")} - {""}


def _first(rules: Sequence[tuple[str, str]], groups: set[str], parameter: str) -> str:
    for pattern, mode in rules:
        if pattern in groups or pattern == "*" or (parameter and fnmatchcase(parameter, pattern)):
            return mode
    return "off"


def _forcing(collective: Collective, form: Form) -> str:
    name = _torch.group_descriptions().get(collective.group.name) or collective.group.name
    return f'compress={{"{name}": "{form.name}"}}'


def _check_form(collective: Collective, facts: Facts) -> None:
    """Raise unless this is a collective that ``emit`` knows, alike on all ranks."""
    start, storages = collective.start, facts.view.storages
    if not facts.agreed:
        raise RefusedError(Reason.RANKS_DIFFER, NOT_AGREED)
    if not facts.ranks_agree or collective in facts.shards.uneven:
        raise RefusedError(Reason.RANKS_DIFFER, UNEQUAL)
    if collective.kind not in KINDS:
        raise RefusedError(Reason.UNSUPPORTED, f"a {collective.kind} is not narrowed")
    if start.name in facts.apart:
        raise RefusedError(Reason.UNSUPPORTED, "one of the parts of a collective that was cut to overlap")
    single = len(collective.inputs) == 1 and len(collective.waits) == 1 and list(start.users) == [*collective.waits]
    waited = {m for s in storages.of(start) for m in s.members if facts.view.role(m) is Role.WAIT}
    if collective.in_place or not single or len(waited) > 1 or any(s.writers for s in storages.of(start)):
        raise RefusedError(Reason.UNSUPPORTED, "not one functional call with one wait")
    if collective.dtypes[0] not in WIDE:
        raise RefusedError(Reason.UNSUPPORTED, f"elements of {_short(collective.dtypes[0])} are not narrowed")
    shapes = [node.meta["val"].shape for node in (collective.inputs[0], collective.waits[0])]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        raise RefusedError(Reason.RANGE, "blocks are cut for sizes that are known")
    if not all(math.prod(shape) for shape in shapes) or not shapes[0]:
        raise RefusedError(Reason.UNSUPPORTED, "an empty message, or a single number")
    if collective.group.size < 2:
        raise RefusedError(Reason.UNSUPPORTED, "a group of one rank")
    if collective.kind.reduces and collective.reduce_op not in ("sum", "avg"):
        raise RefusedError(Reason.MIXED_REDUCE_OP, f"only sums and averages are narrowed, not {collective.reduce_op}")
    if collective.kind.reduces and collective.group.size > MAX_RANKS:
        raise RefusedError(Reason.UNSUPPORTED, f"a sum over more than {MAX_RANKS} ranks")
    if collective.kind is CollectiveKind.ALL_TO_ALL and not _is_even(collective):
        raise RefusedError(Reason.RANKS_DIFFER, "unequal splits may differ between ranks")


def _is_even(collective: Collective) -> bool:
    given = _torch.op_arguments(collective.start)
    rows = collective.inputs[0].meta["val"].shape[0]
    splits = [size for name in ("input_split_sizes", "output_split_sizes") for size in given.get(name) or ()]
    return rows % collective.group.size == 0 and all(size == rows // collective.group.size for size in splits)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_it_is(collective: Collective, profile: CostProfile) -> Price:
    given, got = collective.input_bytes or 0, collective.output_bytes or 0
    sent = 2 * given if collective.kind is CollectiveKind.ALL_REDUCE else given
    return Price(*_message(collective.kind, given, got, collective.group.ranks, profile), 0, sent)


def _message(
    kind: CollectiveKind, given: int, got: int, ranks: tuple[int, ...], profile: CostProfile
) -> tuple[int, int]:
    """Time on the link, and to issue it."""
    return profile.communication_ns(kind, given, got, ranks), profile.issue_ns(kind, given, got, ranks)


def price(collective: Collective, form: Form, profile: CostProfile, kept: bool = False) -> Price:
    """What a collective costs in a form: its messages, and the kernels that narrow, widen and add.

    Args:
        kept: this rank widens its own message too.
    """
    ranks, itemsize = collective.group.ranks, collective.dtypes[0].itemsize
    elements = math.prod(collective.inputs[0].meta["val"].shape)
    pieces = 1 if collective.kind is CollectiveKind.ALL_GATHER else len(ranks)
    message = pieces * form.message_bytes(-(-elements // pieces))

    def kernel(read: int, written: int) -> int:
        return profile.compute_ns(0, read + written, "float32", 1)

    before = kernel(elements * itemsize, message) + (kernel(message, elements * itemsize) if kept else 0)
    if collective.kind is CollectiveKind.ALL_GATHER:
        link, issue = _message(CollectiveKind.ALL_GATHER, message, message * len(ranks), ranks, profile)
        after = kernel(message * len(ranks), elements * itemsize * len(ranks))
        return Price(link, issue + before, after, message)
    link, issue = _message(CollectiveKind.ALL_TO_ALL, message, message, ranks, profile)
    if collective.kind is CollectiveKind.ALL_REDUCE:
        piece = message // len(ranks)
        second, again = _message(CollectiveKind.ALL_GATHER, piece, message, ranks, profile)
        after = kernel(message, piece) + again + kernel(message, elements * itemsize)
        return Price(link + second, issue + before, after, 2 * message)
    kept = elements // len(ranks) if collective.kind is CollectiveKind.REDUCE_SCATTER else elements
    return Price(link, issue + before, kernel(message, kept * itemsize), message)


def carried(candidates: Sequence[Candidate]) -> Mapping[str, Candidate]:
    """By the names of their starts."""
    return {one.collective.start.name: one for one in candidates}
