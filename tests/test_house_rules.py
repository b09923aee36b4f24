# SPDX-License-Identifier: Apache-2.0
"""Every house rule finds its violating sample and leaves the clean one alone."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest

from house_rules.__main__ import main
from house_rules.catalogue import RULES, findings
from house_rules.source_file import SourceFile
from house_rules.text_rules import LARGEST_FILE, LICENCE_LINE, repaired

HEAD = f'{LICENCE_LINE}\n"""What it is for."""\n'
# Put together here, so that this file keeps the rule that it tests.
MACHINE_PATHS = ["/" + "work/main/x", "/" + "root/.pip", "/" + "home/me/x"]
HOSTS = ["https://" + "pypi" + ".org/simple", "files.python" + "hosted.org", "file:" + "///x/y.whl"]


@dataclass(frozen=True)
class Sample:
    """A file's path and content, and the lines at which the rule has to speak (none: clean)."""

    rule: str
    case: str
    path: str
    content: str | bytes
    lines: tuple[int, ...] = ()

    def file(self) -> SourceFile:
        data = self.content.encode() if isinstance(self.content, str) else self.content
        return SourceFile(PurePosixPath(self.path), data)


def product(code: str) -> str:
    """Module with the header; the first line of `code` is line 3."""
    return HEAD + code + "\n"


