"""Limits of calls in time, with and without progress."""

import _thread
import threading
import time

import pytest

from workbench.base import limits
from workbench.base.limits import call_while_it_moves, call_within


def test_what_takes_too_long_is_told_to_end():
    ended = threading.Event()

    def work():
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    with pytest.raises(TimeoutError, match=r"takes longer than 0\.1 s"):
        call_within(0.1, work)
    assert ended.wait(5)


def test_a_long_wait_is_announced_and_a_short_one_is_not(monkeypatch, capsys):
    monkeypatch.setattr(limits, "NOTICE_S", 0.1)
    assert call_within(5, lambda: "at once", "waiting") == "at once"
    assert capsys.readouterr().err == ""
    assert call_within(5, lambda: time.sleep(0.3), "waiting") is None
    assert capsys.readouterr().err == "waiting (5 s at most)\n"


def test_whatever_moves_on_may_take_longer_than_the_limit():
    arrived = []

    def fetch():
        for _ in range(8):
            time.sleep(0.1)
            arrived.append(1)
        return "all of it"

    assert call_while_it_moves(0.4, fetch, lambda: len(arrived), "") == "all of it"


def test_whatever_computes_moves_on_too(monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr(limits._Call, "count_computed_s", lambda _: next(seconds))
    assert call_while_it_moves(0.2, lambda: time.sleep(0.6), lambda: 0, "") is None


def test_a_thread_that_computes_has_its_seconds_counted():
    computed = threading.Event()
    looked = threading.Event()

    def compute():
        while time.thread_time() < 1.2:
            pass
        computed.set()
        looked.wait(60)

    waiting = limits._Call(looked.wait)
    computing = limits._Call(compute)
    assert computed.wait(60)
    assert (computing.count_computed_s(), waiting.count_computed_s()) == (1, 0)
    looked.set()


def test_what_stands_still_is_given_up_after_a_line_that_says_so(monkeypatch, capsys):
    monkeypatch.setattr(limits, "NOTICE_S", 0.05)
    with pytest.raises(TimeoutError, match=r"nothing has come for 0\.3 s"):
        call_while_it_moves(0.3, threading.Event().wait, lambda: 7, "waiting for it")
    assert capsys.readouterr().err == "waiting for it\n"


def test_ctrl_c_ends_the_wait_and_the_work():
    ended = threading.Event()

    def work():
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call_while_it_moves(30, work, lambda: 0, "")
    assert ended.wait(5)


def test_what_is_raised_is_raised_here():
    for limited in (call_within, lambda seconds, act: call_while_it_moves(seconds, act, int, "")):
        with pytest.raises(KeyError, match="x"):
            limited(5, lambda: {}["x"])
