"""Text from elsewhere: what a terminal would obey, or a page hide, is spelled out."""

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_leakage.tracking.text import plain_text


@given(st.text(), st.integers(60, 200))
def test_the_result_is_shown_as_it_is_and_is_short_and_stays(text, limit):
    plain = plain_text(text, limit)
    assert len(plain) <= limit
    hidden = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert not [c for c in plain if unicodedata.category(c) in hidden and c not in "\n\t"]
    assert plain_text(plain, limit) == plain
    plain.encode()


@pytest.mark.parametrize("text", ["", "plain", "ü λmax ≥ 3 dB", "two\n\tlines", "画像 🙂"])
def test_what_is_harmless_stays(text):
    assert plain_text(text) == text


def test_a_long_text_says_how_long_it_was():
    plain = plain_text("\x07" * 9_000_000)
    assert len(plain) <= 2000
    assert plain.endswith("… (cut from 9,000,000 characters)")


def test_a_terminal_gets_what_its_encoding_has(monkeypatch):
    """Of each entry point: none may end with an error because a terminal is not Unicode."""
    from flwr_leakage.cli import app
    from flwr_leakage.simulation import command

    def cli():
        monkeypatch.setattr(app, "app", lambda: print("λ"))
        app.main()

    def simulation():
        def said(*arguments):
            print("λ")
            return "that is all"

        monkeypatch.setattr(command, "check_overrides", said)
        with pytest.raises(SystemExit):
            command.main()

    for entry in (cli, simulation):
        written = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
        entry()
        sys.stdout.flush()
        assert written.getvalue() == b"?\n"
