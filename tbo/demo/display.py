"""Progress of all ranks while the demo runs: live bars on a terminal, one line a stage elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tbo.demo.messages import Progressed

_NARROW = 60


class Display:
    """A context manager that shows what it is told.

    Args:
        console: where; bars are drawn only if it is a terminal.
        ranks: how many.
    """

    def __init__(self, console: Console, ranks: int) -> None:
        self._console = console
        self._ranks = ranks
        self._stages: dict[int, str] = {}
        self._live: Progress | None = None
        self._tasks: list[TaskID] = []

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            bar_width = 10 if self._console.width < _NARROW else 24
            self._live = Progress(
                TextColumn("rank {task.fields[rank]}"),
                BarColumn(bar_width=bar_width),
                TextColumn("{task.description}"),
                console=self._console,
                transient=True,
            )
            self._tasks = [self._live.add_task("starting", total=None, rank=rank) for rank in range(self._ranks)]
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, message: Progressed) -> None:
        """Shows one word of progress."""
        if self._live is not None:
            counted = "" if message.total is None else f" {message.done}/{message.total}"
            self._live.update(
                self._tasks[message.rank],
                description=message.what + counted,
                completed=message.done,
                total=message.total,
            )
        elif self._stages.get(message.rank) != message.what:
            self._stages[message.rank] = message.what
            self._console.print(f"rank {message.rank}: {message.what}", markup=False, highlight=False, soft_wrap=True)
