"""Hugging Face folders of target and draft, and their tokenizers' content."""

from __future__ import annotations

from pathlib import Path

from ...engines import architectures
from ...engines.engine_folder import DraftEngine, EngineFolderError
from ...engines.tokens import TOKENIZER, TokensError, first_difference, read_tokens
from .finding import Finding, failed, ok, unknown
from .subject import Subject


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
    """By content; where the draft is an engine alone, its own check compares fingerprints."""
    name, places = "tokenizers", subject.places
    target, draft = places.target_model / TOKENIZER, places.draft_model / TOKENIZER
    if not target.is_file():
        return unknown(name, f"{target} does not exist yet")
    if draft.is_file():
        return _compare(subject, target, draft)
    told = f"{draft} does not exist"
    return unknown(name, f"{told}; see draft engine" if _engine(subject) else f"{told} yet")


def _compare(subject: Subject, target: Path, draft: Path) -> Finding:
    name, remedy = "tokenizers", "choose a draft that was trained with the target's tokenizer"
    try:
        ours, theirs = read_tokens(target), read_tokens(draft)
    except TokensError as error:
        return failed(name, str(error), f"download it again below {subject.places.root}")
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
