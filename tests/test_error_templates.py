"""Errors are templates with values: the server shows the template, and of the values those that are public."""

from __future__ import annotations

import ast
import copy
import pickle
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

import unmask
from unmask.errors import ConfigError, DataError, MissingExtraError, NonFiniteError, Public, UnmaskError, UsageError
from unmask.server.errors import from_error, public_message

SRC = Path(unmask.__file__).parent
KINDS = {
    *("UnmaskError", "UsageError", "ConfigError", "DataError", "ModelFolderError", "NonFiniteError", "PeerError"),
    *("Wrong", "Busy", "ConstraintTooCostly"),
}
# Whatever these raise may be the answer to a request.
REACHABLE = ("constraints", "noise", "reader", "samplers", "sampling", "server", "text")
LOCAL = {
    "sampling/canvas.py",
    "sampling/particles.py",
    "server/lifecycle.py",
    "text/bulk.py",
}  # these speak to whoever runs the program


def raised() -> Iterator[tuple[str, ast.Call]]:
    """Every error that is made somewhere in the package, with its place."""
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
                yield f"{path.relative_to(SRC)}:{node.lineno}", node


def test_templates_name_their_values() -> None:
    found = 0
    for place, call in raised():
        names = {keyword.arg for keyword in call.keywords}
        if names:
            template = call.args[0]
            assert isinstance(template, ast.Constant), place  # else it would not be known what of it is a value
            assert {name for _, name, _, _ in string.Formatter().parse(template.value) if name} == names, place
            found += 1
    assert found > 100


def test_what_may_answer_a_request_is_a_template() -> None:
    places = [place for place, call in raised() if not isinstance(call.args[0], ast.Constant)]
    places = [place for place in places if place.startswith(REACHABLE) and place.split(":")[0] not in LOCAL]
    assert places == []


def secret(text: str) -> UsageError:
    return UsageError("no gap in {text!r}: of {most} tokens", text=text, most=Public(7))


def test_values_are_dropped_unless_they_are_public() -> None:
    error = secret("{most} a secret")
    assert str(error) == "no gap in '{most} a secret': of 7 tokens"
    assert error.redacted() == "no gap in '…': of 7 tokens"
    outer = ConfigError("{where}: {reason}", where=Public("schema.x", "schema.…"), reason=error)
    assert str(outer) == f"schema.x: {error}"
    assert outer.redacted() == "schema.…: no gap in '…': of 7 tokens"
    assert UsageError("{n:04X}", n=Public(10)).redacted() == "000A"
    assert UsageError("{n:04X}", n=10).redacted() == "…"
    assert MissingExtraError("outlines-core", "constrain", "a schema").redacted() is not None


def test_an_error_inside_another_without_a_template_is_dropped() -> None:
    inner = UsageError(f"about {'a secret'}")
    assert UsageError("first: {reason}", reason=inner).redacted() == "first: …"
    assert UsageError("first: {reason}", reason=ValueError("a secret")).redacted() == "first: …"


def test_a_constant_sentence_is_its_own_template() -> None:
    assert UsageError("give {either} text or tokens").redacted() == "give {either} text or tokens"
    text = "a secret"
    for error in (UsageError(f"no gap in {text}"), UsageError("no gap in " + text), UsageError(text[:-1])):
        assert error.template is None
        assert error.redacted() is None


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_is_redacted_alike(again: object) -> None:
    for error in (secret("x"), UsageError("plain"), UsageError("not " + str(1))):
        same = again(error)  # type: ignore[operator]
        assert (str(same), same.redacted(), type(same)) == (str(error), error.redacted(), type(error))
        assert same.__traceback__ is None


def test_without_a_template_the_server_tells_the_kind_of_error_alone() -> None:
    """As of a plug-in that formats its messages itself."""
    for kind in (UsageError, ConfigError, DataError, UnmaskError):
        answer = from_error(kind(f"about {'a secret'}"))
        assert answer.status == 400
        assert answer.message
        assert "secret" not in answer.message
    assert from_error(NonFiniteError(f"about {'a secret'}")).status == 500
    assert len(public_message(UsageError("{x}", x=Public("a b\n" * 1000)))) <= 300
