"""Reads declarations of the package from its source: classes, fields, methods, and the docstrings beside them.

`generate` renders them. The source is parsed, not imported: Python keeps no docstrings of fields, and importing the
engines would import torch.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_server.server.http.field_docs import docs_in

PACKAGE = "verl_server"
_DATA_BASES = {"Struct", "TypedDict", "StrEnum"}
_BOUNDS = {
    "gt": "more than {}",
    "ge": "at least {}",
    "lt": "less than {}",
    "le": "at most {}",
    "min_length": "length at least {}",
    "max_length": "length at most {}",
}
"""Bounds of `msgspec.Meta`, in words."""


@dataclass(frozen=True)
class ClassName:
    """A class of the package."""

    module: str
    """Dotted name of the module that defines the class."""
    name: str


@dataclass(frozen=True)
class Field:
    """A field of a class, or an option of a command."""

    name: str
    type: str
    default: str | None
    """Source of the default; None if the field has none."""
    doc: str
    classes: tuple[ClassName, ...]
    """Classes in the type."""
    option_name: str | None = None
    """Name on the command line where it is another one (`tyro.conf.arg`)."""


@dataclass(frozen=True)
class Function:
    """A function or method."""

    name: str
    signature: str
    doc: str
    classes: tuple[ClassName, ...]
    """Classes in the signature."""


class Module:
    """One module of the package, parsed."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        path = root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.doc = ast.get_docstring(self.tree) or ""
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        """Local name to (module, name there), also for imports under TYPE_CHECKING."""
        for node in self._statements(self.tree.body):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.definitions[node.targets[0].id] = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.definitions[node.target.id] = node
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}

    def _statements(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            yield node
            if isinstance(node, ast.If):
                yield from self._statements(node.body)


class Package:
    """The modules below `root`, parsed when they are needed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @functools.cache  # noqa: B019 - a package lives as long as the program
    def module(self, name: str) -> Module:
        return Module(self._root, name)

    def resolve(self, module: str, name: str) -> tuple[Module, ast.stmt] | None:
        """Return the module and the statement that define `name`, as `module` uses it; None if no module here does."""
        here = self.module(module)
        if name in here.definitions:
            return here, here.definitions[name]
        if name in here.imports:
            source, original = here.imports[name]
            if source.split(".")[0] == PACKAGE:
                return self.resolve(source, original)
        return None

    def class_of(self, module: str, name: str) -> Class:
        """The class that `module` calls `name`; it may import it."""
        found = self.resolve(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            raise LookupError(f"{module} has no class {name} of this package.")
        return Class(self, found[0], found[1])

    def find_class(self, folder: str, name: str) -> Class:
        """The only class called `name` below a package such as "verl_server.server"."""
        found = []
        for path in sorted(self._root.joinpath(*folder.split(".")).rglob("*.py")):
            parts = path.relative_to(self._root).with_suffix("").parts
            module = self.module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            if isinstance(node := module.definitions.get(name), ast.ClassDef):
                found.append(Class(self, module, node))
        if len(found) != 1:
            raise LookupError(f"{folder} has {len(found)} classes {name}, not one.")
        return found[0]

    def function(self, module: str, name: str) -> Function:
        found = self.resolve(module, name)
        if found is None or not isinstance(found[1], ast.FunctionDef | ast.AsyncFunctionDef):
            raise LookupError(f"{module} has no function {name} of this package.")
        return self.read_function(*found)  # type: ignore[arg-type]

    def read_function(self, module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
        decorators = [ast.unparse(d) for d in node.decorator_list if ast.unparse(d) in ("property", "classmethod")]
        prefix = "".join(f"@{d}\n" for d in decorators) + ("async " if isinstance(node, ast.AsyncFunctionDef) else "")
        parameters = _parameters(node.args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        line = f"def {node.name}({', '.join(parameters)}){returns}"
        if len(line) > 100:
            line = f"def {node.name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){returns}"
        annotations = [node.returns, *(arg.annotation for arg in _all_arguments(node.args))]
        classes = tuple(name for a in annotations if a is not None for name in self.classes_in(module, a))
        return Function(node.name, prefix + line, ast.get_docstring(node) or "", classes)

    def classes_in(self, module: Module, annotation: ast.expr) -> list[ClassName]:
        """Classes of this package in an annotation, those behind aliases included."""
        names: list[ClassName] = []
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name) and (found := self.resolve(module.name, node.id)):
                home, definition = found
                if isinstance(definition, ast.ClassDef):
                    names.append(ClassName(home.name, definition.name))
                elif isinstance(definition, ast.Assign):
                    names += self.classes_in(home, definition.value)
        return names

    def type_text(self, module: Module, annotation: ast.expr) -> tuple[str, list[str]]:
        """(an annotation with aliases and literals written out, the bounds of `msgspec.Meta` in it)."""
        expand = _Expand(self, module)
        return ast.unparse(expand.visit(ast.parse(ast.unparse(annotation), mode="eval").body)), expand.bounds

    def value_text(self, module: Module, node: ast.expr) -> str | None:
        """The source of a default: arithmetic is evaluated, constants of modules are replaced by their values.

        None for a `field(...)` that sets no default.
        """
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("field", "dataclasses.field"):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            if "default" in given:
                return self.value_text(module, given["default"])
            factory = given.get("default_factory")
            if factory is None:
                return None
            return ast.unparse(factory.body) if isinstance(factory, ast.Lambda) else f"{ast.unparse(factory)}()"
        if isinstance(node, ast.Name) and (found := self.resolve(module.name, node.id)):
            home, definition = found
            if isinstance(definition, ast.Assign | ast.AnnAssign) and definition.value is not None:
                return self.value_text(home, definition.value)
        if isinstance(node, ast.BinOp) and all(
            isinstance(n, ast.BinOp | ast.Constant | ast.operator) for n in ast.walk(node)
        ):
            return repr(eval(compile(ast.Expression(node), "default", "eval")))
        return ast.unparse(node)


class Class:
    """A class of the package."""

    def __init__(self, package: Package, module: Module, node: ast.ClassDef) -> None:
        self._package, self.module, self._node = package, module, node
        self.name = node.name
        self.doc = ast.get_docstring(node) or ""

    @property
    def bases(self) -> list[Class]:
        """Base classes of this package."""
        names = [base.id for base in self._node.bases if isinstance(base, ast.Name)]
        found = [self._package.resolve(self.module.name, name) for name in names]
        return [Class(self._package, f[0], f[1]) for f in found if f is not None and isinstance(f[1], ast.ClassDef)]

    @property
    def is_data(self) -> bool:
        """True for structs, typed dicts, enumerations and dataclasses: what is described by its fields."""
        bases = {ast.unparse(base).split(".")[-1] for base in self._node.bases}
        dataclass = any("dataclass" in ast.unparse(d) for d in self._node.decorator_list)
        return bool(bases & _DATA_BASES) or dataclass or any(base.is_data for base in self.bases)

    @property
    def is_typed_dict(self) -> bool:
        bases = {ast.unparse(base) for base in self._node.bases}
        return "TypedDict" in bases or any(base.is_typed_dict for base in self.bases)

    def constant(self, name: str) -> Any:
        """The value of a class variable such as a request's `route`; None if there is none."""
        for node in self._node.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
                return ast.literal_eval(node.value)
        return None

    def fields(self) -> list[Field]:
        """Fields in order, those of base classes first."""
        fields = {field.name: field for base in self.bases for field in base.fields()}
        docs = docs_in(self._node.body)
        for node in self._node.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):  # a member of an enumeration
                member = node.targets[0].id
                fields[member] = Field(member, "", ast.unparse(node.value), docs.get(member, ""), ())
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            name, annotation = node.target.id, ast.unparse(node.annotation)
            if name.startswith("_") or annotation.startswith("ClassVar"):
                continue
            text, bounds = self._package.type_text(self.module, node.annotation)
            default = None if node.value is None else self._package.value_text(self.module, node.value)
            classes = tuple(self._package.classes_in(self.module, node.annotation))
            doc = docs.get(name, "")
            doc = f"{doc} ({', '.join(bounds)})".strip() if bounds else doc
            fields[name] = Field(name, text, default, doc, classes, _option_name(node.annotation))
        return list(fields.values())

    def methods(self, *, inherited: bool = False) -> list[Function]:
        """Public methods in order, and the constructor if it has parameters.

        With `inherited` those of base classes are among them; without, methods that override one are left out.
        """
        methods = {method.name: method for base in self.bases for method in base.methods(inherited=True)}
        methods.pop("__init__", None)
        own: dict[str, Function] = {}
        for node in self._node.body:
            if (wrapped := self._wrapped(node)) is not None:
                own[wrapped.name] = wrapped
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_overload = any(ast.unparse(d) == "overload" for d in node.decorator_list)
            if is_overload or (node.name.startswith("_") and node.name != "__init__"):
                continue
            method = self._package.read_function(self.module, node)
            if node.name == "__init__" and method.signature.startswith("def __init__()"):
                continue
            if inherited or node.name not in methods:
                own[node.name] = method
        return list((methods | own if inherited else own).values())

    def _wrapped(self, node: ast.stmt) -> Function | None:
        """The method of another class that `name = wrapper(OtherClass.name)` wraps; None for any other statement."""
        match node:
            case ast.Assign(value=ast.Call(args=[ast.Attribute(value=ast.Name(id=other), attr=name)])):
                methods = self._package.class_of(self.module.name, other).methods(inherited=True)
                return next(method for method in methods if method.name == name)
        return None


