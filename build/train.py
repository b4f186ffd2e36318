"""`masw-train`: prompts and answers to train on, the memory adaptor itself, and what it is worth.

Exit codes: 0 done, 1 could not be done, 2 a usage error, 130 interrupted.
"""

from __future__ import annotations

import typer

from .evaluate_command import ablate, evaluate, plot
from .samples_command import answers, prompts
from .train_command import pretrain, sft

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
for command in (prompts, answers):
    app.command()(command)
app.command("pretrain")(pretrain)
app.command("sft")(sft)
for command in (evaluate, ablate, plot):
    app.command()(command)

if __name__ == "__main__":
    app()
