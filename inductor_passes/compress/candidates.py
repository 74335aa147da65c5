"""Which collectives may be narrowed, to what, and what that is estimated to save before a step is simulated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.compress.emit import KINDS
from inductor_passes.compress.form import Form, form_of
from inductor_passes.compress.levels import levels_of, spans_levels
from inductor_passes.compress.prices import Price, as_it_is, between_bytes, in_two_levels, price
from inductor_passes.compress.refused import RefusedError
from inductor_passes.compress.two_levels import KINDS as TWO_LEVELS
from inductor_passes.compress.two_levels import Way
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir.canonical import UNEQUAL, moves_data
from inductor_passes.ir.ops import Role
from inductor_passes.ir.parameters import names_of
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.operators import CollectiveKind
from inductor_passes.report import Reason
from inductor_passes.rewriting.contract import NOT_AGREED, Facts
from inductor_passes.settings.narrowing import BETWEEN, Narrowing

#: Element types that are narrowed; wider ones may hold what float32 does not.
WIDE = (torch.float32, torch.bfloat16, torch.float16)
#: A sum of a term per rank, or per host, is one chain of additions.
MAX_RANKS = 64


@dataclass(frozen=True, eq=False)
class Candidate:
    """A collective that may be narrowed.

    Attributes:
        was / now: its price before and after; of two levels, what would go between hosts before.
        forced: the settings ask for it whatever it gains.
        kept: what it loses is kept on this rank.
        way: between hosts only, and how; None: over the whole group.
    """

    collective: Collective
    form: Form
    was: Price
    now: Price
    forced: bool
    kept: bool = False
    way: Way | None = None

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
    name, between, _ = mode.partition(BETWEEN)
    ways = _ways(collective, facts.profile, required=bool(between), free=mode == "auto", kept=kept)
    ways = _short_sums(collective, ways)
    forms = admitted(name, settings)
    found = [_priced(collective, form, way, facts.profile, mode, kept) for form in forms for way in ways]
    smaller = [one for one in found if one.now.sent_bytes < one.was.sent_bytes]
    if not smaller:
        elements, dtype = math.prod(collective.inputs[0].meta["val"].shape), collective.dtypes[0]
        said = f"a message of {elements} elements of {_short(dtype)} gets no smaller"
        raise RefusedError(Reason.NOT_PROFITABLE, said)
    best = min(smaller, key=lambda one: one.now.all_ns)
    if not best.forced and best.gain_ns <= 0:
        said = f"{best.form.name} saves {best.was.link_ns - best.now.link_ns} ns of link for {best.compute_ns} ns"
        raise RefusedError(Reason.NOT_PROFITABLE, f"{said} of compute", _forcing(best), best.gain_ns)
    return best


def admitted(name: str, settings: Narrowing) -> list[Form]:
    """The forms that a type, or ``auto``, may become.

    Raises:
        RefusedError: each errs more than ``compress_error`` admits.
    """
    names = settings.dtypes if name == "auto" else (name,)
    forms = [form_of(one, settings.block) for one in names]
    found = [form for form in forms if form.error <= settings.error]
    if not found:
        least = min(float(form.error) for form in forms)
        said = f"a rounding to {' or '.join(names)} errs by up to {least:g}"
        raise RefusedError(Reason.NUMERICS, said, f'compress_error="{least:g}"')
    return found


def _ways(collective: Collective, profile: CostProfile, *, required: bool, free: bool, kept: bool) -> list[Way | None]:
    """The ways in which a collective may go: None over its whole group, or in two levels.

    Args:
        required: between hosts only, so not over the whole group where that has several ranks on one host.
        free: in two levels too where that is possible.
        kept: what it loses is kept on this rank, which has to be a loss of what the rank itself sends. In two levels
            what goes between hosts is another rank's too.
    """
    if required and profile.layout(collective.group.ranks).hosts == 1:
        raise RefusedError(Reason.DISABLED, "all of its ranks are on one host: nothing goes between hosts")
    if not (required or free) or not spans_levels(collective, profile):
        return [None]
    try:
        if collective.kind not in TWO_LEVELS:
            raise RefusedError(Reason.UNSUPPORTED, f"an {collective.kind} is not sent in two levels")
        if kept:
            said = "what a message loses in two levels is not kept: there is no error feedback for it"
            raise RefusedError(Reason.UNSUPPORTED, said, 'compress_feedback="off"')
        levels = levels_of(collective, profile)
    except RefusedError:
        if required:
            raise
        return [None]
    ways: list[Way | None] = [] if required else [None]
    orders = (False, True) if collective.kind is CollectiveKind.ALL_GATHER else (False,)
    return [*ways, *(Way(levels, inside_first) for inside_first in orders)]


def _short_sums(collective: Collective, ways: list[Way | None]) -> list[Way | None]:
    """The ways on which no rank adds more terms than :data:`MAX_RANKS`: one per rank, or one per host.

    Raises:
        RefusedError: there is none.
    """
    if not collective.kind.reduces:
        return ways
    found = [one for one in ways if (one.levels.between if one else collective.group).size <= MAX_RANKS]
    if not found:
        terms = "hosts" if all(ways) else "ranks"
        raise RefusedError(Reason.UNSUPPORTED, f"a sum over more than {MAX_RANKS} {terms}")
    return found


def _priced(
    collective: Collective, form: Form, way: Way | None, profile: CostProfile, mode: str, kept: bool
) -> Candidate:
    was, forced = as_it_is(collective, profile), mode != "auto"
    if way is None:
        return Candidate(collective, form, was, price(collective, form, profile, kept), forced, kept)
    was = replace(was, sent_bytes=between_bytes(collective, way.levels))
    now = in_two_levels(collective, form, way.levels, way.inside_first, profile)
    return Candidate(collective, form, was, now, forced, way=way)


def mode_of(collective: Collective, rules: Sequence[tuple[str, str]]) -> str:
    """The mode of the first rule that fits a collective; ``off`` where none does, or its parameters differ."""
    names = names_of([collective.start])
    modes = {_first(rules, _known(collective), name) for name in names or ("",)}
    return modes.pop() if len(modes) == 1 else "off"


@dataclass(frozen=True)
class Fit:
    """What rules fit, message by message.

    Attributes:
        messages: how many there are; one of several parameters counts for each.
        first: pattern -> messages for which it is the first that fits; ``alone`` for which it would be by itself.
        groups / parameters: names that a rule could use.
    """

    messages: int = 0
    first: Mapping[str, int] = field(default_factory=dict)
    alone: Mapping[str, int] = field(default_factory=dict)
    groups: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()

    def with_(self, other: Fit) -> Fit:
        """Both together."""
        return Fit(
            self.messages + other.messages,
            Counter(self.first) + Counter(other.first),
            Counter(self.alone) + Counter(other.alone),
            self.groups | other.groups,
            self.parameters | other.parameters,
        )


def fits(collectives: Sequence[Collective], rules: Sequence[tuple[str, str]]) -> Fit:
    """What rules fit in a graph, narrowed or not."""
    first, alone = Counter[str](), Counter[str]()
    groups, parameters = set[str](), set[str]()
    messages = 0
    for collective in collectives:
        known, names = _known(collective), names_of([collective.start])
        groups |= known
        parameters.update(names)
        for name in names or ("",):
            found = [pattern for pattern, _ in rules if _is_fit(pattern, known, name)]
            messages += 1
            first.update(found[:1])
            alone.update(found)
    return Fit(messages, first, alone, frozenset(groups), frozenset(parameters))


def _known(collective: Collective) -> set[str]:
    """What a collective's group is called: its name, its description, the mesh dimension in that."""
    group, described = collective.group.name, _torch.group_descriptions().get(collective.group.name, "")
    return {group, described, described.removeprefix("mesh_")} - {""}


