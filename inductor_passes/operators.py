"""The one table of operators that communicate, and of our own operators: role, kind, price, label, wire bytes.

Everything that asks what such an operator is reads this table: roles and views (``ir``), durations (``cost``),
rewrites, reports. It imports nothing, so every layer can read it, and nothing adds to it at run time. The verifier
does not read it: it tells operators by their names and schemas (``verify/facts/communication.py``), and a test
compares the two.

A new operator is a row of :data:`OPERATORS`. A new kind is a member of :class:`CollectiveKind`, a row of
:data:`KIND_FACTS` and its algorithms in ``cost/communication.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

FUNCTIONAL = "_c10d_functional"
OWN = "inductor_passes"
#: What a message that carries a value brings of it: the value itself, or what is left where it is sent narrower.
SENT = "inductor_passes::sent"
#: Columns of a message as tensors of their own.
UNPACK = "inductor_passes::unpack"
#: Tensors side by side in a message.
PACK = "inductor_passes::pack"
#: A sum over ranks divided by a whole number.
DIVIDE = "inductor_passes::divide"
#: Of every row the element that an index names, where a rank holds some columns only.
PICK = "inductor_passes::pick"


class Role(Enum):
    """The part a node plays in a schedule."""

    INPUT = "input"
    """placeholder or get_attr"""
    OUTPUT = "output"
    FREE = "free"
    """a view, getitem or symbolic-size op: takes no time and no memory"""
    COMPUTE = "compute"
    START = "start"
    """issues a collective that we know"""
    WAIT = "wait"
    FENCE = "fence"
    """unknown effects: nothing that communicates crosses it"""


class CollectiveKind(str, Enum):
    """What travels between ranks. A member is its name: it compares, prints, hashes and serialises as that text."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"

    __str__ = str.__str__
    __repr__ = str.__repr__

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)

    @property
    def facts(self) -> KindFacts:
        """Its row of :data:`KIND_FACTS`."""
        return KIND_FACTS[self]

    @property
    def label(self) -> str:
        """Short name for schedule strings, e.g. ``AG``."""
        return KIND_FACTS[self].label

    @property
    def reduces(self) -> bool:
        """Whether ranks' values are combined: dtype and reduce op matter then."""
        return KIND_FACTS[self].reduces


@dataclass(frozen=True)
class KindFacts:
    """One kind of collective over ``g`` ranks.

    Attributes:
        label: short name for schedule strings.
        input_share / output_share: what a rank puts in (gets out) is one ``g``-th of the message.
        reduces: values are combined, not only moved.
        ring_passes: how often the bandwidth-optimal algorithm sends ``(g - 1) / g`` of the message; None when a rank
            sends the whole message once.
        own_port: every byte to another host leaves through the rank's own port: rings that share ports do not help.
        one_rank_each: a message between two ranks, not a collective of the group.
    """

    label: str
    input_share: bool = False
    output_share: bool = False
    reduces: bool = False
    ring_passes: int | None = None
    own_port: bool = False
    one_rank_each: bool = False


KIND_FACTS: Mapping[CollectiveKind, KindFacts] = MappingProxyType(
    {
        CollectiveKind.ALL_GATHER: KindFacts("AG", input_share=True, ring_passes=1),
        CollectiveKind.REDUCE_SCATTER: KindFacts("RS", output_share=True, reduces=True, ring_passes=1),
        CollectiveKind.ALL_REDUCE: KindFacts("AR", reduces=True, ring_passes=2),
        CollectiveKind.ALL_TO_ALL: KindFacts("A2A", ring_passes=1, own_port=True),
        CollectiveKind.BROADCAST: KindFacts("BC"),
        CollectiveKind.SEND: KindFacts("SEND", own_port=True, one_rank_each=True),
        CollectiveKind.RECV: KindFacts("RECV", own_port=True, one_rank_each=True),
    }
)
#: Kinds that every rank of a group takes part in.
GROUP_KINDS = tuple(kind for kind, facts in KIND_FACTS.items() if not facts.one_rank_each)
#: Label -> kind.
KIND_OF_LABEL: Mapping[str, CollectiveKind] = MappingProxyType({f.label: kind for kind, f in KIND_FACTS.items()})


