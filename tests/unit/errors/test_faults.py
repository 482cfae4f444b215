"""Errors that fedquilt did not raise itself: a lack of memory, and the line of the user's code."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import NotEnoughMemoryError, TrainingError
from fedquilt.errors.faults import enough_memory, is_out_of_memory, user_line
from fedquilt.methods.api import Fold, Learner, Mean, Phase, TaskLoss, View
from fedquilt.names import said
from tests.conftest import LOCAL

HELP = "smaller batch (method.local.batch_size), fewer clients at once (engine.memory)"


def allocate() -> Tensor:
    """Ask the allocator for more than any address space has."""
    return torch.empty(1 << 60)


def raised(action: Callable[[], object]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "error",
    [
        raised(allocate),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_lack_of_memory_is_reported_with_a_remedy(error: Exception) -> None:
    assert is_out_of_memory(error)
    with pytest.raises(NotEnoughMemoryError) as caught, enough_memory("tracing the model"):
        raise ValueError("something else") from error
    assert "there was not enough memory while tracing the model." in str(caught.value)
    assert HELP in str(caught.value)
    assert "alloc_cpu.cpp" not in str(caught.value)


def test_other_errors_are_unchanged() -> None:
    unsupported = RuntimeError(
        "could not create a primitive descriptor for a convolution forward propagation primitive"
    )
    for error in (
        unsupported,
        RuntimeError("shapes differ"),
        ValueError("out of memory"),
        OSError(errno.ENOENT, "gone"),
    ):
        assert not is_out_of_memory(error)
        with pytest.raises(type(error)) as caught, enough_memory("tracing the model"):
            raise error
        assert caught.value is error


class Greedy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        allocate()


def test_a_lack_of_memory_while_tracing_is_reported() -> None:
    with pytest.raises(
        NotEnoughMemoryError, match=r"while tracing the model\. An allocation of .* failed\. Less"
    ):
        fq.trace(Greedy, torch.zeros(2, 4))


@dataclass(frozen=True)
class GreedyLoss(TaskLoss):
    """A loss that allocates too much for real batches, but not for the two samples of the check
    before a run.
    """

    def __call__(self, view: View) -> Tensor:
        if len(view.targets) > 2:
            allocate()
        return super().__call__(view)


class GreedyClients(fq.methods.FedAvg):
    def learner(self, job: fq.methods.api.Job, world: fq.methods.api.World) -> Learner:
        return replace(super().learner(job, world), phases=(Phase(GreedyLoss()),))


class GreedyMean(Mean):
    def finish(self, server: fq.methods.api.Server) -> object:  # type: ignore[override]
        return allocate()


class GreedyServer(fq.methods.FedAvg):
    def fold(self, server: fq.methods.api.Server, world: fq.methods.api.World) -> Fold:
        return GreedyMean(world.family.cutter, "uniform").begin(server)


@pytest.mark.parametrize("engine", LOCAL)
def test_a_lack_of_memory_in_training_is_reported_with_the_client(
    perceptron, make_data, play, engine
) -> None:
    with pytest.raises(TrainingError) as caught:
        play(GreedyClients(), perceptron, make_data(perceptron, (6, 6)), engine=engine)
    assert "client 0 (budget share 1) ran out of memory in round 1 while training" in str(
        caught.value
    )
    assert HELP in str(caught.value)


def test_a_lack_of_memory_on_the_server_is_reported_with_the_round(
    perceptron, make_data, play
) -> None:
    with pytest.raises(NotEnoughMemoryError, match="while training round 1") as caught:
        play(GreedyServer(), perceptron, make_data(perceptron, (6, 6)))
    assert HELP in str(caught.value)
    assert caught.value.run.server.round == 0


def test_the_innermost_line_of_the_user_is_found() -> None:
    line = user_line(raised(lambda: torch.zeros(2) + torch.zeros(3)))
    assert line.startswith("tests/unit/errors/test_faults.py:")
    assert line.endswith("in <lambda>")
    assert said(raised(lambda: int("x"))).endswith(", in <lambda>)")


def test_errors_of_libraries_have_no_line() -> None:
    assert user_line(ValueError("never raised")) == ""
    assert said(ValueError("never raised")) == "ValueError: never raised"
