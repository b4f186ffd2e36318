"""`masw-build`: makes, checks and lays out what a recipe states; says how to start it.

Exit codes: 0 done, and no check failed; 1 could not be done, or a check failed; 2 a usage error,
130 interrupted.
"""

from __future__ import annotations

import typer

from .check_command import check
from .draft_command import draft
from .launch_command import launch
from .repository_command import repository
from .target_command import target

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.callback()
def commands() -> None:
    """Makes, checks and lays out what a recipe states; says how to start it."""


app.command()(draft)
app.command()(target)
app.command()(check)
app.command()(repository)
app.command()(launch)

if __name__ == "__main__":
    app()
