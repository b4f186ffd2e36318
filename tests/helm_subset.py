"""A renderer for a small part of Helm's template language, which refuses everything else.

Charts are rendered and checked without Helm. What is understood means the same in Helm:

    {{ .Values.a.b }}  {{ .Release.Name }}  {{ .Release.Service }}  {{ .Chart.AppVersion }}
    {{ VALUE | quote }}  {{ VALUE | sha256sum }}  {{ VALUE | nindent N }}
    {{ toYaml VALUE | nindent N }}  {{ include "name" . | nindent N }}
    {{ if VALUE }} … {{ else }} … {{ end }}  {{ if not VALUE }}  {{ define "name" }} … {{ end }}
    {{ /* a comment */ }}, and {{- and -}}, which remove white space before and after

Stricter than Helm: a value that does not exist is an error, and so is a number that Helm, which
reads numbers as floats, would print as 1e+06.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TAG = re.compile(
    r"(?:[ \t\n]*\{\{-(?=\s)|\{\{(?!-))\s*(?P<body>/\*.*?\*/(?=\}\}| -\}\})|(?!/\*).*?)"
    r"(?:\s+-\}\}[ \t\n]*|\s*\}\})",
    re.S,
)
PATH = r"\.(?:Values|Release|Chart)(?:\.\w+)+"
VALUE = re.compile(
    rf'(?:(?P<yaml>toYaml )?(?P<path>{PATH})|include "(?P<name>[\w.]+)" \.)'
    r"(?: \| (?:(?P<quote>quote)|(?P<digest>sha256sum)|nindent (?P<indent>\d+)))?"
)
CONDITION = re.compile(rf"if (?P<negated>not )?(?P<path>{PATH})")
DEFINITION = re.compile(r'define "(?P<name>[\w.]+)"')
COMMENT = re.compile(r"/\*.*\*/", re.S)


class TemplateError(ValueError):
    """A template outside of the subset; the message names file, line and text."""


@dataclass
class _Block:
    """The content of a file, a definition, or a condition with its two branches."""

    kind: str
    test: re.Match | None = None
    branches: list[list[Any]] = field(default_factory=lambda: [[]])


class Chart:
    """The templates of one chart folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._named: dict[str, list[Any]] = {}
        self._files = {
            path.name: self._parse(path) for path in sorted((folder / "templates").iterdir())
        }
        self.chart = yaml.safe_load((folder / "Chart.yaml").read_text())
        self.defaults = yaml.safe_load((folder / "values.yaml").read_text())

    def render(self, *overrides: dict, release: str = "demo") -> list[dict]:
        """All documents of all templates, values merged as Helm does (mappings deeply)."""
        text = self.text(*overrides, release=release)
        documents = [yaml.safe_load(each) for each in text.values()]
        return [document for document in documents if document is not None]

    def text(self, *overrides: dict, release: str = "demo") -> dict[str, str]:
        """The rendered text of each template that is no library of definitions."""
        scope = {
            "Values": self.values(*overrides),
            "Release": {"Name": release, "Service": "Helm"},
            "Chart": {"AppVersion": self.chart["appVersion"]},
        }
        files = {name: nodes for name, nodes in self._files.items() if not name.startswith("_")}
        return {name: "".join(self._evaluate(nodes, scope)) for name, nodes in files.items()}

    def values(self, *overrides: dict) -> dict:
        """The chart's values with overrides, the later ones first."""
        values = self.defaults
        for override in overrides:
            values = _merged(values, override)
        return values

    def _parse(self, path: Path) -> list[Any]:
        text, place = path.read_text(), 0
        stack = [_Block("file")]
        for tag in TAG.finditer(text):
            stack[-1].branches[-1].append(_plain(path.name, text[place : tag.start()]))
            place = tag.end()
            try:
                self._take(tag["body"], stack)
            except TemplateError as error:
                line = text.count("\n", 0, tag.start("body")) + 1
                raise TemplateError(f"{path.name}, line {line}: {error}") from None
        if len(stack) > 1:
            raise TemplateError(f"{path.name}: {stack[-1].kind} has no end")
        return [*stack[0].branches[0], _plain(path.name, text[place:])]

    def _take(self, body: str, stack: list[_Block]) -> None:
        """One tag: opens, turns or closes a block, or is a value in the open one."""
        if COMMENT.fullmatch(body):
            return
        if match := CONDITION.fullmatch(body):
            stack.append(_Block("if", match))
        elif match := DEFINITION.fullmatch(body):
            stack.append(_Block("define", match))
        elif body == "else" and stack[-1].kind == "if" and len(stack[-1].branches) == 1:
            stack[-1].branches.append([])
        elif body == "end" and len(stack) > 1:
            block = stack.pop()
            if block.kind == "define":
                self._named[block.test["name"]] = block.branches[0]
            else:
                stack[-1].branches[-1].append(block)
        elif match := VALUE.fullmatch(body):
            stack[-1].branches[-1].append(match)
        else:
            raise TemplateError(f"{{{{ {body} }}}} is not in the subset")

    def _evaluate(self, nodes: list[Any], scope: dict) -> Iterator[str]:
        for node in nodes:
            if isinstance(node, str):
                yield node
            elif isinstance(node, _Block):
                holds = bool(_look_up(node.test["path"], scope)) != bool(node.test["negated"])
                branches = [*node.branches, []]
                yield from self._evaluate(branches[0 if holds else 1], scope)
            else:
                yield self._value(node, scope)

    def _value(self, match: re.Match, scope: dict) -> str:
        if match["name"]:
            if match["name"] not in self._named:
                raise TemplateError(f"{match['name']} is not defined")
            text = "".join(self._evaluate(self._named[match["name"]], scope))
        elif match["yaml"]:
            text = yaml.safe_dump(_look_up(match["path"], scope)).removesuffix("\n")
        else:
            text = _printed(match["path"], _look_up(match["path"], scope))
        if match["quote"]:
            return json.dumps(text, ensure_ascii=False)
        if match["digest"]:
            return hashlib.sha256(text.encode()).hexdigest()
        if match["indent"]:
            pad = "\n" + " " * int(match["indent"])
            return pad + text.replace("\n", pad)
        return text


def _plain(name: str, text: str) -> str:
    """Text between tags. What still looks like a tag is one that Go would not read either."""
    if found := re.search(r"\{\{.{0,40}|\}\}", text):
        raise TemplateError(f"{name}: {found[0]} is no tag")
    return text


def _look_up(path: str, scope: dict) -> Any:
    value: Any = scope
    for name in path.removeprefix(".").split("."):
        if not isinstance(value, dict) or name not in value:
            raise TemplateError(f"{path} does not exist: values.yaml has no {name}")
        value = value[name]
    return value


def _printed(path: str, value: Any) -> str:
    """A value as Go prints it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and abs(value) >= 1_000_000:
        raise TemplateError(f"{path} is {value}, which Helm prints in scientific notation")
    if not isinstance(value, str | int | float):
        raise TemplateError(f"{path} is no single value; use toYaml")
    return str(value)


def _merged(values: dict, override: dict) -> dict:
    merged = dict(values)
    for name, value in override.items():
        old = merged.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[name] = _merged(old, value) if both else value
    return merged
