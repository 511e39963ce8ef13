"""Failures of the workers of the standard library's pools: what arrives, and as what it is read."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import multiprocessing.pool
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from concurrent.futures.thread import BrokenThreadPool
from typing import Any

import pytest

from faults.classify import classify
from protocol import CodedError, Trust, code_of, mint, read
from tests.protocol.carriers import children
from tests.protocol.carriers.children import ID

# Python 3.12 warns of a fork beside other threads; forking beside their own threads is how pools work.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

LIMIT = 45
"""Seconds within which a worker's failure must have arrived."""

Submit = Callable[..., BaseException]


@pytest.fixture(params=["fork", "spawn"], scope="module")
def context(request: pytest.FixtureRequest) -> Any:
    return multiprocessing.get_context(request.param)


def failing(get: Callable[[], object]) -> BaseException:
    try:
        value = get()
    except Exception as exc:  # noqa: BLE001 - whatever arrives is what the tests look at
        return exc
    pytest.fail(f"no failure arrived, but {value!r}")


@pytest.fixture(params=["Pool", "ThreadPool", "ProcessPoolExecutor", "ThreadPoolExecutor"], scope="module")
def submit(request: pytest.FixtureRequest, context: Any) -> Iterator[Submit]:
    """Call a worker in a pool, and return the exception that arrives."""
    match request.param:
        case "ProcessPoolExecutor":
            made: Any = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
        case "ThreadPoolExecutor":
            made = concurrent.futures.ThreadPoolExecutor(1)
        case "Pool":
            made = context.Pool(1)
        case _:
            made = multiprocessing.pool.ThreadPool(1)
    with made as pool:
        if request.param.endswith("Executor"):
            yield lambda worker, *args: failing(lambda: pool.submit(worker, *args).result(LIMIT))
        else:
            yield lambda worker, *args: failing(lambda: pool.apply_async(worker, args).get(LIMIT))
            pool.close()
            pool.join()


# -- named at the raising side


def test_a_coded_workers_failure_arrives_equal(submit: Submit) -> None:
    exc = submit(children.coded_worker, 3)
    assert type(exc) is CodedError
    sent = CodedError("WEIGHTS.REFIT_ABORTED", "rank 3", {"rank": 3}, id=ID, origin=exc.origin)
    assert exc == sent
    assert read(exc).trust is Trust.STRUCTURED
    fault = classify(exc)
    assert (fault.code, fault.id) == ("WEIGHTS.REFIT_ABORTED", ID)


def test_what_would_not_load_is_named_and_arrives(submit: Submit) -> None:
    """Undecorated, this exception breaks a ProcessPoolExecutor for good, and a Pool never answers."""
    exc = submit(children.coded_worker_of_a_foreign_exception, 503)
    assert isinstance(exc, CodedError)
    assert exc.code == "TASK.FAILED"
    assert exc.origin.type == "tests.protocol.badly_written.KeywordOnly"
    assert exc.detail.endswith("KeywordOnly: status 503")


# -- not named


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ValueError, "UNKNOWN.EXCEPTION"),
        (ConnectionRefusedError, "TRANSPORT.CONNECT"),
        (MemoryError, "NODE.OUT_OF_MEMORY"),
        (TimeoutError, "TIMEOUT.DEADLINE"),
    ],
)
def test_a_foreign_exception_is_classified_by_its_class(
    submit: Submit, kind: type[Exception], code: str
) -> None:
    exc = submit(children.plain_worker, kind, "it broke")
    assert type(exc) is kind
    assert code_of(exc) is None
    assert classify(exc).code == code


def test_a_token_in_the_text_is_read(submit: Submit) -> None:
    exc = submit(children.plain_worker, ValueError, f"it said {mint('NODE.IO', ID)}")
    assert (code_of(exc), read(exc).id, read(exc).trust) == ("NODE.IO", ID, Trust.CHECKSUMMED)
    assert classify(exc).code == "NODE.IO"


