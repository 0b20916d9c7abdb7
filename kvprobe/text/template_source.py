"""What the source of a chat template says: the arguments it takes, the fields it reads, the words it looks for."""

import re
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import Environment, meta, nodes

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A statement of transformers alone, which only marks what the model says."""


@dataclass(frozen=True)
class TemplateSource:
    """Facts of a template, without running it.

    Attributes:
        arguments: variables that a caller can give.
        words: string constants and names of fields: what it can ask of a message.
        sought: what matches each constant that it may look for in a text, the longest first.
    """

    arguments: frozenset[str]
    words: frozenset[str]
    sought: re.Pattern[str]


@lru_cache(maxsize=64)
def template_source(template: str) -> TemplateSource:
    """Raises jinja2's TemplateError where the source is no template."""
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", template))
    constants = {str(constant.value) for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
    fields = {attribute.attr for attribute in tree.find_all(nodes.Getattr)}
    assigned = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    optional = {
        asked.node.name
        for asked in (*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter))
        if asked.name in ("defined", "undefined", "default", "d") and isinstance(asked.node, nodes.Name)
    }
    given = {"messages", "raise_exception", "strftime_now"}
    arguments = {
        name
        for name in meta.find_undeclared_variables(tree)
        if name not in given and (name in optional or name not in assigned)
    }
    sought = "|".join(re.escape(constant) for constant in sorted(constants - {""}, key=len, reverse=True))
    return TemplateSource(frozenset(arguments), frozenset(constants | fields), re.compile(sought or r"(?!)"))
