"""What ops refuse: errors name the argument, the rule and what came; nothing is sent, and nothing is written."""

import json

import pytest
import torch

from graphar.ops.options import Arguments
from graphar.ops.sums import SUM
from tests.ops.refusals import GOLDEN, communicators, message_of, refusals

MESSAGES = json.loads(GOLDEN.read_text())
pytestmark = pytest.mark.filterwarnings("ignore:.*quant.*:UserWarning")


@pytest.fixture(scope="module")
def by_name():
    with communicators() as both:
        rows = refusals(*both)
        assert len({one.name for one in rows}) == len(rows)
        yield {one.name: one for one in rows}


def outputs(call):
    out = call.keywords.get("out")
    return [one for one in (out if isinstance(out, list) else [out]) if isinstance(one, torch.Tensor) and one.is_cpu]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_call_that_breaks_a_rule_is_refused_by_name_and_writes_nothing(by_name, name):
    argument, error, call = by_name[name][1:]
    before = [out.clone() for out in outputs(call)]

    found = message_of(by_name[name])

    assert found.startswith(f"{error.__name__}: ")
    assert argument in found
    assert found == MESSAGES[name]
    assert all(map(torch.equal, outputs(call), before))


def test_every_refusal_has_its_message_in_the_golden_file(by_name):
    """`python -m tests.ops.refusals` writes it."""
    assert set(by_name) == set(MESSAGES)


def test_an_argument_that_an_op_does_not_have_can_be_neither_passed_nor_read():
    arguments = Arguments(SUM.complete({"order": "tree"}))

    assert (arguments.order, arguments.codec) == ("tree", "")
    with pytest.raises(AttributeError):
        _ = arguments.sizes
    with pytest.raises(TypeError, match="allreduce has no argument 'sizes'"):
        SUM.complete({"sizes": [1]})
