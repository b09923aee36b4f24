# SPDX-License-Identifier: Apache-2.0
"""The two errors of the registry, and the reasons that they carry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a declared precondition does not hold.

    Args:
        code: stable name for programs: the kind of the precondition and its subject.
        text: for people: what is required and what was found.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ConfigProblem:
    """One fault in a file, a name or a selection, and where it stands.

    Args:
        text: rule, value and remedy.
        origin: the file, plug-in or option that it came from.
        line: line in the file, from 1, when known.
        path: key path inside the file, such as `fusions[0].stage`.
    """

    text: str
    origin: str = ""
    line: int | None = None
    path: str = ""

    def __str__(self) -> str:
        place = self.origin if self.line is None else f"{self.origin}:{self.line}"
        return ": ".join(part for part in (place, self.path, self.text) if part)


class FusionConfigError(ValueError):
    """A declaration file, a fusion name or a selection is wrong.

    Attributes:
        problems: every fault found, in order.
    """

    def __init__(self, *problems: ConfigProblem | str) -> None:
        self.problems = tuple(
            ConfigProblem(problem) if isinstance(problem, str) else problem for problem in problems
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True)
class CandidateRefusal:
    """One fusion that was asked for and cannot run, with all its reasons."""

    fusion: str
    option: str | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class Refusal:
    """A stage that cannot be served by any fusion that was asked for; its text is the message.

    Args:
        stage: the stage.
        candidates: what was asked for, best first.
        layer: layer number, from 1, or None when no layer exists yet.
        origin: who asked: an option, a flag, or file, line and key path.
    """

    stage: str
    candidates: tuple[CandidateRefusal, ...]
    layer: int | None = None
    origin: str | None = None

    def __str__(self) -> str:
        where = "" if self.layer is None else f", layer {self.layer}"
        blocks = []
        for item in self.candidates:
            title = item.option or f"fusion {item.fusion}"
            lines = [f"{title} requires {reason}" for reason in item.reasons]
            lines.append(f"  (stage {self.stage}, fusion {item.fusion}{where})")
            blocks.append("\n".join(lines))
        option = self.candidates[0].option
        by_option = option is not None and (self.origin is None or option in self.origin)
        if len(self.candidates) == 1 and by_option:
            remedy = "disable the option to run unfused"
        else:
            remedy = f"deselect it ({self.origin or 'the selection'}) to run unfused"
        return "\n".join(blocks) + "; " + remedy


class FusionUnsupportedError(ValueError):
    """An enabled fusion cannot serve this configuration, layer or call.

    megatron-core's `build_module` catches what a constructor raises and raises the same type anew
    from the message alone, so the error can be made from a text too. It then finds its details in
    the error that it replaced.

    Attributes:
        refusal: the whole refusal, None when only a text is known.
        reasons: every reason of every candidate, in order of declaration.
        stage: the stage that was asked for.
        fusion: the fusion refused (the first candidate when there were several).
        layer: layer number, from 1, or None when no layer exists yet.
    """

    def __init__(self, refusal: Refusal | str) -> None:
        self._refusal = refusal if isinstance(refusal, Refusal) else None
        super().__init__(str(refusal))

    @property
    def refusal(self) -> Refusal | None:
        if self._refusal is None and isinstance(self.__context__, FusionUnsupportedError):
            return self.__context__.refusal
        return self._refusal

    @property
    def reasons(self) -> tuple[Reason, ...]:
        candidates = self.refusal.candidates if self.refusal else ()
        return tuple(reason for item in candidates for reason in item.reasons)

    @property
    def stage(self) -> str | None:
        return self.refusal.stage if self.refusal else None

    @property
    def fusion(self) -> str | None:
        return self.refusal.candidates[0].fusion if self.refusal else None

    @property
    def layer(self) -> int | None:
        return self.refusal.layer if self.refusal else None
