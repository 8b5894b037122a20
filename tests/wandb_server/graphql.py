"""As much of GraphQL as W&B's client needs: operations, aliases, fragments; arguments are left to the resolvers.

A field that nobody resolves raises :class:`UnknownFieldError`, so that the server never makes up an answer.
"""

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r'"""[\s\S]*?"""|"(?:\\.|[^"\\])*"|\.\.\.|[A-Za-z_]\w*|[{}():@$!=,\[\]|&]|-?\d[\d.eE+-]*|#[^\n]*')


class UnknownFieldError(LookupError):
    """A field without a resolver; its text is the operation and the path."""


@dataclass
class Field:
    name: str
    alias: str
    fields: list = field(default_factory=list)


@dataclass
class Spread:
    fragment: str = ""
    on: str = ""
    fields: list = field(default_factory=list)


@dataclass
class Document:
    operation: str
    fields: list
    fragments: dict


def parse(text):
    tokens = [t for t in _TOKEN.findall(text) if not t.startswith("#") and t != ","]
    name, fields, fragments = "", [], {}
    at = 0
    while at < len(tokens):
        word = tokens[at]
        if word in ("query", "mutation"):
            name = tokens[at + 1] if tokens[at + 1] not in "({" else ""
            at = _skip_arguments(tokens, at + (2 if name else 1))
            fields, at = _selection(tokens, at)
        elif word == "fragment":
            fragment, at = tokens[at + 1], tokens.index("{", at)
            fragments[fragment], at = _selection(tokens, at)
        elif word == "{":
            fields, at = _selection(tokens, at)
        else:
            raise ValueError(f"not a GraphQL document at {word!r}: {text[:200]}")
    return Document(name, fields, fragments)


def _skip_arguments(tokens, at):
    if at < len(tokens) and tokens[at] == "(":
        depth = 0
        while True:
            depth += {"(": 1, ")": -1}.get(tokens[at], 0)
            at += 1
            if not depth:
                break
    return at


def _selection(tokens, at):
    found = []
    at += 1
    while tokens[at] != "}":
        if tokens[at] == "...":
            spread = Spread()
            at += 1
            if tokens[at] == "on":
                spread.on, at = tokens[at + 1], at + 2
            elif tokens[at] not in "{@":
                spread.fragment, at = tokens[at], at + 1
            node = spread
        else:
            name = alias = tokens[at]
            at += 1
            if tokens[at] == ":":
                name, at = tokens[at + 1], at + 2
            at = _skip_arguments(tokens, at)
            node = Field(name, alias)
        while tokens[at] == "@":
            at = _skip_arguments(tokens, at + 2)
        if tokens[at] == "{":
            node.fields, at = _selection(tokens, at)
        found.append(node)
    return found, at + 1


def execute(document, root, variables):
    """The answer to a document: ``root`` maps fields to values or to functions of the variables."""
    return _resolve(document, document.fields, root, variables, document.operation)


def _resolve(document, fields, value, variables, path):
    if value is None:
        return None
    if isinstance(value, list):
        return [_resolve(document, fields, item, variables, path) for item in value]
    if not fields:
        return value
    answer = {}
    for node in fields:
        if isinstance(node, Spread):
            if not node.on or value.get("__typename", node.on) == node.on:
                inner = document.fragments[node.fragment] if node.fragment else node.fields
                answer |= _resolve(document, inner, value, variables, path)
            continue
        if node.name == "__typename":
            answer[node.alias] = value.get("__typename", "Object")
            continue
        where = f"{path}.{node.name}"
        if node.name not in value:
            raise UnknownFieldError(where)
        found = value[node.name]
        found = found(variables) if callable(found) else found
        answer[node.alias] = _resolve(document, node.fields, found, variables, where)
    return answer
