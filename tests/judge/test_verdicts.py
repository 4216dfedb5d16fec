"""Verdicts: what passes, what fails, what cannot be said; what may be compared at all."""

import json
import subprocess
import sys

import pytest

from manners.ask.transcripts import dump, load_transcripts
from manners.errors import JudgeError
from manners.judge.decision import Counts, decide
from manners.judge.verdicts import judge, judge_files, load_verdicts, write_verdicts

from .builders import make_gate, make_persona, make_probe, make_spec, reply

SPEC = make_spec(make_gate("no_markdown", 0.9), make_gate("right_tool", 0.9))


def probes(n):
    return [make_probe(f"p{k}") for k in range(n)]


def side(asked, bad=(), errors=(), *, spec=SPEC, model="m", served=None, tokens=10, bad_text="**No**"):
    """Replies to one-turn probes: good ones, bad ones (Markdown), and errors."""
    return {
        p.id: [
            reply(
                bad_text if k in bad else "Yes.",
                probe=p,
                spec=spec,
                model=model,
                served=served,
                usage={"prompt_tokens": tokens},
                error="timeout" if k in errors else None,
            )
        ]
        for k, p in enumerate(asked)
    }


def row(verdicts, name="no_markdown"):
    return next(gate for gate in verdicts.gates if gate.name == name)


def judged(n, bad=(), errors=(), parent_bad=(), parent_errors=()):
    asked = probes(n)
    ours, theirs = side(asked, bad, errors), side(asked, parent_bad, parent_errors, model="parent")
    return judge(SPEC, asked, ours, theirs)


# --- a row ---


def test_a_row_counts_pairs():
    found = row(judged(100, bad={1, 2, 3}, parent_bad={3, 4}))
    assert (found.n, found.passed, found.parent_passed, found.pairs) == (100, 97, 98, 100)
    assert (found.harm_ids, found.gain_ids) == (("p1", "p2"), ("p4",))
    assert (found.harms, found.gains, found.errors) == (2, 1, 0)
    assert found.delta == pytest.approx(-0.01)
    assert found.p_worse == pytest.approx(0.5)
    assert found.interval == pytest.approx((0.9148, 0.9938), abs=1e-4)
    assert 0.01 < found.worse_by_at_most < 0.08
    assert [(f.probe, f.turn) for f in found.failures] == [("p1", 0), ("p2", 0), ("p3", 0)]
    assert "bold text" in found.failures[0].why
    assert (found.margin, found.threshold) == (0.02, 0.9)


def test_only_probes_that_a_gate_is_about_count():
    asked = [*probes(40), *(make_probe(f"t{k}", {"tool": "read_notes"}) for k in range(5))]
    ours = side(asked[:40])
    ours |= {p.id: [reply("", ("read_notes", "{}"), probe=p, spec=SPEC)] for p in asked[40:]}
    verdicts = judge(SPEC, asked, ours)
    assert (row(verdicts).n, row(verdicts, "right_tool").n) == (40, 45)
    assert verdicts.verdict == "pass"


def test_a_gate_that_no_probe_asks_for_is_inconclusive():
    spec = make_spec(make_gate("factual"), make_gate("right_tool"))
    asked = probes(40)
    verdicts = judge(spec, asked, side(asked, spec=spec))
    found = row(verdicts, "factual")
    assert (found.n, found.interval, found.verdict, found.delta) == (0, (0.0, 1.0), "inconclusive", None)
    assert found.why == "no probe asks for this"
    assert (verdicts.verdict, verdicts.exit_code) == ("inconclusive", 5)


# --- the rule ---

GATE = make_gate("no_markdown", 0.9)


def rule(n, passed, harms=0, gains=0, errors=0, our_errors=None, against=0):
    heard = n - (errors if our_errors is None else our_errors)
    return decide(Counts(n, passed, heard, errors, harms, gains, against), GATE)


