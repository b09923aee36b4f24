# SPDX-License-Identifier: Apache-2.0
"""All ranks of a run fuse alike, or none of them starts.

A fusion that one rank refuses (another config file, an older package, another GPU) and the others
accept would leave the others waiting in their next collective. So ranks compare, once and before
the model is built, what each of them made of the run's settings.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import distributed

from fusion_registry import FusionConfigError, Machine, Selection, unavailable
from megatron.gdn.selection import requests_fusions, select_fusions
from megatron.gdn.variant import gdn_layer_numbers

_REFUSES = "this configuration"
_PATIENCE = timedelta(minutes=10)
"""How long ranks wait for each other: as long as torch.distributed does when it starts."""


def agree_on_fusions[Built](
    build: Callable[[], Built],
    config_of: Callable[[Built], Any] = lambda built: built,
    world_size: int | None = None,
) -> Built:
    """Build this rank's configuration, and go on only if every rank's fuses alike.

    A collective: every rank calls it, whether or not it selects fusions. Compared are
    refusals of the configuration, the fusions of each layer's stages, their declarations, and what
    each rank's machine and packages lack for them. What a single call's tensors decide is not.

    Args:
        build: makes the configuration; whatever it raises counts as this rank's refusal.
        config_of: the transformer configuration of what `build` returns.
        world_size: number of ranks, for a call before torch.distributed is started; they then
            meet where it will start (`MASTER_ADDR`, `MASTER_PORT`). Once it is started, the
            default group is asked, and this is not needed.

    Returns:
        What `build` returned.

    Raises:
        FusionConfigError: a ValueError, on every rank: ranks disagree. It says who says what.
        Exception: what `build` raised, where every rank's raised the same.
    """
    error: Exception | None = None
    try:
        built = build()
        answer = fusion_answer(config_of(built))
    except Exception as caught:
        error = caught
        answer = {_REFUSES: f"refused: {caught}"}
    disagreement = _disagreement(_answers_of_all_ranks(answer, world_size))
    if disagreement is not None:
        raise FusionConfigError(disagreement) from error
    if error is not None:
        raise error
    return built


def fusion_answer(config: Any) -> dict[str, str]:
    """What this rank makes of a configuration, as subject and statement, both for people.

    Args:
        config: `megatron.gdn.TransformerConfig`, or megatron-core's, which selects nothing.
    """
    if not requests_fusions(config):
        return {}
    selection = select_fusions(config)
    answer: dict[str, str] = {}
    for number in gdn_layer_numbers(config) or (None,):
        where = "layers without a number" if number is None else f"layer {number}"
        for stage, claim in selection.for_layer(number).items():
            answer[f"{where}, stage {stage}"] = ", ".join(claim.candidates)
    # A hybrid model's layers are not known here, so requests for some of them speak themselves.
    for request in selection.requests:
        if request.layers is not None:
            subject = f"stage {request.stage}, layers {request.layers}"
            answer[subject] = ", ".join(request.candidates) or "unfused"
    return answer | _fusion_statements(selection)


def _fusion_statements(selection: Selection) -> dict[str, str]:
    """For each selected fusion, what was declared of it and what this machine lacks for it."""
    machine, statements = Machine.here(), {}
    for name in sorted({name for request in selection.requests for name in request.candidates}):
        fusion = selection.registry.fusion(name, "the selection")
        declared = fusion.declaration.model_dump_json(exclude={"description", "source"})
        digest = hashlib.sha256(declared.encode()).hexdigest()[:12]
        contract = selection.registry.stages[fusion.declaration.stage]
        lacks = "; ".join(unavailable(fusion, contract, machine))
        # Not the origin: the same file may lie elsewhere on another node.
        statements[f"declaration of {name}"] = f"digest {digest}"
        statements[f"machine for {name}"] = lacks or "available"
    return statements


def _answers_of_all_ranks(
    answer: Mapping[str, str], world_size: int | None
) -> list[Mapping[str, str]]:
    """By rank."""
    if distributed.is_available() and distributed.is_initialized():
        answers: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(answers, dict(answer))
        return answers
    if world_size is None or world_size == 1:
        return [answer]
    place, rank = _meeting_place(world_size)
    store = distributed.PrefixStore(f"{place.add(f'calls/{rank}', 1)}", place)
    store.set(f"answer/{rank}", json.dumps(answer))
    if rank != 0:
        everything: list[Mapping[str, str]] = json.loads(store.get("answers"))
        store.set(f"read/{rank}", "")
        return everything
    # One rank collects, so that the store is asked in proportion to the number of ranks.
    collected = [json.loads(store.get(f"answer/{other}")) for other in range(world_size)]
    store.set("answers", json.dumps(collected))
    # This rank may host the store: it must not leave before the others have read.
    store.wait([f"read/{other}" for other in range(1, world_size)], _PATIENCE)
    return collected


@functools.cache
def _meeting_place(world_size: int) -> tuple[Any, int]:
    """The store in which torch.distributed will start, and this rank's number.

    Kept for the life of the process: the first rank may serve it, and torch.distributed goes on
    using the same server.
    """
    store, rank, found = next(distributed.rendezvous("env://", timeout=_PATIENCE))
    if found != world_size:
        raise ValueError(
            f"agreement on fusions requires every rank of the run, got {found} of {world_size}; "
            "start them with torchrun"
        )
    return distributed.PrefixStore("megatron.gdn.agreement", store), rank


def _disagreement(answers: list[Mapping[str, str]]) -> str | None:
    """What differs between ranks, or None."""
    if all(answer == answers[0] for answer in answers):
        return None
    subjects = dict.fromkeys(subject for answer in answers for subject in answer)
    refused = any(_REFUSES in answer for answer in answers)
    same: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for subject in [_REFUSES] if refused else subjects:
        said: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            absent = "accepted" if subject == _REFUSES else "nothing selected"
            said.setdefault(answer.get(subject, absent), []).append(rank)
        if len(said) > 1:
            found = tuple((_few("rank", ranks), what) for what, ranks in said.items())
            same.setdefault(found, []).append(subject)
    lines = ["ranks disagree about the fusions of this run, so that it would hang:"]
    for found, about in same.items():
        lines.append(f"  {'; '.join(about[:4])}{_more(about)}")
        lines += [f"    {who}: {what}" for who, what in found]
    lines.append("give every rank the same flags, fusion config file and packages")
    return "\n".join(lines)


def _few(noun: str, numbers: list[int]) -> str:
    """Numbers for a message: all of few, the first of many."""
    plural = "" if len(numbers) == 1 else "s"
    return f"{noun}{plural} {', '.join(map(str, numbers[:4]))}{_more(numbers)}"


def _more(items: list[Any]) -> str:
    return f" and {len(items) - 4} more" if len(items) > 4 else ""
