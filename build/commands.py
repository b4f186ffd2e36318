"""`masw-build`: engines from models.

Exit codes: 0 built or planned, 1 could not be built, 2 a usage error.
"""

from __future__ import annotations

import typer

from .draft_command import draft
from .target_command import target

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


@app.callback()
def commands() -> None:
    """Builds what the gpu lane runs."""


app.command()(draft)
app.command()(target)


if __name__ == "__main__":
    app()