@pytest.mark.parametrize(
    ("counts", "verdict", "why"),
    [
        (rule(400, 400), "pass", "400 of 400 (100.0%), as often as the parent"),
        (rule(400, 396, harms=4), "pass", "396 of 400 (99.0%), 1.0 points below the parent"),
        (rule(400, 392, harms=12, gains=4), "fail", "significantly worse"),
        (rule(400, 392, harms=14, gains=6), "pass", "2.0 points below"),  # the margin itself still passes
        (
            rule(400, 391, harms=15, gains=6),
            "fail",
            "2.2 points below the parent, more than the margin of 2.0",
        ),
        (rule(400, 395, harms=5), "fail", "significantly worse: 5 harms, 0 gains, p = 0.031"),
        (rule(400, 360), "pass", "90.0%"),  # the threshold itself still passes
        (rule(400, 359), "fail", "359 of 400 (89.8%), below the threshold of 90.0%"),
        (rule(400, 359, gains=40), "fail", "below the threshold"),
        (rule(400, 380, gains=10), "pass", "2.5 points above"),
        (rule(29, 29), "inconclusive", "only 29 probes"),
        (rule(30, 30), "pass", "30 of 30"),
        (rule(10, 0, harms=10), "fail", "beyond doubt on only 10 probes"),
        (rule(10, 5, harms=5), "fail", "beyond doubt"),
        (rule(10, 8, harms=2), "inconclusive", "only 10 probes"),
        (rule(0, 0), "inconclusive", "no probe"),
        # errors: never in favour, never as evidence against
        (rule(400, 380, errors=20, against=20), "inconclusive", "passes only if 20 errors are left out"),
        (rule(400, 379, errors=21, against=21), "inconclusive", "errors on 21 of 400"),
        (rule(400, 0, harms=379, errors=21, against=21), "inconclusive", "errors on 21 of 400"),
        (rule(400, 398, errors=2, against=2), "pass", "398 of 400"),
        (rule(400, 358, errors=2, against=2), "fail", "358 of 398"),
        (rule(100, 90, errors=1, against=1), "pass", "90 of 100"),
        (
            rule(100, 89, errors=2, against=2),
            "inconclusive",
            "passes only if 2 errors are left out; with them 89",
        ),
        (rule(400, 391, harms=7, errors=2, against=2), "fail", "significantly worse"),
        (rule(400, 390, harms=13, gains=6, errors=2, against=2), "inconclusive", "more than the margin"),
        (rule(400, 400, errors=2, our_errors=0, against=0), "pass", "400 of 400"),
    ],
)
def test_the_rule(counts, verdict, why):
    assert counts[0] == verdict
    assert why in counts[1]


def test_an_error_is_never_a_pass_and_no_harm():
    found = row(judged(100, errors={0, 1}))
    assert (found.n, found.passed, found.parent_passed, found.pairs) == (100, 98, 100, 98)
    assert (found.harms, found.errors, found.error_ids) == (0, 2, ("p0", "p1"))
    assert [f.why for f in found.failures] == ["error timeout: it broke"] * 2


def test_an_error_of_the_parent_is_no_gain():
    found = row(judged(100, parent_errors={0, 1}))
    assert (found.passed, found.parent_passed, found.pairs, found.gains) == (100, 98, 98, 0)


def test_an_error_late_in_a_conversation_takes_the_whole_probe_out():
    conversation = make_probe("c", {}, {}, {})
    asked = [*probes(40), conversation]
    ours, theirs = side(asked), side(asked)
    theirs["c"] = [reply("Yes.", probe=conversation, turn=k, spec=SPEC) for k in range(3)]
    ours["c"] = [*theirs["c"][:1], reply("", probe=conversation, turn=1, spec=SPEC, error="http-5xx")]
    for gate in judge(SPEC, asked, ours, theirs).gates:
        assert (gate.passed, gate.error_ids) == (40, ("c",))


# --- all gates ---


@pytest.mark.parametrize(("bad", "verdict", "code"), [((), "pass", 0), (range(20), "fail", 4)])
def test_overall(bad, verdict, code):
    verdicts = judged(100, bad=bad)
    assert (verdicts.verdict, verdicts.exit_code) == (verdict, code)
    assert [g.verdict for g in verdicts.gates] == [verdict, "pass"]
    assert "no_markdown" in verdicts.why or verdict == "pass"


def test_a_fail_outweighs_an_inconclusive():
    spec = make_spec(make_gate("factual"), make_gate("no_markdown"))
    asked = probes(100)
    verdicts = judge(spec, asked, side(asked, bad=range(50), spec=spec), side(asked, spec=spec))
    assert [g.verdict for g in verdicts.gates] == ["inconclusive", "fail"]
    assert verdicts.exit_code == 4


def test_the_parent_is_held_to_the_thresholds_alone():
    asked = probes(100)
    good, bad = side(asked, bad=range(5)), side(asked, bad=range(15))
    for verdicts in (judge(SPEC, asked, good), judge(SPEC, asked, good, side(asked, bad=range(5)))):
        found = row(verdicts)
        assert (verdicts.is_parent, found.verdict, found.why) == (True, "pass", "95 of 100 (95.0%)")
        assert (found.passed, found.parent_passed, found.harms, found.p_worse) == (95, 95, 0, 1.0)
        assert found.interval == pytest.approx((0.8872, 0.9836), abs=1e-4)
        assert found.worse_by_at_most is None
        assert found.needs == "29 probes, all passing, to show a share of 90.0% (95 %, one-sided)"
    assert row(judge(SPEC, asked, bad)).verdict == "fail"
    assert judge(SPEC, asked, side(asked, errors={1, 2, 3})).verdict == "pass"


