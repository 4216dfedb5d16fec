"""What good manners are for one product: persona, probes and gates, as one YAML file.

A spec names the system prompt, the tools, whether the model may think, and for every gate the
least share of replies that must pass. Probes are the questions, each with what a right answer
must and must not contain; they stand in the spec itself or in a JSONL file beside it.

What a spec cannot say: how warm an answer is, or whether it helped. Gates compare text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import SpecError

GateName = Literal[
    "no_thinking_leak", "right_tool", "exact_arguments", "no_markdown", "concise", "factual", "reasoning"
]
GATE_NAMES: tuple[GateName, ...] = (
    "no_thinking_leak",
    "right_tool",
    "exact_arguments",
    "no_markdown",
    "concise",
    "factual",
    "reasoning",
)
# What FP4 keeps, against what it loses: the report shows the two apart.
KNOWLEDGE_GATES: frozenset[GateName] = frozenset({"factual", "reasoning"})

Category = Literal["greeting", "factual", "memory", "web", "multi_turn", "reasoning"]
CATEGORIES: tuple[Category, ...] = ("greeting", "factual", "memory", "web", "multi_turn", "reasoning")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ToolFunction(_Strict):
    name: str = Field(min_length=1)
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments."""


class Tool(_Strict):
    """One tool, in the form that OpenAI's chat API takes."""

    type: Literal["function"] = "function"
    function: ToolFunction


class Persona(_Strict):
    name: str
    system_prompt: str = Field(min_length=1)
    tools: tuple[Tool, ...] = ()
    thinking: bool = False

    def tool_dicts(self) -> list[dict[str, Any]]:
        """The tools as plain dicts, as a request and a chat template take them."""
        return [tool.model_dump() for tool in self.tools]


class Expect(_Strict):
    """What a right reply to one turn must be. An absent field is not judged.

    Half an expectation is refused, for no gate would judge it: ``knowledge`` and ``contains`` need
    each other, and ``arguments`` need a ``tool``.
    """

    tool: str | None = None
    """The tool that must be called; None means that no tool may be called."""
    arguments: dict[str, Any] | None = None
    """The exact arguments of that call."""
    contains: tuple[str, ...] = ()
    """The reply must contain at least one of these, as whole words, case ignored."""
    knowledge: Literal["factual", "reasoning"] | None = None
    """Which gate ``contains`` counts for."""

    @model_validator(mode="after")
    def _is_judged_by_a_gate(self) -> Expect:
        if self.knowledge is not None and not self.contains:
            raise ValueError(f"knowledge {self.knowledge!r} needs contains, or no gate would judge it")
        if self.contains and self.knowledge is None:
            raise ValueError("contains needs knowledge (factual or reasoning), or no gate would judge it")
        if self.arguments is not None and self.tool is None:
            raise ValueError("arguments need a tool, or no gate would judge them")
        return self


class Turn(_Strict):
    """One thing said to the model: by the user, or by a tool that answers the model's last call."""

    role: Literal["user", "tool"] = "user"
    content: str = Field(min_length=1)
    expect: Expect = Expect()