class Price(Enum):
    """What an operator's duration is made of."""

    NOTHING = "nothing"
    """it only waits, or its time is not modelled"""
    MEMORY = "memory"
    """bytes read and written"""
    LINK = "link"
    """its collective, while compute goes on"""
    BLOCKING_LINK = "blocking link"
    """its collective and the bytes read and written, while compute stands still"""
    MATMUL = "matmul beside link"
    """matmuls and a collective that overlap inside"""
    NORM = "exchange and norm"
    """the exchanges of an all-reduce, and a kernel that adds and normalises"""


@dataclass(frozen=True)
class MatmulOperands:
    """How a matmul with a collective inside works.

    Attributes:
        style: ``op``, ``symm_mem`` or ``kernels``, see ``cost/fused.py``.
        left / right: names of its operands.
    """

    style: str
    left: str
    right: str


@dataclass(frozen=True)
class OperatorFacts:
    """One operator.

    Attributes:
        role: its part in a schedule.
        price: what its duration is made of.
        kind: of the collective that it issues or holds inside; None when it is none.
        blocks: it communicates while the compute lane stands still, and keeps its place among the communication.
        coalesced: it takes and returns lists.
        in_place: it writes to its operands (``_``) or to an ``out`` buffer.
        reinplaced: Inductor may turn it into its in-place form.
        transfer: it sends to or receives from single ranks.
        matmul: for ``Price.MATMUL``.
    """

    role: Role
    price: Price
    kind: CollectiveKind | None = None
    blocks: bool = False
    coalesced: bool = False
    in_place: bool = False
    reinplaced: bool = False
    transfer: bool = False
    matmul: MatmulOperands | None = None


def _start(kind: CollectiveKind, form: str = "", *, reinplaced: bool = False) -> OperatorFacts:
    in_place = form.endswith(("_", "_out"))
    return OperatorFacts(
        Role.START, Price.LINK, kind, coalesced="coalesced" in form, in_place=in_place, reinplaced=reinplaced
    )


def _matmul(kind: CollectiveKind, style: str, left: str, right: str) -> OperatorFacts:
    return OperatorFacts(Role.FENCE, Price.MATMUL, kind, blocks=True, matmul=MatmulOperands(style, left, right))


_AG, _RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
_WAIT = OperatorFacts(Role.WAIT, Price.NOTHING)
#: Asynchronous like collectives. Fences for everything that communicates, but where whole graphs are ordered.
_TRANSFER = OperatorFacts(Role.FENCE, Price.MEMORY, transfer=True)