def test_needs_and_limits_say_what_was_not_shown():
    verdicts = judged(200, bad={1, 2, 3, 4}, parent_bad={4, 5})
    needs = row(verdicts).needs
    assert needs.startswith("about ")
    assert "to show less than 2.0 points worse" in needs
    assert "(4 in 200)" in needs
    assert 400 < int(needs.split()[1]) < 450
    bound = 100 * row(verdicts).worse_by_at_most
    assert any(
        f"no_markdown may in truth be up to {bound:.1f} points below" in line for line in verdicts.limits
    )
    assert any("200 probes" in line and "1.5%" in line for line in verdicts.limits)
    shown = row(verdicts, "right_tool")
    assert shown.worse_by_at_most < 0.02
    assert shown.needs == "nothing: shown to be less than 2.0 points worse (95 %, one-sided)"


# --- what may be compared ---


def test_other_prompt_lengths_make_it_void():
    asked = probes(40)
    verdicts = judge(SPEC, asked, side(asked, tokens=11), side(asked, model="parent"))
    assert (verdicts.comparability, verdicts.verdict, verdicts.exit_code) == ("void", "inconclusive", 5)
    assert "p0: 11 tokens, the parent's 10" in verdicts.why


def test_other_engines_make_it_a_stack_comparison_but_other_weights_do_not():
    asked = probes(40)
    ours = {"engine": "vllm", "checkpoint_sha256": "a"}
    for theirs, expected in (
        ({"engine": "sglang", "checkpoint_sha256": "b"}, "stack-comparison"),
        ({"engine": "vllm", "checkpoint_sha256": "b"}, "comparable"),
        ({}, "stack-comparison"),
    ):
        verdicts = judge(SPEC, asked, side(asked, served=ours), side(asked, served=theirs))
        assert verdicts.comparability == expected
    assert verdicts.comparability_why == "engine: vllm, the parent's None"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda ours: ours.pop("p3"), "transcripts-incomplete"),
        (lambda ours: ours.update(p3=[]), "transcripts-incomplete"),
        (lambda ours: ours.update(side([make_probe("q")])), "transcripts-other-probes"),
        (lambda ours: ours.update(side([make_probe("p3", {"tool": "t"})])), "transcripts-other-probes"),
        (lambda ours: ours.update(side([make_probe("p3")], model="n")), "transcripts-mixed"),
        (lambda ours: ours.update(side(probes(5), spec=OTHER)), "transcripts-other-spec"),
    ],
    ids=["missing", "empty", "unknown", "other-wording", "mixed", "other-persona"],
)  # fmt: skip
@pytest.mark.parametrize("which", ["candidate", "parent"])
def test_what_does_not_belong_together_is_refused(change, code, which):
    asked = probes(5)
    sides = {"candidate": side(asked), "parent": side(asked, bad={0})}
    change(sides[which])
    with pytest.raises(JudgeError) as caught:
        judge(SPEC, asked, sides["candidate"], sides["parent"])
    assert caught.value.code == code
    assert caught.value.where.startswith(f"{which}'s transcripts")


OTHER = make_spec(*SPEC.gates, persona=make_persona(system_prompt="You are Bob."))


def test_gates_may_change_without_asking_again():
    asked = probes(40)
    spec = make_spec(make_gate("no_markdown", 0.5))
    assert judge(spec, asked, side(asked, spec=SPEC, bad=range(18))).verdict == "pass"


def test_a_conversation_without_its_end_is_incomplete():
    conversation = make_probe("c", {}, {})
    half = {"c": [reply("Yes.", probe=conversation, spec=SPEC)]}
    with pytest.raises(JudgeError, match=r"transcripts-incomplete.*1 of 1 probes"):
        judge(SPEC, [conversation], half)


def test_no_probes():
    with pytest.raises(JudgeError, match="no-probes"):
        judge(SPEC, [], {})


# --- files ---


def test_files_there_and_back(tmp_path):
    asked = probes(40)
    for name, replies in (("a", side(asked, bad={1})), ("b", side(asked))):
        (tmp_path / name).write_bytes(dump(r for rs in replies.values() for r in rs))
    verdicts = judge_files(SPEC, asked, tmp_path / "a", tmp_path / "b")
    assert verdicts == judge(SPEC, asked, load_transcripts(tmp_path / "a"), load_transcripts(tmp_path / "b"))
    path = tmp_path / "new" / "verdicts.json"
    write_verdicts(path, verdicts)
    assert load_verdicts(path) == verdicts
    assert [f.name for f in path.parent.iterdir()] == ["verdicts.json"]
    data = json.loads(path.read_text())
    keys = (
        "name n passed interval parent_passed harms gains errors p_worse delta margin threshold verdict why"
    )
    assert data["schema"] == 1
    assert set(keys.split()) <= set(data["gates"][0])


def test_verdicts_that_are_none(tmp_path):
    path = tmp_path / "verdicts.json"
    with pytest.raises(JudgeError, match="verdicts-missing"):
        load_verdicts(path)
    path.write_text('{"schema": 1}')
    with pytest.raises(JudgeError, match="verdicts-syntax"):
        load_verdicts(path)


def test_the_judge_loads_neither_torch_nor_an_http_library():
    heavy = "{'torch', 'transformers', 'aiohttp'}"
    code = f"import manners.judge.verdicts, sys; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