def test_a_code_below_is_read_from_the_remote_traceback(submit: Submit) -> None:
    """Pickling drops a cause; what the pools put in its place is the traceback's text, with the token."""
    exc = submit(children.chained_worker)
    assert type(exc) is RuntimeError
    assert (code_of(exc), read(exc).id) == ("WEIGHTS.REFIT_ABORTED", ID)
    by_thread = isinstance(exc.__cause__, CodedError)
    assert read(exc).trust is (Trust.STRUCTURED if by_thread else Trust.CHECKSUMMED)
    assert classify(exc).code == "WEIGHTS.REFIT_ABORTED"


def test_what_was_being_handled_does_not_lend_its_name_through_a_pool_either(submit: Submit) -> None:
    """In one process it does not (test_read). The remote traceback's text holds it above the line
    "During handling of the above exception, another exception occurred"."""
    exc = submit(children.handling_worker)
    assert type(exc) is ValueError
    assert code_of(exc) is None


# -- only text arrives


def test_a_result_that_cannot_be_pickled_is_text_with_its_token(context: Any) -> None:
    with context.Pool(1) as pool:
        exc = failing(lambda: pool.apply_async(children.unpicklable_result).get(LIMIT))
        pool.close()
        pool.join()
    assert isinstance(exc, multiprocessing.pool.MaybeEncodingError)
    assert (code_of(exc), read(exc).id, read(exc).trust) == ("NODE.IO", ID, Trust.CHECKSUMMED)
    assert classify(exc).code == "NODE.IO"


@pytest.mark.parametrize(
    ("kind", "code"), [(children.RefusesToBePickled, "NODE.IO"), (children.HoldsALock, "TASK.UNSERIALIZABLE")]
)
def test_a_pool_tells_of_an_unpicklable_exception_why_it_is_that(
    context: Any, kind: type[Exception], code: str
) -> None:
    """Its own text is lost. The reason's token is read; without one, TASK.UNSERIALIZABLE is what it is."""
    with context.Pool(1) as pool:
        exc = failing(lambda: pool.apply_async(children.plain_worker, (kind, "it broke")).get(LIMIT))
        pool.close()
        pool.join()
    assert isinstance(exc, multiprocessing.pool.MaybeEncodingError)
    assert "it broke" not in str(exc)
    assert classify(exc).code == code


@pytest.mark.parametrize(
    ("kind", "code"), [(children.RefusesToBePickled, "NODE.IO"), (children.HoldsALock, None)]
)
def test_an_executor_raises_why_an_exception_cannot_be_pickled(
    context: Any, kind: type[Exception], code: str | None
) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        exc = failing(lambda: executor.submit(children.plain_worker, kind, "it broke").result(LIMIT))
    assert type(exc) is (RuntimeError if code else TypeError)
    assert code_of(exc) == code


# -- a worker that dies


def test_a_killed_worker_is_a_crashed_worker(context: Any) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        exc = failing(lambda: executor.submit(children.killed_worker).result(LIMIT))
        assert isinstance(exc, BrokenProcessPool)
        assert code_of(exc) is None
        assert classify(exc).code == "TASK.WORKER_CRASHED"
        # The pool is broken for good: what is submitted later fails the same way.
        later = failing(lambda: executor.submit(children.coded_worker, 1))
        assert classify(later).code == "TASK.WORKER_CRASHED"


def test_a_pool_whose_initializer_fails_is_a_crashed_worker() -> None:
    with concurrent.futures.ThreadPoolExecutor(1, initializer=children.fail) as executor:
        exc = failing(lambda: executor.submit(children.exit_0).result(LIMIT))
    assert isinstance(exc, BrokenThreadPool)
    assert classify(exc).code == "TASK.WORKER_CRASHED"
    gc.collect()


def test_a_process_of_ones_own_has_an_exit_status(context: Any) -> None:
    from protocol.carriers.exit_status import read_status

    process = context.Process(target=children.killed_worker)
    process.start()
    process.join(LIMIT)
    assert process.exitcode is not None
    found = read_status(process.exitcode)
    assert (found.code, found.data) == ("TASK.PROCESS_KILLED", {"signal": "SIGKILL"})
