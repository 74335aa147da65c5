"""Tables whose texts are texts: nothing in a name is read as markup or as an emoji, on any console."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


class PlainTable(Table):
    """A table for data from outside; strings in its heads, cells, title and caption are shown as they are."""

    def __init__(self, *, title: str = "", show_header: bool = True) -> None:
        super().__init__(
            box=box.SIMPLE, pad_edge=False, title=Text(title) if title else None, title_justify="left",
            show_header=show_header,
        )

    def add_column(self, header: RenderableType = "", *args: Any, **options: Any) -> None:
        super().add_column(_text(header), *args, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(None if cell is None else _text(cell) for cell in cells), **options)


def _text(value: RenderableType) -> RenderableType:
    return Text(value) if isinstance(value, str) else value
