"""Hugging Face folders of target and draft, and their tokenizers' content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...engines import architectures
from ...engines.engine_folder import DraftEngine, EngineFolderError, file_sha256
from .finding import Finding, failed, judged, ok, unknown
from .subject import Subject

TOKENIZER = "tokenizer.json"


def model_findings(subject: Subject) -> list[Finding]:
    """Whether the folders hold the recipe's architectures, and tokenizers with the same tokens."""
    recipe, places = subject.recipe, subject.places
    findings = [_folder("target", recipe.target.architecture, places.target_model)]
    if (places.draft_model / "config.json").is_file() or _engine(subject) is None:
        findings.append(_folder("draft", recipe.draft.architecture, places.draft_model))
    return [*findings, _tokenizers(subject)]


def _folder(role: str, architecture: str, folder: Path) -> Finding:
    name, source = f"{role} model", architectures.source(architecture)
    fetch = f"hf download {source} --local-dir {folder}"
    if not (folder / "config.json").is_file():
        return failed(name, f"{folder} has no config.json", fetch)
    try:
        architectures.check_folder(architecture, folder)
    except (ValueError, KeyError) as error:
        return failed(name, str(error), f"{fetch}, or change {role}.architecture")
    return ok(name, f"{folder} is {architecture}")


def _engine(subject: Subject) -> DraftEngine | None:
    try:
        return DraftEngine.load(subject.places.draft_engine)
    except EngineFolderError:
        return None


def _tokenizers(subject: Subject) -> Finding:
    """By content where both files are there, by the engine's fingerprint where only one is."""
    name, places = "tokenizers", subject.places
    target, draft = places.target_model / TOKENIZER, places.draft_model / TOKENIZER
    if not target.is_file():
        return unknown(name, f"{target} does not exist yet")
    if draft.is_file():
        return _compare(subject, target, draft)
    engine = _engine(subject)
    if engine is None or engine.tokenizer is None:
        return unknown(name, f"{draft} does not exist yet")
    return judged(
        name,
        engine.tokenizer == file_sha256(target),
        "the draft's engine was built with the target's tokenizer, or not, by fingerprint",
        f"build the draft's engine from a model with the tokens of {target}",
    )


def _compare(subject: Subject, target: Path, draft: Path) -> Finding:
    name, remedy = "tokenizers", "choose a draft that was trained with the target's tokenizer"
    try:
        ours, theirs = read_tokens(target), read_tokens(draft)
    except (ValueError, KeyError, TypeError) as error:
        return failed(name, f"a {TOKENIZER} cannot be read: {error!r}", "download it again")
    if difference := first_difference(ours, theirs):
        return failed(name, difference, remedy)
    size = max(ours) + 1
    padded = {
        "target": subject.recipe.target_config().vocab_size,
        "draft": subject.recipe.draft_config().vocab_size,
    }
    found = f"{size} equal tokens; padded to {padded['target']} and {padded['draft']}"
    short = [role for role, rows in padded.items() if rows < size]
    if short:
        remedy = f"change {short[0]}.architecture"
        return failed(name, f"{found}, which is less than there are tokens", remedy)
    return ok(name, found)


def read_tokens(path: Path) -> dict[int, str]:
    """Every token of a tokenizer.json by its id, added ones included."""
    data = json.loads(path.read_text())
    tokens = {number: token for token, number in _pairs(data["model"]["vocab"])}
    return tokens | {each["id"]: each["content"] for each in data.get("added_tokens") or ()}


def _pairs(vocab: Any) -> list[tuple[str, int]]:
    """(token, id): a mapping, or a list of [token, score] in the order of ids."""
    if isinstance(vocab, dict):
        return list(vocab.items())
    return [(token, number) for number, (token, _) in enumerate(vocab)]


def first_difference(target: dict[int, str], draft: dict[int, str]) -> str:
    """What differs at the lowest id; "" where all tokens are equal."""
    for number in sorted(target.keys() | draft.keys()):
        ours, theirs = target.get(number), draft.get(number)
        if ours != theirs:
            return f"token {number} is {ours!r} in the target and {theirs!r} in the draft"
    return ""
