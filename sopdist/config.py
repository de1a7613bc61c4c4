"""Typed configs: a YAML file and `key=value` overrides become nested dataclasses, or an error that names the key.

A section is a frozen dataclass, declared next to the code it configures. The comment next to a field is its
documentation, both in the source and in `--help-config`. This module is independent of any particular section.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import io
import textwrap
import tokenize
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from .errors import ConfigError

Section = TypeVar("Section")

_YAML_WORDS = {False: ("off", "no"), True: ("on", "yes")}


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Marks a section whose key `name` decides which other keys it has: `Annotated[Base, OneOf(kinds, "default")]`."""

    kinds: Callable[[], Mapping[str, type[Any]]]  # the dataclass for each name
    default: str


def load_config(
    kind: type[Section],
    path: Path,
    overrides: Sequence[str] = (),
    upgrade: Callable[[dict[Any, Any]], dict[Any, Any]] = lambda tree: tree,
) -> Section:
    """Read a YAML file, apply `key=value` overrides in order, and check everything against `kind`.

    `upgrade` translates files of older versions.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must consist of `section:` lines, found {type(tree).__name__}")
    tree = upgrade(tree)
    for override in overrides:
        _apply(tree, override)
    return build(kind, tree)


def build(kind: type[Section], tree: Mapping[Any, Any], where: str = "") -> Section:
    """Build a section, and the sections nested in it, from plain values."""
    fields = {key_of(field): field for field in dataclasses.fields(cast(Any, kind))}
    for key in tree:
        if key not in fields:
            raise ConfigError(f"{where}{key}: no such key; {_nearest(str(key), fields, where)}")
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for key, value in tree.items():
        values[fields[key].name] = _checked(hints[fields[key].name], value, f"{where}{key}")
    for field in fields.values():
        name = field.name
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            if _is_section(hints[name]):
                values[name] = _checked(hints[name], {}, f"{where}{name}")
            else:
                raise ConfigError(f"{where}{name}: must be set: {comments_of(kind).get(name, 'it has no default')}")
    return kind(**values)


def key_of(field: dataclasses.Field[Any]) -> str:
    """The config key of a field, without the trailing underscore of names such as `async_`, a keyword in Python."""
    return field.name.removesuffix("_")


def to_tree(section: Any) -> dict[str, Any]:
    """Convert a section to plain values, for YAML and JSON. `build` is the inverse."""
    values = {key_of(field): getattr(section, field.name) for field in dataclasses.fields(section)}
    return {key: to_tree(value) if dataclasses.is_dataclass(value) else _plain(value) for key, value in values.items()}


def changed(section: Section, key: str, value: Any) -> Section:
    """Return a copy of the section with the value at key `a.b.c` replaced."""
    name, _, rest = key.partition(".")
    inside = changed(getattr(section, name), rest, value) if rest else value
    return cast(Section, dataclasses.replace(cast(Any, section), **{name: inside}))


def to_yaml(section: Any) -> str:
    """The section as the text of a YAML file."""
    text: str = yaml.safe_dump(to_tree(section), sort_keys=False, allow_unicode=True)
    return text


def describe(kind: type[Any], where: str = "", omit: Collection[str] = ()) -> str:
    """Describe every key, except those in `omit`, with its type, default and meaning: the output of `--help-config`."""
    lines = []
    hints, comments = get_type_hints(kind, include_extras=True), comments_of(kind)
    for field in dataclasses.fields(kind):
        if key_of(field) in omit:
            continue
        hint = hints[field.name]
        one_of = _one_of(hint)
        if one_of is not None:
            lines += _describe_one_of(one_of, f"{where}{field.name}")
            continue
        if dataclasses.is_dataclass(hint):
            about = (inspect.getdoc(hint) or "").splitlines()[0]
            lines += ["", f"# {about}", describe(cast("type[Any]", hint), f"{where}{field.name}.")]
            continue
        lines.append(f"{where}{key_of(field)}: {_type_name(hint)}{_default(field)}")
        lines += textwrap.wrap(comments.get(field.name, ""), 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def comments_of(kind: Any) -> dict[str, str]:
    """The comment next to each field of a dataclass, by field name, including inherited fields."""
    bases = [base for base in reversed(kind.__mro__) if dataclasses.is_dataclass(base)]
    return {name: text for base in bases for name, text in _comments_in(base).items()}


def _comments_in(kind: Any) -> dict[str, str]:
    """Of the fields that this class declares itself."""
    source = textwrap.dedent(inspect.getsource(kind))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.target.id: comments[node.end_lineno or node.lineno]
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno in comments
    }


def _apply(tree: dict[Any, Any], override: str) -> None:
    """Apply an override `a.b=value` to the tree. The value is parsed as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override}: not of the form key=value")
    try:
        value = yaml.safe_load(text) if text else ""  # `key=` sets an empty string, `key=null` sets null
    except yaml.YAMLError:
        value = text
    *sections, name = key.split(".")
    for depth, section in enumerate(sections):
        inside = tree.setdefault(section, {})
        if inside is None:
            inside = tree[section] = {}
        if not isinstance(inside, dict):
            raise ConfigError(f"{override}: {'.'.join(sections[: depth + 1])} is a value, not a section")
        tree = inside
    tree[name] = value


