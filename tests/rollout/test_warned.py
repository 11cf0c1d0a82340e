"""Warnings of a rollout process reach the driver: each once, without secrets, and not more than some."""

import logging

from agentrl.rollout.warned import MAX_TOLD, ToldWarnings

log = logging.getLogger("agentrl.anything")


def test_each_text_is_told_once_in_order_and_only_while_it_listens():
    log.warning("before")
    with ToldWarnings() as warned:
        log.info("no warning")
        for number in (1, 2, 1):
            log.warning("number %d", number)
        assert warned.since(0) == ("number 1", "number 2")
        log.error("worse")
        assert warned.since(2) == ("worse",)
        assert warned.since(3) == ()
    log.warning("after")
    assert warned.since(3) == ()


def test_many_warnings_end_with_a_word_about_the_rest():
    with ToldWarnings() as warned:
        for number in range(MAX_TOLD + 100):
            log.warning("number %d", number)
    assert warned.since(MAX_TOLD - 1) == (
        f"number {MAX_TOLD - 1}",
        "further warnings are in the log of this rollout actor only",
    )


def test_secrets_are_not_told(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "tulip-8812-secret")
    with ToldWarnings() as warned:
        log.warning("http://user:pass-word-77@host refused tulip-8812-secret")
    (line,) = warned.since(0)
    assert "pass-word-77" not in line
