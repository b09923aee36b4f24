# SPDX-License-Identifier: Apache-2.0
"""Where declarations come from: built-in files, files that a user names, installed plug-ins."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_registry import Binding, FusionConfigError, Registry, Request, load_registry, select
from fusion_registry.registry import LARGEST_FILE
from tests.fusion_registry.toy_stages import CATALOGUE, ENTRY_POINT_GROUP, HERE

Write = Callable[..., Path]
BUILT_IN = ("built_in_lone", "built_in_first", "built_in_whole")


def declaration(name: str, stage: str = "lone", **changes: str) -> str:
    fields = {
        "name": name,
        "stage": stage,
        "implementation": f"{HERE}:fused_{stage}",
        "determinism": "unknown",
        "preconditions": "[]",
    } | changes
    return "- " + "\n  ".join(f"{key}: {value}" for key, value in fields.items())


def document(*declarations: str) -> str:
    return "fusions:\n" + "\n".join(declarations) + "\n"


class Plugins:
    """Installs distributions with entry points into a folder on `sys.path`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, name: str, module: str, yaml: str = "", target: str = "FUSIONS", metadata: bool = True
    ) -> None:
        """A package `name` whose `__init__` is `module`, with `fusions.yaml` beside it."""
        package = self.folder / name
        package.mkdir()
        (package / "__init__.py").write_text(textwrap.dedent(module))
        (package / "fusions.yaml").write_text(yaml)
        info = self.folder / f"{name}-1.0.dist-info"
        info.mkdir()
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[{ENTRY_POINT_GROUP}]\n{name}-point = {name}:{target}\n"
        )
        importlib.invalidate_caches()


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Plugins(folder)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(folder)):
            del sys.modules[name]


def load(*files: Path, plugins: bool = True) -> Registry:
    return load_registry(files, catalogue=CATALOGUE, plugins=plugins)


def bind(registry: Registry, stage: str, name: str) -> Binding:
    selection = select(registry, [Request(stage, (name,), None, "test")])
    return Binding(registry, selection.for_layer(1), 1)


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(FusionConfigError) as caught:
        action()
    return str(caught.value)


RESOURCE = "FUSIONS = 'fusions.yaml'"


# --- three sources, one code path


def test_three_sources_give_equal_declarations(plugins: Plugins, write: Write) -> None:
    plugins.install("toy_plugin", RESOURCE, document(declaration("from_plugin")))
    registry = load(write(document(declaration("from_file"))))
    assert tuple(registry.fusions) == (*BUILT_IN, "from_plugin", "from_file")
    kinds = [registry.fusion(name).origin.kind for name in registry.fusions]
    assert kinds == ["built-in"] * 3 + ["plug-in", "config file"]
    one, other = registry.fusion("from_plugin"), registry.fusion("from_file")
    assert one.declaration.model_copy(update={"name": "from_file"}) == other.declaration
    assert registry.broken_plugins == ()


@pytest.mark.parametrize("source", ["config file", "plug-in"])
def test_a_bad_document_is_refused_with_one_text_from_every_source(
    plugins: Plugins, write: Write, source: str
) -> None:
    text = document(declaration("mine", stage="loan"))
    fault = "fusions[0].stage: unknown stage 'loan'; did you mean 'lone'?"
    if source == "config file":
        assert f"mine.yaml:3: {fault}" in refusal(lambda: load(write(text)))
    else:
        plugins.install("toy_plugin", RESOURCE, text)
        (broken,) = load().broken_plugins
        assert f"fusions.yaml):3: {fault}" in broken.error


def test_origins_have_file_and_line(plugins: Plugins, write: Write) -> None:
    plugins.install("toy_plugin", RESOURCE, document(declaration("a"), declaration("b")))
    path = write("# comment\n" + document(declaration("c")))
    registry = load(path)
    assert str(registry.fusion("built_in_lone").origin) == (
        "tests/fusion_registry/toy_builtin/lone.yaml:3"
    )
    origin = registry.fusion("b").origin
    assert origin.line == 7
    assert origin.file.startswith("toy_plugin:FUSIONS (")
    assert str(registry.fusion("c").origin) == f"{path}:3"


