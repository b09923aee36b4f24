# SPDX-License-Identifier: Apache-2.0
"""Rules on Python source, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath

from house_rules.source_file import Finding, SourceFile

PRODUCT_FOLDERS = ("fusion_registry", "megatron/gdn", "tools")
ENVIRONMENT_MODULE = PurePosixPath("megatron/gdn/environment.py")
PRIVATE_NAMES_MODULE = PurePosixPath("megatron/gdn/megatron_core_0_19.py")
# Imports go one way: tools -> megatron.gdn -> fusion_registry. The tests sit above all of them.
FORBIDDEN_IMPORTS = {
    "fusion_registry": ("megatron", "tools", "tests", "house_rules"),
    "megatron/gdn": ("tools", "tests", "house_rules"),
    "tools": ("tests", "house_rules"),
}
HEAVY_PACKAGES = ("torch", "triton")
MEGATRON_PACKAGES = ("megatron.core", "megatron.training")
_ENVIRONMENT_NAMES = frozenset(
    {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"},
)


def no_assert(file: SourceFile) -> Iterator[Finding]:
    """`fusion_registry` raises for what a user can get wrong; `python -O` drops an assert."""
    if not file.is_below("fusion_registry") or file.tree is None:
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Assert):
            yield Finding(
                "no-assert",
                file.path,
                node.lineno,
                "assert in fusion_registry",
                "raise ValueError with the rule, the value and the remedy",
            )


def environment(file: SourceFile) -> Iterator[Finding]:
    """Environment variables are touched in one module, where a reader finds them all."""
    if not file.is_below(*PRODUCT_FOLDERS) or file.path == ENVIRONMENT_MODULE or file.tree is None:
        return
    os_names = {
        alias.asname or alias.name
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os"
    }
    for node in ast.walk(file.tree):
        name = None
        if isinstance(node, ast.ImportFrom) and node.module == "os" and not node.level:
            name = next((a.name for a in node.names if a.name in _ENVIRONMENT_NAMES), None)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in _ENVIRONMENT_NAMES
            and isinstance(node.value, ast.Name)
            and node.value.id in os_names
        ):
            name = node.attr
        if name is not None:
            yield Finding(
                "environment",
                file.path,
                _line(node),
                f"os.{name} outside {ENVIRONMENT_MODULE}",
                "add a named function there and call it",
            )


def import_direction(file: SourceFile) -> Iterator[Finding]:
    """tools -> megatron.gdn -> fusion_registry, and never back, not even inside a function."""
    if file.tree is None:
        return
    for folder, forbidden in FORBIDDEN_IMPORTS.items():
        if not file.is_below(folder):
            continue
        for node in ast.walk(file.tree):
            for module in _imported_modules(node):
                if _is_in(module, forbidden):
                    yield Finding(
                        "import-direction",
                        file.path,
                        _line(node),
                        f"{folder} imports {module}",
                        "imports go tools -> megatron.gdn -> fusion_registry: move the code, "
                        "or pass the object in",
                    )


def light_import(file: SourceFile) -> Iterator[Finding]:
    """Importing `fusion_registry` imports neither torch nor triton."""
    if not file.is_below("fusion_registry") or file.tree is None:
        return
    for node in _run_at_import(file.tree.body):
        for module in _imported_modules(node):
            if _is_in(module, HEAVY_PACKAGES):
                yield Finding(
                    "light-import",
                    file.path,
                    _line(node),
                    f"fusion_registry imports {module} at module level",
                    "import it in the function that needs it, or under TYPE_CHECKING",
                )


def private_megatron(file: SourceFile) -> Iterator[Finding]:
    """Private names of megatron-core stay in the module that says for which version they hold."""
    if (
        not file.is_below(*PRODUCT_FOLDERS)
        or file.path == PRIVATE_NAMES_MODULE
        or file.tree is None
    ):
        return
    imported: set[str] = set()
    for node in ast.walk(file.tree):
        for name in _megatron_names(node):
            if any(_is_private(part) for part in name.split(".")):
                yield _private_finding(file, node, name)
        if isinstance(node, ast.ImportFrom) and _is_in(node.module or "", MEGATRON_PACKAGES):
            imported.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            imported.update(
                alias.asname
                for alias in node.names
                if alias.asname and _is_in(alias.name, MEGATRON_PACKAGES)
            )
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner.split(".")[0] in imported or _is_in(owner, MEGATRON_PACKAGES):
                yield _private_finding(file, node, f"{owner}.{node.attr}")


def _private_finding(file: SourceFile, node: ast.AST, name: str) -> Finding:
    return Finding(
        "private-megatron",
        file.path,
        _line(node),
        f"private name {name}",
        f"use it in {PRIVATE_NAMES_MODULE} and import from there",
    )


def _megatron_names(node: ast.AST) -> Iterator[str]:
    """Dotted names below megatron-core that an import statement asks for."""
    if isinstance(node, ast.Import):
        yield from (a.name for a in node.names if _is_in(a.name, MEGATRON_PACKAGES))
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if _is_in(name, MEGATRON_PACKAGES):
                yield name


def _imported_modules(node: ast.AST) -> Iterator[str]:
    """Modules that a node imports by absolute name; nothing if it is no import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield node.module


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, no TYPE_CHECKING block."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _line(node: ast.AST) -> int:
    line: int = getattr(node, "lineno", 1)
    return line
