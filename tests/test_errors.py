"""What a refusal looks like on stderr, and which exit code it carries: scripts depend on both."""

import inspect

import pytest

from manners import errors
from manners.errors import MannersError, SpecError, UsageError

BRANCHES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MannersError)]


def test_a_refusal_has_four_parts():
    error = SpecError(
        "a-code", where="f.yaml: name", found="3, not 4", consequence="It breaks.", fix="mend it"
    )
    assert str(error) == "error[a-code] f.yaml: name: 3, not 4\n  It breaks.\n  Fix: mend it"
    assert (error.code, error.where, error.found) == ("a-code", "f.yaml: name", "3, not 4")
    assert (error.consequence, error.fix) == ("It breaks.", "mend it")


def test_without_a_consequence_there_is_no_empty_line():
    assert str(SpecError("c", where="w", found="f", fix="x")) == "error[c] w: f\n  Fix: x"


@pytest.mark.parametrize("kind", BRANCHES)
def test_bad_input_is_3_wrong_usage_is_2_and_nothing_else(kind):
    error = kind("c", where="w", found="f", fix="x")
    assert error.exit_code == (2 if isinstance(error, UsageError) else 3)


def test_no_exit_code_is_that_of_a_crash():
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == {
        "EXIT_PASS": 0,
        "EXIT_USAGE": 2,
        "EXIT_BAD_INPUT": 3,
        "EXIT_GATE_FAILS": 4,
        "EXIT_INCONCLUSIVE": 5,
        "EXIT_INTERRUPTED": 130,
    }
