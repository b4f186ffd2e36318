"""A check by JSON Schema, for the keywords that the chart uses; any other is refused."""

import re

KEYWORDS = {
    "type", "properties", "required", "additionalProperties", "items", "enum", "not", "pattern",
    "minimum", "maximum", "minLength", "$schema", "title",
}  # fmt: skip
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}


def complaints(value: object, schema: dict, place: str = "values") -> list[str]:
    """What is wrong with a value, each with its place; nothing where all is right."""
    assert set(schema) <= KEYWORDS, set(schema) - KEYWORDS
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (kind == "integer" and value is True)):
        return [f"{place} is no {kind}"]
    found = []
    if isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [
            f"{place}.{name} is absent" for name in set(schema.get("required", ())) - {*value}
        ]
        for name, each in value.items():
            if name not in properties and rest is False:
                found.append(f"{place}.{name} is unknown")
            else:
                inner = properties.get(name, rest if isinstance(rest, dict) else {})
                found += complaints(each, inner, f"{place}.{name}")
    if isinstance(value, list):
        for number, each in enumerate(value):
            found += complaints(each, schema.get("items", {}), f"{place}[{number}]")
    wrong = (
        value not in schema.get("enum", (value,)),
        "not" in schema and not complaints(value, schema["not"], place),
        isinstance(value, str) and not re.search(schema.get("pattern", ""), value),
        isinstance(value, str) and len(value) < schema.get("minLength", 0),
        isinstance(value, int) and not schema.get("minimum", value) <= value,
        isinstance(value, int) and not value <= schema.get("maximum", value),
    )
    return [*found, f"{place} is {value!r}"] if any(wrong) else found
