"""What an engine does when there has been nothing to do for a while."""

from __future__ import annotations

import gc

import llguidance
import pytest

from helpers.engine_driver import Driver
from helpers.tiny_vocabulary import vocabulary
from noria.errors import BackendError
from noria.worker.grammar import Grammars


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_engine_lets_the_worker_forget_who_ended(depth):
    driver = Driver(depth=depth)
    driver.submit(1, range(20))
    driver.run()
    driver.core.tidy()
    assert driver.executor.plans[-1].released.tolist() == [0]
    told = len(driver.executor.plans)
    driver.core.tidy()
    assert len(driver.executor.plans) == told
    driver.submit(2, range(20))
    driver.run()
    assert driver.tokens(2) == driver.tokens(1)
    driver.submit(3, range(9))
    driver.core.tidy()  # not idle: nothing is done
    driver.run()
    assert driver.finish(3).reason == "length"


def test_grammars_that_nobody_holds_are_forgotten():
    grammars = Grammars(317)
    grammars.load(vocabulary())
    text = llguidance.LLMatcher.grammar_from_regex("[ab]+")
    held = grammars.compile(text).result()
    grammars.forget()
    assert grammars.find(text) is held
    assert grammars.compile(text).result() is held  # still there, though not kept
    grammars.forget()
    del held
    gc.collect()
    with pytest.raises(BackendError, match="not compiled"):
        grammars.find(text)
    assert grammars.compile(text).result().text == text
    grammars.close()
