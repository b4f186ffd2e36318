"""`masw-build`: engines from models.

Exit codes: 0 built or planned, 1 could not be built, 2 a usage error.
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
    """Builds, lays out and checks what a recipe states."""


app.command()(draft)
app.command()(target)


app.command()(check)
app.command()(repository)
app.command()(launch)

if __name__ == "__main__":
    app()
