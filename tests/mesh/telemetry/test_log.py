"""The log keeps facts and cannot repeat prompts, secrets or token ids."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from mesh.errors import InvalidRequest
from mesh.settings import Log, LogFormat, LogLevel
from mesh.telemetry.log import MAX_TEXT_CHARACTERS, RateLimit, configure_log, get_logger, log_context

SECRET = "the patient's name is Ada"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    stream = io.StringIO()
    configure_log(Log(), node_id="core-1", stream=stream)
    yield stream
    structlog.reset_defaults()
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_its_facts(stream: io.StringIO) -> None:
    with log_context(request_id="r1"):
        get_logger("mesh.test").info("request_ended", outcome="OK", generated_tokens=3, ttft_s=0.5, cached=True)
    [line] = lines(stream)
    assert line.pop("timestamp")
    assert line == {
        "event": "request_ended", "level": "info", "logger": "mesh.test", "node_id": "core-1", "request_id": "r1",
        "outcome": "OK", "generated_tokens": 3, "ttft_s": 0.5, "cached": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": SECRET},
        {"text": SECRET},
        {"api_key": SECRET},
        {"some_new_name": SECRET},
        {"token_ids": (1, 2, 3)},
        {"request": {"text": SECRET}},
        {"reason": [SECRET]},
        {"body": SECRET.encode()},
        {"error": InvalidRequest(SECRET)},
    ],
)
def test_what_is_not_known_to_be_harmless_is_withheld(stream: io.StringIO, fields: dict[str, object]) -> None:
    get_logger("mesh.test").info("something", **fields)
    assert SECRET not in stream.getvalue()
    assert "1, 2, 3" not in stream.getvalue()
    assert "[withheld " in stream.getvalue()


def test_long_text_is_cut(stream: io.StringIO) -> None:
    get_logger("mesh.test").info("something", error="x" * 10_000)
    assert len(str(lines(stream)[0]["error"])) == MAX_TEXT_CHARACTERS + 3


def test_exceptions_keep_stack_and_type_but_not_unknown_messages(stream: io.StringIO) -> None:
    try:
        try:
            raise ValueError(SECRET)
        except ValueError as exc:
            raise InvalidRequest("bad length") from exc
    except InvalidRequest:
        get_logger("mesh.test").exception("request_failed")
    [line] = lines(stream)
    shown = str(line["exception"])
    assert SECRET not in shown
    assert "builtins.ValueError" in shown
    assert "mesh.errors.InvalidRequest: bad length" in shown
    assert "test_log.py" in shown


def test_exception_groups(stream: io.StringIO) -> None:
    try:
        raise ExceptionGroup(SECRET, [OSError(28, "No space left"), KeyError(SECRET)])
    except ExceptionGroup:
        get_logger("mesh.test").exception("failed")
    shown = str(lines(stream)[0]["exception"])
    assert SECRET not in shown
    assert "No space left" in shown
    assert "KeyError" in shown


def test_own_standard_logging_is_formatted_and_foreign_loses_its_arguments(stream: io.StringIO) -> None:
    logging.getLogger("mesh.rpc.x").info("uplink of %s", "paris")
    logging.getLogger("uvicorn.error").warning("body was %s", SECRET)
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: %s", SECRET)
    logging.getLogger("uvicorn.error").info("not interesting")
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger("grpc").exception("failed")
    assert SECRET not in stream.getvalue()
    events = [line["event"] for line in lines(stream)]
    assert events == ["uplink of paris", "body was %s", "Task exception was never retrieved", "failed"]
    assert "ValueError" in str(lines(stream)[3]["exception"])


def test_levels_and_console(stream: io.StringIO) -> None:
    configure_log(Log(level=LogLevel.WARNING, format=LogFormat.CONSOLE), stream=stream)
    get_logger("mesh.test").info("quiet")
    get_logger("mesh.test").warning("loud", prompt=SECRET, outcome="OK")
    logging.getLogger("mesh.test").info("quiet too")
    assert "loud" in stream.getvalue()
    assert "quiet" not in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_asyncio_may_not_fill_the_disk_with_one_line(stream: io.StringIO) -> None:
    """Whatever the number of repetitions: twenty lines in ten seconds."""
    logger = logging.getLogger("asyncio")
    for _ in range(500):
        logger.error("socket.accept() out of system resource")
    assert len(lines(stream)) <= 40  # two windows at most, if ten seconds end in between
    logging.getLogger("mesh.other").warning("still_heard")
    assert lines(stream)[-1]["event"] == "still_heard"
    configure_log(Log(), node_id="core-1", stream=stream)
    assert sum(isinstance(one, RateLimit) for one in logger.filters) == 1


def test_the_count_of_lines_left_out_is_told_once(stream: io.StringIO) -> None:
    now = 0.0
    limit = RateLimit(2, 10.0, clock=lambda: now)
    logger = logging.getLogger("noisy")
    logger.addFilter(limit)
    try:
        for _ in range(5):
            logger.error("again")
        now = 10.0
        for _ in range(2):
            logger.error("again")
        now = 20.0
        logger.error("again")
    finally:
        logger.removeFilter(limit)
    told = [(line["event"], line.get("source"), line.get("count")) for line in lines(stream)]
    again = ("again", None, None)
    assert told == [again, again, ("lines_left_out", "noisy", 3), again, again, again]
