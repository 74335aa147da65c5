"""Tables whose texts are texts: nothing in a name is read as markup or as an emoji, on any console.

No cell is cut. What is too long for its column goes on in the next line; where even that cannot be read, on a narrow
terminal, a row is written as a block with one line per cell.
"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

#: Words may be broken into pieces of this length before a table becomes blocks.
PIECE = 20


class PlainTable(Table):
    """A table for data from outside; strings in its heads, cells, title and caption are shown as they are."""

    def __init__(self, *, title: str = "", show_header: bool = True) -> None:
        super().__init__(
            box=box.SIMPLE,
            pad_edge=False,
            title=Text(title) if title else None,
            title_justify="left",
            show_header=show_header,
        )
        self._plain: list[list[RenderableType | None]] = []

    def add_column(self, header: RenderableType = "", *args: Any, **options: Any) -> None:
        super().add_column(_text(header), *args, **{"overflow": "fold", **options})

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        self._plain.append([None if cell is None else _text(cell) for cell in cells])
        super().add_row(*self._plain[-1], **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if len(self.columns) > 2 and self._least() > options.max_width:
            yield from self._blocks()
        else:
            yield from super().__rich_console__(console, options)

    def _least(self) -> int:
        """The fewest columns of a terminal in which the table can be read."""
        least = 0
        for number, column in enumerate(self.columns):
            words = [word for cell in (column.header, *self._cells(number)) for word in str(cell).split()]
            least += min(PIECE, max(map(len, words), default=0)) + 2
        return least

    def _cells(self, number: int) -> list[RenderableType]:
        return [row[number] or "" for row in self._plain if number < len(row)]

    def _blocks(self) -> RenderResult:
        if self.title:
            yield self.title
        heads = [str(column.header) for column in self.columns]
        for row in self._plain:
            first = True
            for head, cell in zip(heads, row):
                if cell is None or not str(cell):
                    continue
                name = f"{head}: " if head else ""
                value = cell if isinstance(cell, Text) else Text(str(cell))
                line = Text(("" if first else "  ") + name, overflow="fold").append_text(value)
                yield line
                first = False
        if self.caption:
            yield self.caption


def _text(value: RenderableType) -> RenderableType:
    return Text(value) if isinstance(value, str) else value