#: ``namespace::name`` -> what it is.
OPERATORS: Mapping[str, OperatorFacts] = MappingProxyType(
    {
        "_c10d_functional::all_gather_into_tensor": _start(_AG),
        "_c10d_functional::all_gather_into_tensor_out": _start(_AG, "_out"),
        "_c10d_functional::all_gather_into_tensor_coalesced": _start(_AG, "_coalesced"),
        "inductor_passes::all_gather": _start(_AG),
        "_c10d_functional::reduce_scatter_tensor": _start(_RS),
        "_c10d_functional::reduce_scatter_tensor_out": _start(_RS, "_out"),
        "_c10d_functional::reduce_scatter_tensor_coalesced": _start(_RS, "_coalesced"),
        "_c10d_functional::all_reduce": _start(CollectiveKind.ALL_REDUCE, reinplaced=True),
        "_c10d_functional::all_reduce_": _start(CollectiveKind.ALL_REDUCE, "_"),
        "_c10d_functional::all_reduce_coalesced": _start(CollectiveKind.ALL_REDUCE, "_coalesced", reinplaced=True),
        "_c10d_functional::all_reduce_coalesced_": _start(CollectiveKind.ALL_REDUCE, "_coalesced_"),
        "_c10d_functional::all_to_all_single": _start(CollectiveKind.ALL_TO_ALL),
        "_c10d_functional::broadcast": _start(CollectiveKind.BROADCAST),
        "_c10d_functional::broadcast_": _start(CollectiveKind.BROADCAST, "_"),
        "_c10d_functional::wait_tensor": _WAIT,
        "_c10d_functional::wait_tensors": _WAIT,
        "_c10d_functional::isend": _TRANSFER,
        "_c10d_functional::irecv": _TRANSFER,
        "_c10d_functional::batch_p2p_ops": _TRANSFER,
        "_dtensor::shard_dim_alltoall": OperatorFacts(
            Role.FENCE, Price.BLOCKING_LINK, CollectiveKind.ALL_TO_ALL, blocks=True
        ),
        "inductor_passes::gathered_mm": _matmul(_AG, "op", "shard", "right"),
        "inductor_passes::mm_scattered": _matmul(_RS, "op", "left", "right"),
        "inductor_passes::symm_gathered_mm": _matmul(_AG, "kernels", "shard", "rights"),
        "inductor_passes::symm_mm_scattered": _matmul(_RS, "kernels", "left", "right"),
        "inductor_passes::all_reduce_residual_rms_norm": OperatorFacts(
            Role.FENCE, Price.NORM, CollectiveKind.ALL_REDUCE, blocks=True
        ),
        UNPACK: OperatorFacts(Role.COMPUTE, Price.MEMORY),
        PACK: OperatorFacts(Role.COMPUTE, Price.MEMORY),
        DIVIDE: OperatorFacts(Role.COMPUTE, Price.MEMORY),
        PICK: OperatorFacts(Role.COMPUTE, Price.MEMORY),
        SENT: OperatorFacts(Role.COMPUTE, Price.MEMORY),
        "inductor_passes::measure_rounding": OperatorFacts(Role.COMPUTE, Price.MEMORY),
        "symm_mem::fused_all_gather_matmul": _matmul(_AG, "symm_mem", "A", "Bs"),
        "symm_mem::fused_all_gather_scaled_matmul": _matmul(_AG, "symm_mem", "A", "Bs"),
        "symm_mem::fused_matmul_reduce_scatter": _matmul(_RS, "symm_mem", "A", "B"),
        "symm_mem::fused_scaled_matmul_reduce_scatter": _matmul(_RS, "symm_mem", "A", "B"),
    }
)

#: The asynchronous collectives: name -> kind.
COLLECTIVES: Mapping[str, CollectiveKind] = MappingProxyType(
    {name: facts.kind for name, facts in OPERATORS.items() if facts.role is Role.START and facts.kind is not None}
)
#: Collectives that block inside: they run on the compute lane and keep their place among the communication.
BLOCKING_COLLECTIVES = frozenset(name for name, facts in OPERATORS.items() if facts.blocks)
WAITS = frozenset(name for name, facts in OPERATORS.items() if facts.role is Role.WAIT)
#: Point-to-point operators.
TRANSFERS = frozenset(name for name, facts in OPERATORS.items() if facts.transfer)
#: Collectives that Inductor turns into their in-place form when nobody reads the first argument any more.
REINPLACED = frozenset(name for name, facts in OPERATORS.items() if facts.reinplaced)
#: Kind -> base name of torch's functional operator that carries one tensor.
SINGLE: Mapping[CollectiveKind, str] = MappingProxyType(
    {
        kind: name.partition("::")[2]
        for name, kind in COLLECTIVES.items()
        if not OPERATORS[name].in_place and not OPERATORS[name].coalesced and name.partition("::")[0] != OWN
    }
)
#: Kind -> base name of the functional operator that carries a list of tensors, where there is one.
COALESCED: Mapping[CollectiveKind, str] = MappingProxyType(
    {
        kind: name.partition("::")[2]
        for name, kind in COLLECTIVES.items()
        if OPERATORS[name].coalesced and not OPERATORS[name].in_place
    }
)


def kind_of(name: str) -> CollectiveKind:
    """The kind with a name.

    Raises:
        ValueError: there is none.
    """
    try:
        return CollectiveKind(name)
    except ValueError:
        known = ", ".join(CollectiveKind)
        raise ValueError(f"collective kind is {name!r}; expected one of {known}") from None


def role_of(name: str) -> Role | None:
    """The role of an operator that the table knows; an operator of ours that it does not know is a fence.

    None for all others: what they do, their schemas say.
    """
    facts = OPERATORS.get(name)
    if facts is not None:
        return facts.role
    return Role.FENCE if name.partition("::")[0] == OWN else None