def test_files_are_read_in_order_and_selections_kept(write: Write) -> None:
    one = write("select: [{stage: lone, fusions: off}]", "one.yaml")
    two = write(document(declaration("mine")) + "select: [{stage: lone, fusions: [mine]}]", "two")
    registry = load(one, two)
    assert [str(item.origin) for item in registry.selections] == [f"{one}:1", f"{two}:7"]
    assert load(two, one).selections == registry.selections[::-1]


def test_plugins_can_be_left_out(plugins: Plugins) -> None:
    plugins.install("toy_plugin", "raise RuntimeError('imported')")
    assert load(plugins=False).broken_plugins == ()
    assert len(load().broken_plugins) == 1


def test_an_entry_point_of_another_group_is_not_imported(plugins: Plugins) -> None:
    plugins.install("toy_plugin", "raise RuntimeError('imported')")
    other = replace(CATALOGUE, entry_point_group="another.group")
    assert load_registry(catalogue=other).broken_plugins == ()
    assert "toy_plugin" not in sys.modules


def test_registries_are_independent_and_read_only(write: Write) -> None:
    one, other = load(write(document(declaration("mine")))), load()
    assert "mine" in one.fusions
    assert "mine" not in other.fusions
    for mapping in (one.fusions, one.stages, one.parents):
        with pytest.raises(TypeError):
            mapping["x"] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        one.fusions = {}  # type: ignore[misc]


# --- files that cannot be read