SAMPLES = [
    Sample("header", "no-licence-line", "tools/a.py", '"""Purpose."""\n', (1,)),
    Sample("header", "licence-below", "tools/a.py", f'"""Purpose."""\n{LICENCE_LINE}\n', (1,)),
    Sample("header", "shebang-without", "a.py", '#!/usr/bin/python\n"""Purpose."""\n', (2,)),
    Sample("header", "no-docstring", "tests/a.py", f"{LICENCE_LINE}\nx = 1\n", (2,)),
    Sample("header", "late-docstring", "a.py", f'{LICENCE_LINE}\nx = 1\n"""Late."""\n', (2,)),
    Sample("header", "empty", "a/__init__.py", "", (1, 2)),
    Sample("header", "clean", "tools/a.py", HEAD),
    Sample("header", "clean-shebang", "a.py", "#!/usr/bin/python\n" + HEAD),
    Sample("header", "no-python", "a.yaml", "x: 1\n"),
    Sample("vague-name", "module", "megatron/gdn/utils.py", HEAD, (1,)),
    Sample("vague-name", "suffix", "tests/layer_helpers.py", HEAD, (1,)),
    Sample("vague-name", "folder", "megatron/gdn/misc/norm.py", HEAD, (1,)),
    Sample("vague-name", "manager", "fusion_registry/manager.py", HEAD, (1,)),
    Sample("vague-name", "clean", "megatron/gdn/gated_output_norm.py", HEAD),
    *(
        Sample("machine-path", f"text-{i}", "README.md", f"first\nsee {text}\n", (2,))
        for i, text in enumerate([*MACHINE_PATHS, *HOSTS])
    ),
    Sample("machine-path", "in-quotes", "a.py", f'x = "{MACHINE_PATHS[0]}"\n', (1,)),
    Sample(
        "machine-path",
        "clean",
        "README.md",
        "docs/work/a, ~/work/a, $HOME/root/a, https://example.org/home/a, /usr/bin, framework/a\n",
    ),
    Sample("machine-path", "binary", "a.png", MACHINE_PATHS[0].encode() + b"\0"),
    Sample("end-of-file", "no-newline", "a.md", "one\ntwo", (2,)),
    Sample("end-of-file", "blank-lines", "a.md", "one\n\n\n", (2,)),
    Sample("end-of-file", "only-newline", "a.md", "\n", (2,)),
    Sample("end-of-file", "crlf", "a.md", "one\ntwo\r\n", (2,)),
    Sample("end-of-file", "clean", "a.md", "one\ntwo\n"),
    Sample("end-of-file", "empty", "a.md", ""),
    Sample("trailing-whitespace", "blank", "a.md", "one\ntwo \nthree\t\n", (2, 3)),
    Sample("trailing-whitespace", "clean", "a.md", "  one\n\ntwo\r\n"),
    Sample("large-file", "over", "docs/a.png", b"\0" * (LARGEST_FILE + 1), (1,)),
    Sample("large-file", "clean", "docs/a.png", b"\0" * LARGEST_FILE),
    Sample("no-assert", "assert", "fusion_registry/a.py", product("assert x"), (3,)),
    Sample("no-assert", "elsewhere", "megatron/gdn/a.py", product("assert x")),
    Sample("no-assert", "clean", "fusion_registry/a.py", product("# assert\nx = 'assert'")),
    Sample("environment", "get", "tools/a.py", product("import os\nos.environ.get('X')"), (4,)),
    Sample("environment", "getenv", "megatron/gdn/a.py", product("import os\nos.getenv(k)"), (4,)),
    Sample(
        "environment",
        "alias",
        "fusion_registry/a.py",
        product("def f():\n    import os as o\n    return o.environ['X']"),
        (5,),
    ),
    Sample("environment", "from", "tools/a.py", product("from os import path, environ"), (3,)),
    Sample(
        "environment",
        "its-module",
        "megatron/gdn/environment.py",
        product("import os\nos.environ['X']"),
    ),
    Sample("environment", "tests", "tests/conftest.py", product("import os\nos.environ['X']")),
    Sample("environment", "clean", "tools/a.py", product("import os\nos.getcwd()\nx.environ")),
    Sample(
        "import-direction",
        "registry-megatron",
        "fusion_registry/a.py",
        product("from megatron.gdn import stages"),
        (3,),
    ),
    Sample(
        "import-direction",
        "registry-tools-in-function",
        "fusion_registry/a.py",
        product("def f():\n    import tools.list_fusions"),
        (4,),
    ),
    Sample(
        "import-direction", "gdn-tools", "megatron/gdn/a.py", product("from tools import x"), (3,)
    ),
    Sample("import-direction", "tools-tests", "tools/a.py", product("import tests.x"), (3,)),
    Sample(
        "import-direction",
        "clean-gdn",
        "megatron/gdn/a.py",
        product("import fusion_registry\nfrom . import tools\nimport toolshed"),
    ),
    Sample("import-direction", "clean-tools", "tools/a.py", product("import megatron.gdn")),
    Sample("light-import", "torch", "fusion_registry/a.py", product("import torch.nn"), (3,)),
    Sample(
        "light-import",
        "triton-in-try",
        "fusion_registry/a.py",
        product("try:\n    from triton import jit\nexcept ImportError:\n    pass"),
        (4,),
    ),
    Sample(
        "light-import",
        "class-body",
        "fusion_registry/a.py",
        product("class A:\n    import torch"),
        (4,),
    ),
    Sample(
        "light-import",
        "type-checking-else",
        "fusion_registry/a.py",
        product("if TYPE_CHECKING:\n    import torch\nelse:\n    import triton"),
        (6,),
    ),
    Sample(
        "light-import",
        "clean",
        "fusion_registry/a.py",
        product(
            "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch\nimport torchless"
        ),
    ),
    Sample("light-import", "elsewhere", "megatron/gdn/a.py", product("import torch")),
    Sample(
        "private-megatron",
        "name",
        "megatron/gdn/a.py",
        product("from megatron.core.ssm.gated_delta_net import GatedDeltaNet, _split"),
        (3,),
    ),
    Sample(
        "private-megatron", "module", "tools/a.py", product("import megatron.core._x as x"), (3,)
    ),
    Sample(
        "private-megatron",
        "attribute",
        "megatron/gdn/a.py",
        product("from megatron.core import parallel_state as p\np._GROUP\np.get_group()"),
        (4,),
    ),
    Sample(
        "private-megatron",
        "dotted-attribute",
        "megatron/gdn/a.py",
        product("import megatron.training.training\nmegatron.training.training._run"),
        (4,),
    ),
    Sample(
        "private-megatron",
        "its-module",
        "megatron/gdn/megatron_core_0_19.py",
        product("from megatron.core.x import _y"),
    ),
    Sample(
        "private-megatron",
        "clean",
        "megatron/gdn/a.py",
        product(
            "from megatron.core import parallel_state\nparallel_state.__name__\nself._x\n"
            "from megatron.gdn.megatron_core_0_19 import _y\nfrom . import _z"
        ),
    ),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.rule}-{s.case}")
