# SPDX-License-Identifier: Apache-2.0
"""What a user enabled, for which layers: how requests merge, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_registry import FusionConfigError, Request, Selection, load_registry, select
from fusion_registry.schema import LayerSet
from tests.fusion_registry.toy_stages import CATALOGUE, HERE

DECLARED = f"""
fusions:
- {{name: mine, stage: lone, implementation: '{HERE}:other_lone', determinism: unknown,
   preconditions: []}}
- {{name: my_second, stage: second, implementation: '{HERE}:fused_second', determinism: unknown,
   preconditions: []}}
select:
"""


@pytest.fixture
def selection(write: Callable[..., Path]) -> Callable[..., Selection]:
    """`selection(request, ..., file="...")`: what requests and a file's `select` list come to."""

    def make(*requests: Request, file: str = "") -> Selection:
        path = write(DECLARED + file if file else DECLARED.replace("select:", ""), "file.yaml")
        return select(load_registry([path], catalogue=CATALOGUE, plugins=False), requests)

    return make


def request(
    *candidates: str, stage: str = "lone", layers: object = None, origin: str = "option"
) -> Request:
    return Request(stage, candidates, None if layers is None else LayerSet.parse(layers), origin)


def chosen(selection: Selection, layer: int | None = 1) -> dict[str, tuple[str, ...]]:
    return {stage: claim.candidates for stage, claim in selection.for_layer(layer).items()}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(FusionConfigError) as caught:
        action()
    return str(caught.value)


def test_nothing_is_selected_by_default(selection) -> None:
    assert chosen(selection()) == {}


@pytest.mark.parametrize("layer", [1, 7, None])
def test_a_request_without_layers_means_every_layer(selection, layer: int | None) -> None:
    assert chosen(selection(request("mine")), layer) == {"lone": ("mine",)}


def test_candidates_keep_their_order(selection) -> None:
    for order in (("mine", "built_in_lone"), ("built_in_lone", "mine")):
        assert chosen(selection(request(*order))) == {"lone": order}


def test_the_claim_says_who_asked(selection) -> None:
    claims = selection(
        request("mine", origin="--gdn-fusions"),
        file="- {stage: second, fusions: [my_second]}",
    ).for_layer(1)
    assert claims["lone"].origin == "--gdn-fusions"
    assert claims["second"].origin.endswith("file.yaml:8: select[0]")


@pytest.mark.parametrize("reverse", [False, True], ids=["general-first", "special-first"])
def test_a_request_with_layers_beats_one_without(selection, reverse: bool) -> None:
    requests = [request("built_in_lone"), request("mine", layers="2-3")]
    made = selection(*(requests[::-1] if reverse else requests))
    assert [chosen(made, n)["lone"] for n in (1, 2, 3, 4)] == [
        ("built_in_lone",),
        ("mine",),
        ("mine",),
        ("built_in_lone",),
    ]


def test_a_file_with_layers_beats_an_option(selection) -> None:
    made = selection(
        request("built_in_lone", origin="use_lone=True"),
        file="- {stage: lone, fusions: [mine], layers: 2}",
    )
    assert chosen(made, 1) == {"lone": ("built_in_lone",)}
    assert chosen(made, 2) == {"lone": ("mine",)}


def test_off_for_some_layers(selection) -> None:
    made = selection(request("mine"), file="- {stage: lone, fusions: off, layers: '1,3'}")
    assert [chosen(made, n) for n in (1, 2, 3)] == [{}, {"lone": ("mine",)}, {}]


def test_off_for_all_but_some_layers(selection) -> None:
    made = selection(
        file="- {stage: lone, fusions: off}\n- {stage: lone, fusions: [mine], layers: 2}"
    )
    assert [chosen(made, n) for n in (1, 2)] == [{}, {"lone": ("mine",)}]


def test_a_layer_without_number_takes_general_requests_only(selection) -> None:
    made = selection(request("built_in_lone"), request("mine", layers="1-9"))
    assert chosen(made, None) == {"lone": ("built_in_lone",)}


def test_requests_of_equal_rank_may_agree(selection) -> None:
    made = selection(
        request("mine", origin="one"),
        request("mine", origin="other"),
        file="- {stage: lone, fusions: [mine]}",
    )
    assert chosen(made) == {"lone": ("mine",)}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("- {stage: lone, fusions: [mine]}", "mine"),
        ("- {stage: lone, fusions: off}", "off"),
        ("- {stage: lone, fusions: [built_in_lone, mine]}", "built_in_lone, mine"),
    ],
    ids=["other", "off", "longer"],
)
def test_requests_of_equal_rank_that_disagree_show_both_places(selection, file, words) -> None:
    made = selection(request("built_in_lone", origin="use_lone=True"), file=file)
    text = refusal(lambda: made.for_layer(3))
    assert (
        "file.yaml:8: select[0]: stage lone is claimed twice in layer 3: "
        "built_in_lone (use_lone=True) and " in text
    )
    assert f" and {words} (" in text
    assert "file.yaml:8: select[0]); keep one" in text


