"""Makes command-line flags from the fields of a dataclass, sorted into topics.

The invariant: name, type, default and help of a flag are its field's. Nothing here knows a field by its name.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec


def by_topic[T](kind: type[T], topics: Mapping[str, str]) -> Callable[..., T]:
    """A constructor of `kind` that tyro shows as one group of flags per topic.

    Args:
        kind: a dataclass; what its annotations tell tyro holds.
        topics: the field each topic begins at, in the order of the fields.
    """

    def construct(**groups: Any) -> T:
        return kind(**{name: value for group in groups.values() for name, value in get_fields(group).items()})

    construct.__annotations__ = {
        topic.replace(" ", "_"): Annotated[_make_group(topic, members, kind), arg(name=topic)]
        for topic, members in _split(kind, topics).items()
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword) for name in construct.__annotations__]
    vars(construct)["__signature__"] = inspect.Signature(parameters)
    return construct


def commas(parse: Callable[[str], Any], metavar: str = "N") -> PrimitiveConstructorSpec[tuple[Any, ...]]:
    """A flag of several values in one word, "1,64": it swallows nothing behind it.

    Args:
        parse: makes one value of its text; ValueError is a mistake of who typed it.
        metavar: what stands for one value in help.
    """
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{metavar}[,{metavar}...]",
        instance_from_str=lambda words: tuple(parse(text) for text in words[0].split(",")),
        is_instance=lambda value: isinstance(value, tuple | None),
        str_from_instance=lambda values: [str(values) if values is None else ",".join(map(str, values))],
    )


def pairs(
    key: Callable[[str], Any], value: Callable[[str], Any], metavar: str
) -> PrimitiveConstructorSpec[dict[Any, Any]]:
    """A flag of several named values in one word, "5:1.5,17:-2".

    Args:
        key: makes the name of its text; ValueError is a mistake of who typed it.
        value: likewise.
        metavar: what stands for one pair in help.
    """

    def parse(words: list[str]) -> dict[Any, Any]:
        parts = (word.partition(":") for word in words[0].split(","))
        return {key(name): value(text) for name, _, text in parts}

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{metavar}[,{metavar}...]",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, dict | None),
        str_from_instance=lambda value: [str(value)],
    )


class Unchecked[S]:
    """Flags of settings that are checked by `make_settings` only: earlier, the message would name tyro's insides."""

    def __post_init__(self) -> None:
        """In place of the settings' own."""

    def make_settings(self) -> S:
        """The settings, checked.

        Raises:
            ValueError: one of them is not valid.
        """
        kinds = (kind for kind in type(self).__mro__ if dataclasses.is_dataclass(kind))
        settings = next(kind for kind in kinds if not issubclass(kind, Unchecked))
        return cast(S, settings(**get_fields(self)))


def get_fields(instance: Any) -> dict[str, Any]:
    """The fields of a dataclass as keyword arguments."""
    return {item.name: getattr(instance, item.name) for item in dataclasses.fields(instance)}


def get_docs(kind: type) -> dict[str, str]:
    """The texts below the fields of a dataclass and of those it inherits from."""
    docs: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if dataclasses.is_dataclass(cls):
            docs |= _own_docs(cls)
    return docs


@functools.cache
def _own_docs(kind: type) -> dict[str, str]:
    """Read from the source: Python does not keep them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in itertools.pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = " ".join(doc.split())
    return docs


def _split(kind: Any, topics: Mapping[str, str]) -> dict[str, list[dataclasses.Field]]:
    """The fields of each topic."""
    topic_at = {name: topic for topic, name in topics.items()}
    groups: dict[str, list[dataclasses.Field]] = {}
    for item in dataclasses.fields(kind):
        if item.name in topic_at:
            groups[topic_at[item.name]] = []
        assert groups, f"{kind.__name__} begins with {item.name}, which is in no topic"
        groups[next(reversed(groups))].append(item)
    assert groups.keys() == topics.keys(), f"topics of {kind.__name__} begin at fields that do not exist"
    return groups


def _make_group(topic: str, members: list[dataclasses.Field], kind: type) -> type:
    hints, docs = get_type_hints(kind, include_extras=True), get_docs(kind)
    fields = []
    for item in members:
        flag = arg(
            help=docs.get(item.name),
            metavar=_metavar(hints[item.name], item.default),
            # The text says what None stands for.
            help_behavior_hint="" if item.default is None else None,
        )
        fields.append((item.name, Annotated[hints[item.name], flag], dataclasses.field(default=item.default)))
    group = dataclasses.make_dataclass(topic, fields, frozen=True)
    group.__doc__ = ""
    return group


def _metavar(hint: Any, default: Any) -> str | None:
    """What stands for a value of one of several kinds, INT|auto for example; None where tyro's own is right."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if not any(one is NoneType or get_origin(one) is Literal for one in kinds):
        return None
    names: list[str] = []
    for one in kinds:
        if get_origin(one) is Literal:
            names += map(str, get_args(one))
        elif not isinstance(one, type):
            return None
        elif one is not NoneType:
            names.append(one.__name__.upper())
    return "|".join(names if default is None or NoneType not in kinds else [*names, "None"])