def _checked(hint: Any, value: Any, where: str) -> Any:
    """Check the value against its type and return it, converted if that loses nothing."""
    if dataclasses.is_dataclass(hint):
        if isinstance(value, cast("type[Any]", hint)):
            return value
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{where}: is a section with its own keys, but was set to {value!r}")
        return build(cast("type[Any]", hint), value or {}, f"{where}.")
    one_of = _one_of(hint)
    if one_of is not None:
        return _checked_one_of(one_of, value, where)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _first_match(args, value, where, hint)
    if origin is Literal:
        if isinstance(value, bool):  # YAML parses off and no as false, on and yes as true
            value = next((word for word in _YAML_WORDS[value] if word in args), value)
        if value in args and type(value) in {type(arg) for arg in args}:
            return value
        near = difflib.get_close_matches(str(value), [str(arg) for arg in args], 1)
        hint_text = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{where} = {value!r}: must be one of {', '.join(map(str, args))}{hint_text}")
    if origin in (list, tuple):
        return _sequence(origin, args, value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} = {value!r}: must be a mapping of `name: value` lines")
        return {_checked(args[0], k, where): _checked(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML parses 1e-3 as a string, because it has no dot
        try:
            return float(value)
        except ValueError:
            pass
    if hint is type(None) and value is None:
        return None
    if type(value) is hint:
        return value
    raise ConfigError(f"{where} = {value!r}: expected {_type_name(hint)}")


def _one_of(hint: Any) -> OneOf | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((extra for extra in get_args(hint)[1:] if isinstance(extra, OneOf)), None)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or _one_of(hint) is not None


def _checked_one_of(one_of: OneOf, value: Any, where: str) -> Any:
    """The section of the kind that `name` chooses. A key of another kind is an error that names that kind."""
    if dataclasses.is_dataclass(value):
        return value
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: is a section with its own keys, but was set to {value!r}")
    tree, kinds = value or {}, one_of.kinds()
    name = _checked(Literal[tuple(kinds)], tree.get("name", one_of.default), f"{where}.name")
    for key in tree:
        if key not in keys_of(kinds[name]):
            owners = [other for other, kind in kinds.items() if key in keys_of(kind)]
            if owners:
                raise ConfigError(
                    f"{where}.{key}: belongs to {where}.name = {' or '.join(owners)}, not to {name}; remove it, "
                    f"or set {where}.name={owners[0]}"
                )
    return build(kinds[name], {"name": name, **tree}, f"{where}.")


def keys_of(kind: type[Any]) -> set[str]:
    """The keys of a section in a config."""
    return {key_of(field) for field in dataclasses.fields(kind)}


def _describe_one_of(one_of: OneOf, where: str) -> list[str]:
    kinds = one_of.kinds()
    lines = ["", f"{where}.name: {' | '.join(kinds)} = {one_of.default!r}"]
    for name, kind in kinds.items():
        about = (inspect.getdoc(kind) or "").splitlines()[0]
        lines += ["", f"# {where}.name = {name}: {about}"]
        lines += describe(kind, f"{where}.", omit=("name",)).splitlines()
    return lines


def _first_match(hints: Sequence[Any], value: Any, where: str, union: Any) -> Any:
    for hint in hints:
        try:
            return _checked(hint, value, where)
        except ConfigError:
            continue
    raise ConfigError(f"{where} = {value!r}: expected {_type_name(union)}")


def _sequence(origin: Any, args: Sequence[Any], value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} = {value!r}: must be a list, [a, b, ...]")
    any_length = origin is list or args[-1] is Ellipsis
    if not any_length and len(value) != len(args):
        raise ConfigError(f"{where} = {value!r}: must have {len(args)} entries")
    hints = [args[0]] * len(value) if any_length else args
    return origin(
        _checked(hint, entry, f"{where}[{n}]") for n, (hint, entry) in enumerate(zip(hints, value, strict=True))
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return {key: _plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def _nearest(key: str, known: Mapping[str, Any], where: str) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f"did you mean {where}{near[0]}?" if near else f"valid keys: {', '.join(where + name for name in known)}"


def _type_name(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_type_name, args))
    if origin in (list, tuple, dict):
        return f"{origin.__name__} of {', '.join(_type_name(arg) for arg in args if arg is not Ellipsis)}"
    names = {str: "string", int: "integer", float: "number", bool: "true | false", type(None): "null"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {_plain(field.default)!r}"
    if field.default_factory is not dataclasses.MISSING:
        return f" = {_plain(field.default_factory())!r}"
    return " (must be set)"
