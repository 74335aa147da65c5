"""Whether the ranks of a graph have the same settings of tuning, which their agreement on the graph does not compare.

Each rank writes its own into the store when the graph is loaded, on the thread that exchanges times: the first one as
they are, and whoever has another value writes down both. So a rank that comes to the exchange finds what differs
there, and waits for nobody.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from inductor_passes.agreement.board import Board
from inductor_passes.tuning.exchange import Talks


def apart(session: Talks, board: Board, name: str, mine: Mapping[str, str]) -> dict[str, str]:
    """Setting -> a sentence with two ranks' values, for those that differ as far as ranks have written theirs.

    Args:
        session: its token must be known.
        name: of the graph, equal on all ranks.
        mine: this rank's values; the same settings on all ranks.

    Raises:
        StoreError: the store cannot be used.
    """
    key = session.key("tuning settings", hashlib.blake2b(name.encode(), digest_size=12).hexdigest())
    rank, theirs = json.loads(board.put_once(key, json.dumps([session.rank, dict(mine)])))
    found = {}
    for setting, value in mine.items():
        differs = f"{key}/{setting}"
        if theirs[setting] != value:
            board.put_once(differs, json.dumps([rank, theirs[setting], session.rank, value]))
        if board.has([differs]):
            one, its, other, others = json.loads(board.read([differs])[0])
            found[setting] = f"{setting} differs: rank {one} has {its} and rank {other} has {others}"
    return found