def test_files_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("fusions: [] # é".encode("latin-1"))
    large = write("#" * (LARGEST_FILE + 1), "large.yaml")
    absent = tmp_path / "absent.yaml"
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path, message in [
        (pipe, "must be a file, since a run reads it more than once, got a pipe or a device"),
        (absent, "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (latin, "cannot be read as UTF-8 text: 'utf-8' codec can't decode byte 0xe9"),
        (large, f"larger than {LARGEST_FILE} bytes; split it"),
        (Path("null\0character"), "embedded null byte"),
    ]:
        text = refusal(lambda path=path: load(path))
        assert text.startswith(f"{path}: ")
        assert message in text


def test_a_file_of_the_largest_size_is_read(write: Write) -> None:
    assert len(load(write("#" * LARGEST_FILE)).fusions) == 3


# --- duplicates


def test_a_duplicate_name_shows_both_origins(write: Write) -> None:
    one = write(document(declaration("mine")), "one.yaml")
    two = write(document(declaration("other"), declaration("mine")), "two.yaml")
    text = refusal(lambda: load(one, two))
    assert text == (
        f"{two}:7: fusions[1].name: fusion 'mine' is declared already, in {one}:2: fusions[0]; "
        "choose another name"
    )


def test_a_file_that_is_named_twice_is_read_once(write: Write) -> None:
    path = write(document(declaration("mine")))
    link = path.parent / "link.yaml"
    link.symlink_to(path)
    assert load(path, path, link).fusions.keys() == load(path).fusions.keys()


def test_files_whose_names_look_alike_are_all_read(tmp_path: Path) -> None:
    for folder in ("a", "b", "b/sub"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a/link").symlink_to("../b/sub")
    (tmp_path / "a/x.yaml").write_text(document(declaration("in_a")))
    (tmp_path / "b/x.yaml").write_text(document(declaration("in_b")))
    found = load(f"{tmp_path}/a/x.yaml", f"{tmp_path}/a/link/../x.yaml").fusions
    assert {"in_a", "in_b"} < found.keys()


def test_a_built_in_name_cannot_be_taken(write: Write) -> None:
    path = write(document(declaration("built_in_lone")))
    assert (
        f"{path}:2: fusions[0].name: fusion 'built_in_lone' is declared already, in "
        "tests/fusion_registry/toy_builtin/lone.yaml:3: fusions[0]; choose"
        in refusal(lambda: load(path))
    )


def test_an_option_selects_one_fusion_of_a_stage(write: Write) -> None:
    path = write(document(declaration("mine", option="use_lone")))
    text = refusal(lambda: load(path))
    assert (
        ": fusions[0].option: option use_lone selects fusion 'built_in_lone' of stage lone already,"
        " declared in tests/fusion_registry/toy_builtin/lone.yaml:3: fusions[0]; leave `option` out"
        " and select 'mine' by name" in text
    )
    both = document(declaration("a", option="use_other"), declaration("b", option="use_other"))
    assert "option use_other selects fusion 'a'" in refusal(lambda: load(write(both)))


def test_an_option_may_select_fusions_of_several_stages(write: Write) -> None:
    text = document(
        declaration("a", option="use_other"),
        declaration("b", stage="first", option="use_other"),
        declaration("c"),
        declaration("d"),
    )
    assert {"a", "b", "c", "d"} < set(load(write(text)).fusions)


# --- forms of a plug-in's object


@pytest.mark.parametrize(
    "module",
    [
        "FUSIONS = 'fusions.yaml'",
        "FUSIONS = ['fusions.yaml']",
        "FUSIONS = ('fusions.yaml',)",
        "import pathlib\nFUSIONS = pathlib.Path(__file__).with_name('fusions.yaml')",
        "import pathlib\nFUSIONS = [pathlib.Path(__file__).with_name('fusions.yaml')]",
        "import pathlib\nFUSIONS = str(pathlib.Path(__file__).with_name('fusions.yaml').resolve())",
        "import importlib.resources as r\nFUSIONS = r.files(__name__) / 'fusions.yaml'",
        "import importlib.resources as r\nFUSIONS = [r.files(__name__) / 'fusions.yaml']",
    ],
    ids=["resource", "list", "tuple", "path", "list-of-path", "absolute-text", "traversable",
         "list-of-traversable"],
)  # fmt: skip
def test_a_plugin_names_its_files(plugins: Plugins, module: str) -> None:
    plugins.install("toy_plugin", module, document(declaration("from_plugin")))
    registry = load()
    assert registry.broken_plugins == ()
    assert bind(registry, "lone", "from_plugin").stages["lone"].candidates[0].name == "from_plugin"


def test_a_plugin_may_name_several_files(plugins: Plugins) -> None:
    plugins.install(
        "toy_plugin", "FUSIONS = ['fusions.yaml', 'more.yaml']", document(declaration("a"))
    )
    (plugins.folder / "toy_plugin" / "more.yaml").write_text(document(declaration("b")))
    assert {"a", "b"} < set(load().fusions)


# --- broken plug-ins


BROKEN = {
    "import-error": ("import no_such_module_of_anyone", "", "ModuleNotFoundError"),
    "raises": ("raise RuntimeError('no luck')", "", "RuntimeError: no luck"),
    "exits": ("raise SystemExit(3)", "", "SystemExit: 3"),
    "is-cancelled": ("import asyncio\nraise asyncio.CancelledError('now')", "", "CancelledError"),
    "syntax-error": ("def (", "", "SyntaxError"),
    "no-such-attribute": ("", "", "AttributeError"),
    "absent-file": ("FUSIONS = 'absent.yaml'", "", "FileNotFoundError"),
    "wrong-object": ("FUSIONS = 3", "", "TypeError"),
    "list-of-wrong-object": ("FUSIONS = [None]", "", "AttributeError"),
    "not-yaml": (RESOURCE, "fusions: [", "not valid YAML"),
    "unknown-stage": (RESOURCE, document(declaration("broken", stage="loan")), "unknown stage"),
    "unknown-key": (RESOURCE, document(declaration("broken", speed="high")), "unknown key 'speed'"),
    "selects": (
        RESOURCE,
        "select: [{stage: lone, fusions: off}]",
        "may not select them; remove `select`",
    ),
    "takes-an-option": (
        RESOURCE,
        document(declaration("broken", option="use_other")),
        "a plug-in may not bind 'broken' to the option use_other",
    ),
    "duplicate-name": (
        RESOURCE,
        document(declaration("built_in_lone")),
        "is declared already, in tests/fusion_registry/toy_builtin/lone.yaml:3",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_reported_and_harms_no_run_that_does_without(
    plugins: Plugins, case: str
) -> None:
    module, yaml, error = BROKEN[case]
    plugins.install("broken_plugin", module, yaml)
    plugins.install("sound_plugin", RESOURCE, document(declaration("sound")))
    registry = load()
    (broken,) = registry.broken_plugins
    assert (broken.name, broken.origin) == ("broken_plugin-point", "broken_plugin")
    assert error in broken.error
    assert bind(registry, "lone", "sound")
    assert bind(registry, "first", "built_in_first")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_is_fatal_when_it_is_selected(plugins: Plugins, case: str) -> None:
    module, yaml, error = BROKEN[case]
    plugins.install("broken_plugin", module, yaml)
    registry = load()
    selected = "built_in_lone" if case == "duplicate-name" else "broken"
    text = refusal(lambda: bind(registry, "lone", selected))
    assert text.startswith(f"test: {'' if case == 'duplicate-name' else 'unknown '}fusion")
    assert "'broken_plugin-point' (broken_plugin)" in text
    assert error in text


def test_a_broken_plugin_registers_nothing_of_what_it_declares(plugins: Plugins) -> None:
    plugins.install(
        "broken_plugin", RESOURCE, document(declaration("new"), declaration("built_in_lone"))
    )
    registry = load()
    assert "new" not in registry.fusions
    assert registry.broken_plugins[0].fusions == ("new", "built_in_lone")
    text = refusal(lambda: bind(registry, "lone", "new"))
    assert "fusion 'new' is declared by the plug-in 'broken_plugin-point'" in text


def bind_by_option(registry: Registry, stage: str, name: str) -> Binding:
    request = Request(stage, (name,), None, "use_lone=True", by_option=True)
    return Binding(registry, select(registry, [request]).for_layer(1), 1)


def test_an_option_selects_its_fusion_whatever_plugins_declare(plugins: Plugins) -> None:
    plugins.install("broken_plugin", RESOURCE, document(declaration("built_in_lone")))
    binding = bind_by_option(load(), "lone", "built_in_lone")
    assert binding.stages["lone"].candidates[0].name == "built_in_lone"


def test_a_contested_name_is_an_error_that_names_both(plugins: Plugins, write: Write) -> None:
    plugins.install("broken_plugin", RESOURCE, document(declaration("built_in_lone")))
    both = (
        "fusion 'built_in_lone' is declared in tests/fusion_registry/toy_builtin/lone.yaml:3: "
        "fusions[0] and by the plug-in 'broken_plugin-point' (broken_plugin), which failed to "
        "load: "
    )
    text = refusal(lambda: bind(load(), "lone", "built_in_lone"))
    assert f"test: {both}" in text
    assert text.endswith("remove the plug-in, or enable the former by use_lone")
    path = write("select: [{stage: lone, fusions: [built_in_lone]}]")
    registry = load(path)
    place = f"{path}:1: select[0].fusions[0]"
    assert f"{place}: {both}" in refusal(lambda: select(registry, []))
    assert f"{place}: {both}" in refusal(lambda: bind_by_option(registry, "lone", "built_in_lone"))


def test_what_only_a_broken_plugin_declares_is_no_fusion_for_an_option_either(
    plugins: Plugins,
) -> None:
    plugins.install(
        "broken_plugin", RESOURCE, document(declaration("new"), declaration("built_in_lone"))
    )
    text = refusal(lambda: bind_by_option(load(), "lone", "new"))
    assert "fusion 'new' is declared by the plug-in 'broken_plugin-point'" in text


def test_a_name_declared_twice_by_one_plugin(plugins: Plugins) -> None:
    plugins.install(
        "broken_plugin", "FUSIONS = ['fusions.yaml', 'fusions.yaml']", document(declaration("a"))
    )
    error = load().broken_plugins[0].error
    assert "fusions.yaml):2: fusions[0].name: fusion 'a' is declared already, in" in error


def test_two_plugins_that_declare_one_name(plugins: Plugins) -> None:
    plugins.install("plugin_a", RESOURCE, document(declaration("theirs")))
    plugins.install("plugin_b", RESOURCE, document(declaration("theirs")))
    registry = load()
    (broken,) = registry.broken_plugins
    text = refusal(lambda: bind(registry, "lone", "theirs"))
    assert "plugin_a:FUSIONS" in text
    assert "plugin_b:FUSIONS" in text
    assert broken.fusions == ("theirs",)


@pytest.mark.filterwarnings("ignore:Implicit None on return values:DeprecationWarning")
def test_a_plugin_without_metadata_is_reported(plugins: Plugins) -> None:
    plugins.install("bare_plugin", "import no_such_module_of_anyone", metadata=False)
    (broken,) = load().broken_plugins
    assert (broken.name, broken.origin) == ("bare_plugin-point", "bare_plugin:FUSIONS")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "AttributeError"),
        ("NOT_CALLABLE", "which is not callable"),
        ("without_flag", "does not accept the inputs of stage lone (x, y, w, n, eps, flag)"),
    ],
    ids=["absent", "not-callable", "wrong-signature"],
)
def test_a_plugin_whose_implementation_is_broken(
    plugins: Plugins, function: str, message: str
) -> None:
    declared = declaration("broken", implementation=f"{HERE}:{function}")
    plugins.install("broken_plugin", RESOURCE, document(declared))
    registry = load()
    assert registry.broken_plugins == ()
    assert bind(registry, "lone", "built_in_lone")
    text = refusal(lambda: bind(registry, "lone", "broken"))
    assert text.startswith("broken_plugin:FUSIONS (")
    assert "fusion 'broken' " in text
    assert message in text


def test_what_a_plugin_declares_is_imported_only_when_it_is_bound(plugins: Plugins) -> None:
    declared = declaration("lazy", implementation="toy_plugin.kernels:lone")
    plugins.install("toy_plugin", RESOURCE, document(declared))
    kernels = plugins.folder / "toy_plugin" / "kernels.py"
    kernels.write_text(f"from {HERE} import fused_lone as lone\n")
    registry = load()
    assert "toy_plugin.kernels" not in sys.modules
    bind(registry, "lone", "lazy")
    assert "toy_plugin.kernels" in sys.modules


# --- unknown names


def test_an_unknown_fusion_lists_valid_names_with_a_hint() -> None:
    text = refusal(lambda: load().fusion("built_in_loan", "gdn_fusions"))
    assert text == (
        "gdn_fusions: unknown fusion 'built_in_loan'; did you mean 'built_in_lone'? "
        "valid: built_in_first, built_in_lone, built_in_whole"
    )


def test_an_unknown_stage_lists_valid_names() -> None:
    assert refusal(lambda: load().stage("loan")) == (
        "unknown stage 'loan'; did you mean 'lone'? valid: first, lone, second, whole"
    )
    assert "did you mean" not in refusal(lambda: load().stage("zzz"))


def test_fusions_of_a_stage(write: Write) -> None:
    registry = load(write(document(declaration("mine"))))
    assert [item.name for item in registry.fusions_of("lone")] == ["built_in_lone", "mine"]
    assert registry.fusions_of("second") == ()
    assert registry.parents == {"first": "whole", "second": "whole"}


# --- the GDN catalogue


def test_the_default_catalogue_is_that_of_gated_delta_net() -> None:
    registry = load_registry(plugins=False)
    declared = registry.fusion("gated_output_norm").declaration
    assert declared.option == "gdn_gated_output_norm_fusion"
    assert registry.parents["causal_conv1d"] == "pre_gated_delta_rule"
