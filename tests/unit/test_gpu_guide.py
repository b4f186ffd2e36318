"""docs/gpu.md: its commands exist, and its numbers are those of the recipes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from masw.build import commands, perf, train
from masw.clients import generate
from masw.engines import architectures
from masw.engines.recipe import load_recipe, recipe_folder
from tests.deployments import GPU_RECIPES

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "gpu.md").read_text()
PROGRAMS = {
    "masw-build": commands.app,
    "masw-generate": generate.app,
    "masw-perf": perf.app,
    "masw-train": train.app,
}
BUILDS = {"draft", "target", "check", "repository", "launch"}


def rows(heading: str) -> dict[str, list[str]]:
    """The first table whose header contains `heading`: cells by recipe."""
    table = re.search(rf"^ *\|[^\n]*{re.escape(heading)}[^\n]*\n((?: *\|[^\n]*\n)+)", GUIDE, re.M)
    cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines())
    return {row[0].strip("`"): row[1:] for row in cells if row[0].startswith("`")}


def calls() -> list[list[str]]:
    """Words of every masw command in the guide's blocks."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", GUIDE, re.M | re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    found = [re.search(r"(?:^|/|\$run )(masw-\w+ .*)", line) for line in lines]
    return [shlex.split(match[1]) for match in found if match]


@pytest.mark.parametrize("words", calls(), ids=" ".join)
def test_commands_and_options_exist(words):
    command = get_command(PROGRAMS[words[0]])
    if words[0] == "masw-build":
        assert words[1] in BUILDS
    if hasattr(command, "commands"):
        command = command.commands[words[1]]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if re.match("--?[a-z]", word)} <= known


def test_the_guide_walks_through_every_build():
    assert {words[1] for words in calls() if words[0] == "masw-build"} == BUILDS


def test_numbers_are_what_the_script_in_the_guide_prints():
    script = re.search(r"```python\n(.*?)```", GUIDE, re.S)[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert f"\n{line}\n" in GUIDE, line


def test_numbers_follow_from_the_published_architectures():
    models = yaml.safe_load((recipe_folder() / "architectures.yaml").read_text())
    table, times = rows("target weights, GiB per rank"), rows("target step, ms")
    assert set(table) == set(times) == set(GPU_RECIPES)
    for name in GPU_RECIPES:
        recipe = yaml.safe_load((recipe_folder() / f"{name}.yaml").read_text())
        m, ranks = models[recipe["target"]["architecture"]], len(recipe["target"]["gpus"])
        head = m["hidden_size"] // m["num_attention_heads"]
        kv = m["num_key_value_heads"] * head
        layer = 2 * m["hidden_size"] * (m["hidden_size"] + kv)
        layer += 3 * m["hidden_size"] * m["intermediate_size"]
        weights = 2 * (m["num_hidden_layers"] * layer + 2 * m["vocab_size"] * m["hidden_size"])
        weights /= ranks
        token = 2 * 2 * m["num_hidden_layers"] * kv / ranks
        longest = token * recipe["limits"]["max_length"]
        told = [float(cell) for cell in table[name][:3]]
        assert told == pytest.approx([weights / 2**30, token / 1024, longest / 2**30], abs=0.06)
        assert float(times[name][0]) == pytest.approx(weights / 3.35e12 * 1e3, abs=0.06)


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_recipes_are_as_the_guide_says(name):
    recipe = load_recipe(name)
    target, draft, gpus = rows("| GPUs |")[name]
    assert int(gpus.split()[0]) == len({*recipe.target.gpus, recipe.draft.gpu})
    for cell, part in ((target, recipe.target), (draft, recipe.draft)):
        model = architectures.source(part.architecture).rpartition("/")[2]
        assert re.split(r"[ ,]", cell)[0] == model


def test_links_lead_somewhere():
    headings = re.findall(r"^#+ (.*)", GUIDE, re.M)
    anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
    for link in re.findall(r"\]\(([^)]+)\)", GUIDE):
        if link.startswith("#"):
            assert link[1:] in anchors, link
        else:
            assert (ROOT / "docs" / link).exists(), link