class Probe(_Strict):
    id: str = Field(min_length=1)
    category: Category
    turns: tuple[Turn, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _tool_turns_answer_a_call(self) -> Probe:
        if self.turns[0].role != "user":
            raise ValueError("the first turn must be the user's")
        for before, turn in zip(self.turns, self.turns[1:], strict=False):
            if turn.role == "tool" and before.expect.tool is None:
                raise ValueError("a tool's turn must follow a turn that expects a call")
        return self


class Gate(_Strict):
    name: GateName
    threshold: float = Field(ge=0, le=1)
    """The least share of replies that must pass, whatever the parent does."""
    margin: float = Field(default=0.02, gt=0, lt=1)
    """How far below its parent a candidate may be: 0.02 is two points."""
    max_words: int | None = Field(default=None, gt=0)
    max_sentences: int | None = Field(default=None, gt=0)
    """The two limits of ``concise``; other gates read neither."""

    @model_validator(mode="after")
    def _limits_belong_to_concise(self) -> Gate:
        limits = (self.max_words, self.max_sentences)
        if self.name != "concise" and limits != (None, None):
            raise ValueError("max_words and max_sentences belong to the gate concise")
        if self.name == "concise" and limits == (None, None):
            raise ValueError("concise needs max_words or max_sentences")
        return self


class Asking(_Strict):
    """How probes are put to a server."""

    temperature: float = Field(default=0.0, ge=0)
    max_tokens: int = Field(default=256, gt=0)
    seed: int = 0


class Spec(_Strict):
    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    persona: Persona
    gates: tuple[Gate, ...] = Field(min_length=1)
    asking: Asking = Asking()
    probes: tuple[Probe, ...] = ()

    @model_validator(mode="after")
    def _names_are_unique_and_known(self) -> Spec:
        _refuse_repeats("gate", [gate.name for gate in self.gates])
        _refuse_repeats("probe id", [probe.id for probe in self.probes])
        known = {tool.function.name for tool in self.persona.tools}
        for probe in self.probes:
            for turn in probe.turns:
                if turn.expect.tool is not None and turn.expect.tool not in known:
                    raise ValueError(
                        f"probe {probe.id} expects tool {turn.expect.tool!r}, known: {sorted(known)}"
                    )
        return self

    def gate(self, name: GateName) -> Gate | None:
        return next((gate for gate in self.gates if gate.name == name), None)


def _refuse_repeats(what: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r} appears twice")
        seen.add(name)


def load_spec(source: str | Path) -> Spec:
    """Load a spec from a YAML file, or a bundled one by name (``annie``).

    ``probes: FILE.jsonl`` in the YAML stands for the probes in that file, beside the spec.

    Raises:
        SpecError: ``spec-missing`` if there is no such file or bundled spec; ``spec-syntax`` if it
            is no YAML mapping; ``unknown-gate`` for a gate that does not exist; ``spec-field`` for
            a field that is missing, unknown or out of range. For a file of probes also those of
            :func:`load_probes`.
    """
    path = _bundled(str(source)) or Path(source)
    if not path.is_file():
        raise SpecError(
            "spec-missing",
            where=str(source),
            found="no such file, and no bundled spec of that name",
            fix=f"give a YAML file, or one of: {', '.join(bundled_specs())}",
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError("spec-syntax", where=str(path), found=str(error), fix="correct the YAML") from error
    if not isinstance(data, dict):
        raise SpecError(
            "spec-syntax",
            where=str(path),
            found=f"{type(data).__name__}, not a mapping",
            fix="start from the bundled annie.yaml",
        )
    _refuse_unknown_gates(data, str(path))
    if isinstance(data.get("probes"), str):  # a file, named as seen from the spec's own folder
        data["probes"] = [probe.model_dump() for probe in load_probes(path.parent / data["probes"])]
    return _validated(Spec, data, str(path))


def load_probes(path: Path) -> tuple[Probe, ...]:
    """Load probes from JSONL, one probe a line.

    Raises:
        SpecError: ``probes-missing``, ``probes-syntax`` (with the line) or ``spec-field``.
    """
    if not path.is_file():
        raise SpecError(
            "probes-missing", where=str(path), found="no such file", fix="give a JSONL file of probes"
        )
    probes = []
    # Bytes, because text would also be split at U+2028 and its like, which may stand inside a probe.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            raise SpecError(
                "probes-syntax", where=where, found=str(error), fix="write one JSON object a line, in UTF-8"
            ) from error
        probes.append(_validated(Probe, data, where))
    try:
        _refuse_repeats("probe id", [probe.id for probe in probes])
    except ValueError as error:
        raise SpecError(
            "spec-field", where=str(path), found=str(error), fix="give every probe its own id"
        ) from error
    return tuple(probes)


def dump_probes(probes: Iterable[Probe]) -> str:
    """Probes as JSONL, the inverse of :func:`load_probes`."""
    return "".join(
        json.dumps(probe.model_dump(exclude_defaults=True), ensure_ascii=False, sort_keys=True) + "\n"
        for probe in probes
    )


def dump_spec(spec: Spec, probes: str) -> str:
    """A spec as YAML with its probes in the file ``probes``, relative to it: :func:`load_spec` reads it."""
    data = spec.model_dump(mode="json", by_alias=True, exclude={"probes"}, exclude_none=True)
    return yaml.safe_dump({**data, "probes": probes}, sort_keys=False, allow_unicode=True)


def fingerprint(value: BaseModel | Sequence[BaseModel]) -> str:
    """sha256 (hex) over the canonical JSON of specs or probes; two runs compare only if it is equal."""
    items = value if isinstance(value, Sequence) else [value]
    text = json.dumps([item.model_dump(mode="json") for item in items], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def bundled_specs() -> list[str]:
    """Names of the specs that ship with the package."""
    return sorted(
        f.name.removesuffix(".yaml") for f in resources.files("manners").iterdir() if f.name.endswith(".yaml")
    )


def spec_text(source: str | Path) -> str:
    """A spec's file as it is written, comments included."""
    return (_bundled(str(source)) or Path(source)).read_text(encoding="utf-8")


def _bundled(name: str) -> Path | None:
    return Path(str(resources.files("manners") / f"{name}.yaml")) if name in bundled_specs() else None


def _refuse_unknown_gates(data: dict[str, Any], where: str) -> None:
    gates = data.get("gates")
    for position, gate in enumerate(gates if isinstance(gates, list) else []):
        name = gate.get("name") if isinstance(gate, dict) else None
        if isinstance(name, str) and name not in GATE_NAMES:
            raise SpecError(
                "unknown-gate",
                where=f"{where}: gates[{position}]",
                found=f"gate {name!r} does not exist",
                consequence="A gate that nothing measures would always look passed.",
                fix=f"use one of: {', '.join(GATE_NAMES)}",
            )


_Model = TypeVar("_Model", bound=BaseModel)


def _validated(model: type[_Model], data: Any, where: str) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(top level)"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise SpecError(
            "spec-field",
            where=f"{where}: {field}",
            found=f"{first['msg']}{more}",
            fix="compare with the bundled annie.yaml; `manners spec annie` prints it",
        ) from error