def test_rule_speaks_at_exactly_the_violating_lines(sample):
    found = findings(sample.file(), [sample.rule])
    assert tuple(finding.line for finding in found) == sample.lines


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_a_violating_and_a_clean_sample(rule):
    assert {bool(s.lines) for s in SAMPLES if s.rule == rule} == {True, False}


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.lines], ids=lambda s: s.case)
def test_message_names_rule_file_line_and_remedy(sample):
    for finding in findings(sample.file(), [sample.rule]):
        text = str(finding)
        assert text.startswith(f"{sample.path}:{finding.line}: {sample.rule}: {finding.problem}; ")
        assert text.endswith(finding.remedy)
        assert finding.remedy


@pytest.mark.parametrize("rule", RULES)
def test_file_with_a_syntax_error_is_left_to_ruff(rule):
    findings(SourceFile(PurePosixPath("fusion_registry/a.py"), b"def :\n"), [rule])


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("a.py", '"""P."""\n', f'{LICENCE_LINE}\n"""P."""\n'),
        ("a.py", '#!/bin/x\n"""P."""\n', f'#!/bin/x\n{LICENCE_LINE}\n"""P."""\n'),
        ("a.md", "one \r\ntwo\n\n\n", "one\ntwo\n"),
        ("a.md", "one", "one\n"),
        ("a.md", "\n", ""),
        ("a.png", b"one \0", b"one \0"),
    ],
    ids=["header", "header-below-shebang", "blanks-crlf", "newline", "only-newline", "binary"],
)
def test_repair(path, before, after):
    before, after = (x if isinstance(x, bytes) else x.encode() for x in (before, after))
    once = repaired(SourceFile(PurePosixPath(path), before))
    assert once == after
    assert repaired(SourceFile(PurePosixPath(path), once)) == after


@pytest.fixture
def broken_tree(tmp_path):
    module = tmp_path / "fusion_registry" / "rules.py"
    module.parent.mkdir()
    module.write_text('"""Purpose."""\n\nassert True')
    return tmp_path


def test_command_reports_and_fails(broken_tree, capsys):
    module = broken_tree / "fusion_registry" / "rules.py"
    assert main(["--root", str(broken_tree), str(module)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["fusion_registry/rules.py:1", "header"],
        ["fusion_registry/rules.py:3", "end-of-file"],
        ["fusion_registry/rules.py:3", "no-assert"],
    ]


def test_command_runs_only_the_named_rules(broken_tree, capsys):
    module = broken_tree / "fusion_registry" / "rules.py"
    assert main(["--root", str(broken_tree), "--rule", "vague-name", str(module)]) == 0
    assert capsys.readouterr().out == ""


def test_command_repairs_what_it_can_and_reports_the_rest(broken_tree, capsys):
    module = broken_tree / "fusion_registry" / "rules.py"
    assert main(["--root", str(broken_tree), "--fix", str(module)]) == 1
    assert module.read_text() == f'{LICENCE_LINE}\n"""Purpose."""\n\nassert True\n'
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == ["no-assert"]


def test_command_takes_a_folder_and_leaves_what_git_ignores(broken_tree, capsys):
    subprocess.run(["git", "init", "--quiet", str(broken_tree)], check=True)
    (broken_tree / ".gitignore").write_text("ignored.py\n")
    (broken_tree / "fusion_registry" / "ignored.py").write_text("assert True\n")
    folder = broken_tree / "fusion_registry"
    assert main(["--root", str(broken_tree), "--rule", "no-assert", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["fusion_registry/rules.py:3"]
