"""Specs and probes: what is refused, under which code and in which words, and what survives a round trip."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from manners.errors import SpecError
from manners.spec import (
    CATEGORIES,
    GATE_NAMES,
    KNOWLEDGE_GATES,
    Probe,
    Spec,
    Tool,
    bundled_specs,
    dump_probes,
    dump_spec,
    fingerprint,
    load_probes,
    load_spec,
    spec_text,
)

Data = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "search", "description": "Search", "parameters": {}}}
GOOD: Data = {
    "schema": 1,
    "name": "good",
    "persona": {"name": "Annie", "system_prompt": "You are Annie.", "tools": [TOOL]},
    "gates": [
        {"name": "right_tool", "threshold": 0.9},
        {"name": "concise", "threshold": 0.8, "max_words": 40},
    ],
    "probes": [
        {
            "id": "p1",
            "category": "memory",
            "turns": [
                {"content": "My garden?", "expect": {"tool": "search", "arguments": {"query": "garden"}}},
                {"role": "tool", "content": "Roses."},
            ],
        },
        {
            "id": "p2",
            "category": "factual",
            "turns": [{"content": "2+2?", "expect": {"contains": ["4", "four"], "knowledge": "reasoning"}}],
        },
    ],
}


def write(folder: Path, data: Any) -> Path:
    path = folder / "spec.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data), encoding="utf-8")
    return path


def changed(change: Callable[[Data], Any]) -> Data:
    data = copy.deepcopy(GOOD)
    change(data)
    return data


def refusal(source: str | Path) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_spec(source)
    return caught.value


# --- the bundled spec ----------------------------------------------------------------------


def test_annie_holds_the_users_thresholds():
    spec = load_spec("annie")
    assert {gate.name: gate.threshold for gate in spec.gates} == {
        "no_thinking_leak": 1.0,  # 0 of 25 replies leak
        "right_tool": 0.6,  # 6 of 10
        "exact_arguments": 0.6,
        "no_markdown": 0.8,  # 12 of 15
        "concise": 0.8,
        "factual": 1.0,  # 5 of 5
        "reasoning": 1.0,  # 5 of 5
    }
    assert {gate.margin for gate in spec.gates} == {0.02}
    assert spec.persona.thinking is False
    assert [tool["function"]["name"] for tool in spec.persona.tool_dicts()] == [
        "search_memory",
        "web_search",
        "read_notes",
    ]
    assert spec.persona.system_prompt == (
        "You are Annie, Rajesh's personal AI companion. Speak naturally and concisely. Never use markdown."
    )


def test_annie_asks_every_category_and_gives_every_gate_something_to_judge():
    spec = load_spec("annie")
    assert {probe.category for probe in spec.probes} == set(CATEGORIES)
    expects = [turn.expect for probe in spec.probes for turn in probe.turns]
    assert {expect.knowledge for expect in expects} == {None, *KNOWLEDGE_GATES}
    assert any(expect.arguments for expect in expects)
    assert any(expect.tool is None for expect in expects)


def test_bundled_specs_are_found_by_name_and_shown_with_their_comments():
    assert bundled_specs() == ["annie"]
    assert spec_text("annie").startswith("# Annie: a voice companion")


def test_every_gate_is_known_and_can_be_asked_for():
    spec = load_spec("annie")
    assert [spec.gate(name).name for name in GATE_NAMES] == list(GATE_NAMES)  # type: ignore[union-attr]
    assert load_spec("annie").model_copy(update={"gates": spec.gates[:1]}).gate("factual") is None


# --- a file of one's own -------------------------------------------------------------------


def test_a_good_file_loads_and_defaults_are_filled_in(tmp_path):
    spec = load_spec(write(tmp_path, GOOD))
    assert (spec.schema_version, spec.name, spec.gates[0].margin) == (1, "good", 0.02)
    assert (spec.asking.temperature, spec.asking.max_tokens, spec.asking.seed) == (0.0, 256, 0)
    assert spec.probes[1].turns[0].expect.contains == ("4", "four")
    assert spec_text(tmp_path / "spec.yaml") == (tmp_path / "spec.yaml").read_text()


def test_an_unknown_gate_has_its_own_code_and_its_place(tmp_path):
    error = refusal(write(tmp_path, changed(lambda d: d["gates"].append({"name": "polite", "threshold": 1}))))
    assert error.code == "unknown-gate"
    assert error.where.endswith("spec.yaml: gates[2]")
    assert "'polite'" in error.found
    assert all(name in error.fix for name in GATE_NAMES)


def _turn(data: Data) -> Data:
    turn: Data = data["probes"][1]["turns"][0]
    return turn


FIELD_REFUSALS: dict[str, tuple[Callable[[Data], Any], str, str]] = {
    # change, field that the refusal names, words of it
    "missing": (lambda d: d["persona"].pop("system_prompt"), "persona.system_prompt", "required"),
    "missing at the top": (lambda d: d.pop("gates"), "gates", "required"),
    "unknown": (lambda d: d["persona"].update(mood="warm"), "persona.mood", "not permitted"),
    "unknown in a probe": (
        lambda d: _turn(d).update(expects={}),
        "probes.1.turns.0.expects",
        "not permitted",
    ),
    "other schema": (lambda d: d.update(schema=2), "schema", "1"),
    "empty prompt": (lambda d: d["persona"].update(system_prompt=""), "persona.system_prompt", "at least 1"),
    "no gates": (lambda d: d.update(gates=[]), "gates", "at least 1"),
    "name with a slash": (lambda d: d.update(name="../x"), "name", "match pattern"),
    "share over 1": (lambda d: d["gates"][0].update(threshold=90), "gates.0.threshold", "less than or equal"),
    "share of nan": (lambda d: d["gates"][0].update(threshold=float("nan")), "gates.0.threshold", "than"),
    "margin 0": (lambda d: d["gates"][0].update(margin=0), "gates.0.margin", "greater than 0"),
    "two gates": (
        lambda d: d["gates"].append(d["gates"][0]),
        "(top level)",
        "gate 'right_tool' appears twice",
    ),
    "two ids": (lambda d: d["probes"][0].update(id="p2"), "(top level)", "probe id 'p2' appears twice"),
    "tool unknown": (
        lambda d: d["probes"][0]["turns"][0]["expect"].update(tool="serach"),
        "(top level)",
        "probe p1 expects tool 'serach', known: ['search']",
    ),
    "category unknown": (lambda d: d["probes"][0].update(category="chat"), "probes.0.category", "'greeting'"),
    "no turns": (lambda d: d["probes"][0].update(turns=[]), "probes.0.turns", "at least 1"),
    "silent turn": (lambda d: _turn(d).update(content=""), "probes.1.turns.0.content", "at least 1"),
    "tool first": (lambda d: _turn(d).update(role="tool"), "probes.1", "first turn must be the user's"),
    "tool unasked": (
        lambda d: d["probes"][1]["turns"].append({"role": "tool", "content": "x"}),
        "probes.1",
        "must follow a turn that expects a call",
    ),
    "concise without limits": (
        lambda d: d["gates"][1].pop("max_words"),
        "gates.1",
        "max_words or max_sentences",
    ),
    "limits elsewhere": (
        lambda d: d["gates"][0].update(max_words=3),
        "gates.0",
        "belong to the gate concise",
    ),
    "knowledge of nothing": (
        lambda d: _turn(d)["expect"].update(contains=[]),
        "probes.1.turns.0.expect",
        "'reasoning' needs contains, or no gate would judge it",
    ),
    "contains for no gate": (
        lambda d: _turn(d)["expect"].pop("knowledge"),
        "probes.1.turns.0.expect",
        "contains needs knowledge",
    ),
    "arguments of no tool": (
        lambda d: _turn(d)["expect"].update(arguments={"query": "x"}),
        "probes.1.turns.0.expect",
        "arguments need a tool",
    ),
}


@pytest.mark.parametrize("case", FIELD_REFUSALS)
def test_a_wrong_field_is_named(tmp_path, case):
    change, field, words = FIELD_REFUSALS[case]
    error = refusal(write(tmp_path, changed(change)))
    assert error.code == "spec-field"
    assert error.where == f"{tmp_path / 'spec.yaml'}: {field}"
    assert words in error.found


def test_further_faults_are_counted(tmp_path):
    data = changed(lambda d: (d["persona"].pop("name"), d["persona"].pop("system_prompt"), d.pop("name")))
    assert refusal(write(tmp_path, data)).found.endswith("(and 2 more)")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gates: [unclosed", "line 1"),
        ("- a\n- b\n", "list, not a mapping"),
        ("", "NoneType, not a mapping"),
        ("just words", "str, not a mapping"),
        ("x: !!python/object/apply:os.getcwd []", "python/object"),  # nothing in a spec is ever run
    ],
)
def test_what_is_no_yaml_mapping_is_a_syntax_fault(tmp_path, text, words):
    error = refusal(write(tmp_path, text))
    assert (error.code, error.where) == ("spec-syntax", str(tmp_path / "spec.yaml"))
    assert words in error.found


def test_bytes_that_are_no_text_are_a_syntax_fault(tmp_path):
    (tmp_path / "spec.yaml").write_bytes(b"name: \xff\xfe")
    assert refusal(tmp_path / "spec.yaml").code == "spec-syntax"


@pytest.mark.parametrize("name", ["anny", "../annie", "annie.yaml", ""])
def test_a_spec_that_is_not_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    error = refusal(name)
    assert error.code == "spec-missing"
    assert "annie" in error.fix


def test_a_spec_cannot_be_changed_once_loaded():
    with pytest.raises(ValueError, match="frozen"):
        load_spec("annie").gates[0].threshold = 0.1  # type: ignore[misc]


# --- fingerprints --------------------------------------------------------------------------


def spec_of(change: Callable[[Data], Any] = lambda d: None) -> Spec:
    return Spec.model_validate(changed(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["gates"][0].update(threshold=0.91),
        lambda d: d["persona"].update(system_prompt="You are Annie. "),
        lambda d: d["persona"]["tools"][0]["function"].update(parameters={"type": "object"}),
        lambda d: d["probes"][0]["turns"][0]["expect"]["arguments"].update(query="Garden"),
        lambda d: d["probes"].reverse(),
        lambda d: d.update(asking={"seed": 1}),
    ],
)
def test_a_fingerprint_changes_with_any_content(change):
    assert fingerprint(spec_of(change)) != fingerprint(spec_of())


def test_a_fingerprint_ignores_what_means_nothing(tmp_path):
    shuffled = write(
        tmp_path, "# a comment\n" + yaml.safe_dump(dict(reversed(GOOD.items())), sort_keys=False)
    )
    assert fingerprint(load_spec(shuffled)) == fingerprint(spec_of())
    spelled_out = spec_of(lambda d: d["gates"][0].update(margin=0.02))
    assert fingerprint(spelled_out) == fingerprint(spec_of())
    assert len(fingerprint(spec_of())) == 64


def test_a_fingerprint_of_probes_depends_on_their_order():
    first, second = spec_of().probes
    assert fingerprint([first, second]) != fingerprint([second, first])
    assert fingerprint([first]) != fingerprint([first, second])


# --- probes as JSONL -----------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)  # all but halves of surrogate pairs
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | words,
    lambda inner: st.lists(inner) | st.dictionaries(words, inner),
)


@st.composite
def made_probes(draw: st.DrawFn) -> list[Probe]:
    ids = draw(st.lists(words, unique=True, max_size=4))
    probes = []
    for name in ids:
        call = {"tool": "search", "arguments": draw(st.none() | st.dictionaries(words, json_values))}
        know = {"contains": draw(st.lists(words, min_size=1)), "knowledge": "factual"}
        turns = [
            {"content": draw(words), "expect": draw(st.sampled_from([{}, call, know]))},
            {"content": draw(words)},
        ]
        category = draw(st.sampled_from(CATEGORIES))
        probes.append(Probe.model_validate({"id": name, "category": category, "turns": turns}))
    return probes


@given(made_probes())
def test_probes_survive_a_round_trip(tmp_path_factory, probes):
    path = tmp_path_factory.mktemp("probes") / "probes.jsonl"
    path.write_text(dump_probes(probes), encoding="utf-8")
    assert load_probes(path) == tuple(probes)


def test_annies_probes_survive_a_round_trip_one_a_line(tmp_path):
    spec = load_spec("annie")
    text = dump_probes(spec.probes)
    (tmp_path / "p.jsonl").write_text(text + "\n  \n", encoding="utf-8")  # blank lines are no probes
    assert load_probes(tmp_path / "p.jsonl") == spec.probes
    assert text.count("\n") == len(spec.probes)


LINE = json.dumps(GOOD["probes"][1])


@pytest.mark.parametrize(
    ("text", "code", "where", "found"),
    [
        (LINE + "\n{oops\n", "probes-syntax", "p.jsonl:2", "Expecting property name"),
        (LINE + "\n\n[]", "spec-field", "p.jsonl:3: (top level)", "valid dictionary"),
        (LINE.replace('"id": "p2", ', ""), "spec-field", "p.jsonl:1: id", "required"),
        (LINE + "\n" + LINE, "spec-field", "p.jsonl", "probe id 'p2' appears twice"),
        ('{"id": "\udcff"}', "probes-syntax", "p.jsonl:1", "can't decode byte 0xff"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, code, where, found):
    (tmp_path / "p.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SpecError) as caught:
        load_probes(tmp_path / "p.jsonl")
    assert caught.value.code == code
    assert caught.value.where == str(tmp_path / where)
    assert found in caught.value.found


def test_no_file_of_probes(tmp_path):
    with pytest.raises(SpecError, match=r"probes-missing.*p\.jsonl: no such file"):
        load_probes(tmp_path / "p.jsonl")


def test_a_spec_survives_a_round_trip_with_its_probes_beside_it(tmp_path):
    spec = load_spec("annie")
    tool = spec.persona.tools[0].model_dump()
    tool["function"]["parameters"]["properties"]["query"]["default"] = None  # no field of ours: must stay
    persona = spec.persona.model_copy(update={"tools": (Tool.model_validate(tool),)})
    spec = spec.model_copy(update={"persona": persona, "probes": spec.probes[:3]})
    (tmp_path / "asked.jsonl").write_text(dump_probes(spec.probes), encoding="utf-8")
    (tmp_path / "spec.yaml").write_text(dump_spec(spec, probes="asked.jsonl"), encoding="utf-8")
    assert load_spec(tmp_path / "spec.yaml") == spec