class _Expand(ast.NodeTransformer):
    """Writes aliases, `Literal`s and `Annotated`s of an annotation out."""

    def __init__(self, package: Package, module: Module) -> None:
        self._package, self._module = package, module
        self.bounds: list[str] = []

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self._package.resolve(self._module.name, node.id)
        if found is None or not isinstance(found[1], ast.Assign):
            return node
        outer, self._module = self._module, found[0]
        expanded: ast.expr = self.visit(ast.parse(ast.unparse(found[1].value), mode="eval").body)
        self._module = outer
        return expanded

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        kind = ast.unparse(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if kind == "Literal":
            return _union(parts)
        if kind == "Annotated":
            for meta in parts[1:]:
                if isinstance(meta, ast.Call) and ast.unparse(meta.func).endswith("Meta"):
                    self.bounds += [text for k in meta.keywords if (text := self._bound(str(k.arg), k.value))]
            inner: ast.expr = self.visit(parts[0])
            return inner
        if kind in ("NotRequired", "Required"):
            optional: ast.expr = self.visit(parts[0])
            return optional
        self.generic_visit(node)
        return node

    def _bound(self, kind: str, node: ast.expr) -> str:
        """A bound in words; "" for one that is only the range of an integer."""
        value = self._package.value_text(self._module, node) or ""
        if kind not in _BOUNDS or (value.isdigit() and int(value) >= 2**31 - 1):
            return ""
        return _BOUNDS[kind].format(value)


def _option_name(annotation: ast.expr) -> str | None:
    for node in ast.walk(annotation):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tyro.conf.arg":
            return next((ast.literal_eval(k.value) for k in node.keywords if k.arg == "name"), None)
    return None


def _union(parts: list[ast.expr]) -> ast.expr:
    result = parts[0]
    for part in parts[1:]:
        result = ast.BinOp(result, ast.BitOr(), part)
    return result


def _all_arguments(arguments: ast.arguments) -> list[ast.arg]:
    several = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *several]


def _parameters(arguments: ast.arguments) -> list[str]:
    """The parameters of a signature as source, without `self` and `cls`."""
    parts: list[str] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults  # type: ignore[list-item]
    parts += [_parameter(a, d) for a, d in zip(positional, defaults, strict=True) if a.arg not in ("self", "cls")]
    if arguments.vararg:
        parts.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        parts.append("*")
    parts += [_parameter(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        parts.append("**" + _parameter(arguments.kwarg, None))
    return parts


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    if default is None:
        return argument.arg + annotation
    return f"{argument.arg}{annotation}{' = ' if annotation else '='}{ast.unparse(default)}"