def test_overlapping_layers_that_disagree_are_refused_where_they_overlap(selection) -> None:
    made = selection(
        file="- {stage: lone, fusions: [mine], layers: 1-3}\n"
        "- {stage: lone, fusions: off, layers: 3-4}"
    )
    assert chosen(made, 2) == {"lone": ("mine",)}
    assert chosen(made, 4) == {}
    text = refusal(lambda: made.check([1, 2, 3, 4]))
    assert "claimed twice in layer 3" in text
    assert "file.yaml:8: select[0]) and " in text
    assert "file.yaml:9: select[1]); keep one" in text
    with pytest.raises(FusionConfigError) as found:
        made.check_without_model()
    assert str(found.value) == text
    (problem,) = found.value.problems
    assert (problem.line, problem.path) == (9, "select[1]")


@pytest.mark.parametrize(("child", "stage"), [("built_in_first", "first"), ("my_second", "second")])
def test_a_composite_and_one_of_its_children_are_refused(selection, child, stage) -> None:
    made = selection(
        request("built_in_whole", stage="whole", origin="one"),
        request(child, stage=stage, origin="two"),
    )
    assert refusal(lambda: made.for_layer(2)) == (
        f"stage whole and its child {stage} are both claimed in layer 2: built_in_whole by one and "
        f"{child} by two; select one of them"
    )


def test_a_composite_and_its_child_in_different_layers(selection) -> None:
    made = selection(
        request("built_in_whole", stage="whole", layers=1),
        request("built_in_first", stage="first", layers=2),
    )
    made.check([1, 2])
    assert [chosen(made, n) for n in (1, 2)] == [
        {"whole": ("built_in_whole",)},
        {"first": ("built_in_first",)},
    ]


def test_off_claims_nothing_beside_a_child(selection) -> None:
    made = selection(
        request("built_in_first", stage="first"), file="- {stage: whole, fusions: off}"
    )
    assert chosen(made) == {"first": ("built_in_first",)}


def test_both_children_may_be_claimed(selection) -> None:
    made = selection(request("built_in_first", stage="first"), request("my_second", stage="second"))
    assert chosen(made) == {"first": ("built_in_first",), "second": ("my_second",)}


def test_layers_that_match_none_list_those_of_the_model(selection) -> None:
    made = selection(file="- {stage: lone, fusions: [mine], layers: '9-12,20'}")
    text = refusal(lambda: made.check([1, 2, 3, 5]))
    assert text.endswith(
        "file.yaml:8: select[0].layers: stage lone: layers 9-12,20 match no layer of this model; "
        "it has 1-3,5"
    )
    made.check([12])
    assert "it has none" in refusal(lambda: made.check([]))


def test_the_check_judges_every_layer(selection) -> None:
    made = selection(
        request("built_in_whole", stage="whole"),
        request("built_in_first", stage="first", layers=5),
    )
    assert chosen(made, 4) == {"whole": ("built_in_whole",)}
    assert "in layer 5" in refusal(lambda: made.check([4, 5]))


def test_a_fusion_of_another_stage(selection) -> None:
    text = refusal(lambda: selection(request("built_in_first", origin="gdn_fusions")))
    assert text == (
        "gdn_fusions: fusion 'built_in_first' serves stage first, not lone; "
        "fusions of lone: built_in_lone, mine"
    )
    text = refusal(lambda: selection(file="- {stage: second, fusions: [mine]}"))
    assert text.endswith(
        "file.yaml:8: select[0].fusions[0]: fusion 'mine' serves stage lone, not second; "
        "fusions of second: my_second"
    )


def test_all_fusions_of_another_stage_are_reported_at_once(selection) -> None:
    text = refusal(
        lambda: selection(
            request("built_in_first", "built_in_whole", origin="a"),
            file="- {stage: second, fusions: [mine]}",
        )
    )
    assert len(text.splitlines()) == 3


def test_unknown_names_say_who_asked(selection) -> None:
    text = refusal(lambda: selection(request("built_in_loan", origin="--gdn-fusions")))
    assert text.startswith("--gdn-fusions: unknown fusion 'built_in_loan'; did you mean")
    text = refusal(lambda: selection(request("mine", stage="loan", origin="--gdn-fusions")))
    assert text.startswith("--gdn-fusions: unknown stage 'loan'; did you mean 'lone'?")
    text = refusal(lambda: selection(file="- {stage: lone, fusions: [nothing]}"))
    assert "file.yaml:8: select[0].fusions[0]: unknown fusion 'nothing'; valid: " in text


def test_every_unknown_name_is_reported_at_its_own_line(selection) -> None:
    text = refusal(
        lambda: selection(
            request("mine", stage="loan", origin="--gdn-fusions"),
            file="- stage: lone\n  fusions:\n  - mine\n  - nothing\n  - my_second\n",
        )
    )
    first, second, third = text.splitlines()
    assert first.startswith("--gdn-fusions: unknown stage 'loan'")
    assert "file.yaml:11: select[0].fusions[1]: unknown fusion 'nothing'" in second
    assert "file.yaml:12: select[0].fusions[2]: fusion 'my_second' serves stage" in third


def test_a_composite_and_its_child_in_a_file_carry_both_places(selection) -> None:
    made = selection(
        file="- {stage: whole, fusions: [built_in_whole]}\n"
        "- {stage: second, fusions: [my_second], layers: 7}"
    )
    with pytest.raises(FusionConfigError) as found:
        made.check_without_model()
    (problem,) = found.value.problems
    assert (problem.line, problem.path) == (9, "select[1]")
    assert "built_in_whole by " in problem.text
    assert "file.yaml:8: select[0] and my_second by " in problem.text
    assert "file.yaml:9: select[1]; select one of them" in problem.text