def _first(rules: Sequence[tuple[str, str]], groups: set[str], parameter: str) -> str:
    for pattern, mode in rules:
        if _is_fit(pattern, groups, parameter):
            return mode
    return "off"


def _is_fit(pattern: str, groups: set[str], parameter: str) -> bool:
    return pattern in groups or pattern == "*" or bool(parameter and fnmatchcase(parameter, pattern))


def _forcing(one: Candidate) -> str:
    group = one.collective.group.name
    name = _torch.group_descriptions().get(group) or group
    return f'compress={{"{name}": "{one.form.name}{BETWEEN if one.way else ""}"}}'


def _read_as_integers(view: GraphView, wait: torch.fx.Node) -> torch.fx.Node | None:
    """What makes integers, truth values or other bits of a result that is moved, viewed or sent on at most, or None.

    Sent on: a maximum over ranks has the bits of one rank's element.
    """
    todo, seen = [wait], {wait}
    while todo:
        for user in todo.pop().users:
            value, sent = user.meta.get("val"), view.role(user) in (Role.START, Role.WAIT)
            if user in seen or not isinstance(value, torch.Tensor) or not (sent or moves_data(view, user)):
                continue
            if not (value.is_floating_point() or value.is_complex()):
                return user
            seen.add(user)
            todo.append(user)
    return None


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
    if (whole := _read_as_integers(facts.view, collective.waits[0])) is not None:
        # A rewrite may have moved the conversion behind the message, which was one of whole numbers before.
        said = f"{whole.name} makes whole numbers of its elements: a small error would be one of 1"
        raise RefusedError(Reason.NUMERICS, said)
    shapes = [node.meta["val"].shape for node in (collective.inputs[0], collective.waits[0])]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        raise RefusedError(Reason.RANGE, "blocks are cut for sizes that are known")
    if not all(math.prod(shape) for shape in shapes) or not shapes[0]:
        raise RefusedError(Reason.UNSUPPORTED, "an empty message, or a single number")
    if collective.group.size < 2:
        raise RefusedError(Reason.UNSUPPORTED, "a group of one rank")
    if collective.kind.reduces and collective.reduce_op not in ("sum", "avg"):
        raise RefusedError(Reason.MIXED_REDUCE_OP, f"only sums and averages are narrowed, not {collective.reduce_op}")
    if collective.kind is CollectiveKind.ALL_TO_ALL and not _is_even(collective):
        raise RefusedError(Reason.RANKS_DIFFER, "unequal splits may differ between ranks")


def _is_even(collective: Collective) -> bool:
    given = _torch.op_arguments(collective.start)
    rows = collective.inputs[0].meta["val"].shape[0]
    splits = [size for name in ("input_split_sizes", "output_split_sizes") for size in given.get(name) or ()]
    return rows % collective.group.size == 0 and all(size == rows // collective.group.size for size in splits)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def carried(candidates: Sequence[Candidate]) -> Mapping[str, Candidate]:
    """By the names of their starts."""
    return {one.collective.start.name: one for one in candidates}
