"""Codecs: bytes that are really packed, exact sizes, unbiased values (Konečný et al. 2016; ProgFed,
Table 10).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.round.federation import World
from fedquilt.round.link import PERFECT, Transmission
from fedquilt.round.link.codec import ChangeSpec, Codec, pack, unpack

LENGTHS = (40, 7, 1, 16)
COUNT = sum(LENGTHS)


def change(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 0.1


def spec_of(values: torch.Tensor, lengths=LENGTHS, arrives=None) -> ChangeSpec:
    shapes = {f"weight {place}": torch.Size([length]) for place, length in enumerate(lengths)}
    return ChangeSpec(shapes, values.dtype, values.device, arrives)


def coded(
    codec: Codec, values: torch.Tensor, seed: int = 3, luck: int = 5, arrives=None
) -> torch.Tensor:
    spec = spec_of(values, arrives=arrives)
    message = codec.encode(values, spec, (seed, luck))
    assert message.dtype == torch.uint8
    return codec.decode(message, spec)


# --- bytes --------------------------------------------------------------------------------------


@given(
    st.sampled_from([2, 4, 8]).flatmap(
        lambda b: st.tuples(st.just(b), st.lists(st.integers(0, 2**b - 1)))
    )
)
def test_packing_has_an_inverse_and_wastes_less_than_a_byte(case):
    bits, numbers = case
    codes = torch.tensor(numbers, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-bits * len(numbers) // 8)
    assert unpack(packed, bits, len(numbers)).tolist() == numbers


def test_the_first_code_is_in_the_lowest_bits():
    assert pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 2).tolist() == [1 + 2 * 4 + 3 * 16]
    assert pack(torch.tensor([1, 2, 3], dtype=torch.uint8), 4).tolist() == [1 + 2 * 16, 3]


@pytest.mark.parametrize("keep", [1.0, 0.25, 0.1])
@pytest.mark.parametrize("bits", [2, 4, 8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sizes_are_exact(bits, keep, dtype):
    codec = Codec(bits, keep)
    values = change(dtype=dtype)
    message = codec.encode(values, spec_of(values), (3, 5))
    seed = 8 if keep < 1 else 0
    header = 2 * 4 * len(LENGTHS) if bits < 32 else 0
    each = dtype.itemsize * 8 if bits == 32 else bits
    assert len(message) == seed + header + -(-each * round(keep * COUNT) // 8)


TABLE_10 = {
    "lq8": 1 / 4,
    "lq4": 1 / 8,
    "lq2": 1 / 16,
    "sp25": 1 / 4,
    "sp10": 1 / 10,
    "lq8+sp10": 1 / 40,
}


@pytest.mark.parametrize("name", TABLE_10)
def test_table_10s_ratios_come_from_parameter_counts(name):
    """ProgFed's 77.10 % becomes 19.28 (LQ-8, SP-25), 9.64, 4.82, 7.71 (SP-10) and 1.93 (both);
    headers come on top.
    """
    codec, count, weights = fq.Link.preset(name).codec, 1_000_000, 10
    values = torch.zeros(count)
    message = codec.encode(values, spec_of(values, [count // weights] * weights), (1, 2))
    header = (8 * weights if codec.bits < 32 else 0) + (8 if codec.keep < 1 else 0)
    assert len(message) == pytest.approx(TABLE_10[name] * 4 * count + header, abs=1)
    table = {"lq8": 19.28, "lq4": 9.64, "lq2": 4.82, "sp25": 19.28, "sp10": 7.71, "lq8+sp10": 1.93}
    assert 77.10 * TABLE_10[name] == pytest.approx(table[name], abs=0.006)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_quantised_value_is_one_of_its_two_neighbours(bits, dtype):
    values = change(dtype=dtype)
    found = coded(Codec(bits), values)
    for mine, theirs in zip(values.split(LENGTHS), found.split(LENGTHS), strict=True):
        step = (mine.max() - mine.min()) / (2**bits - 1)
        assert ((theirs - mine).abs() <= step * (1 + 1e-5) + 1e-8).all()
        levels = (theirs - mine.min()) / step.clamp(min=1e-30)
        assert (levels - levels.round()).abs().max() < 1e-3


def test_a_constant_change_of_a_weight_is_decoded_exactly():
    values = torch.cat(
        [torch.full((length,), float(place)) for place, length in enumerate(LENGTHS)]
    )
    assert torch.equal(coded(Codec(2), values), values)


@pytest.mark.parametrize("keep", [0.25, 0.1])
def test_a_sparse_change_has_an_exact_number_of_values_scaled_up(keep):
    values, codec = change(), Codec(keep=keep)
    found = coded(codec, values)
    kept = found != 0
    assert kept.sum() == round(keep * COUNT)
    torch.testing.assert_close(found[kept], values[kept] * COUNT / round(keep * COUNT))
    assert not torch.equal(kept, coded(codec, values, seed=4) != 0)


@pytest.mark.parametrize("keep", [1.0, 0.25])
@pytest.mark.parametrize("bits", [2, 4, 8, 32])
def test_codecs_are_unbiased(bits, keep):
    """The mean over many draws is within the standard errors of the change: the same weights side
    by side.
    """
    codec, values, draws = Codec(bits, keep), change(), 4000
    spec = spec_of(values, LENGTHS * draws)
    message = codec.encode(values.repeat(draws), spec, (3, 5))
    found = codec.decode(message, spec).view(draws, COUNT)
    score = (found.mean(0) - values) / (found.std(0) / draws**0.5).clamp(min=1e-7)
    assert score.abs().max() < 4.5
    assert score.square().mean() < 1.6  # of 64 standard normal numbers


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8, 32]), st.sampled_from([1.0, 0.5, 0.1]))
def test_values_that_arrive_are_those_of_the_whole_message(seed, bits, keep):
    """Scales, mask and rounding are the whole payload's; the bytes are those of the part that
    arrived.
    """
    codec, values = Codec(bits, keep), change(seed % 1000)
    arrives = torch.rand(COUNT, generator=torch.Generator().manual_seed(seed)) < 0.5
    whole, part = coded(codec, values), coded(codec, values, arrives=arrives)
    assert torch.equal(part, torch.where(arrives, whole, 0.0))
    travels = (coded(Codec(keep=keep), torch.ones_like(values)) != 0) & arrives
    each = 64 if bits == 32 else bits  # float64
    header = (8 if keep < 1 else 0) + (8 * len(LENGTHS) if bits < 32 else 0)
    assert len(codec.encode(values, spec_of(values, arrives=arrives), (3, 5))) == header + -(
        -each * int(travels.sum()) // 8
    )


# --- over a link --------------------------------------------------------------------------------


def trip_of(family, client=0, round=0, up=True) -> Transmission:
    from fedquilt.family.cut import prefix

    job = fq.methods.api.Job(
        fq.methods.api.Client(client, fq.Budget(share=1.0), 1), prefix(family.whole), round
    )
    return Transmission(World(family), job, up=up)


def test_the_change_from_the_received_weights_is_coded(perceptron):
    trip = trip_of(perceptron)
    known = {name: value.double() for name, value in perceptron.init(0).items()}
    moved = {name: value + 1e-3 for name, value in known.items()}
    payload = fq.methods.api.Payload(trip.job.submodel, moved)
    arrival = fq.Link(codec=Codec(bits=2)).up(payload, trip, known)
    for (
        name,
        value,
    ) in arrival.payload.weights.items():  # the change is constant: it needs no level but one
        torch.testing.assert_close(value, moved[name], rtol=0, atol=1e-9)
    assert arrival.bytes == 4 * 8 + -(-2 * 51 // 8)  # four weights, 51 parameters
    assert list(arrival.payload.weights) == list(moved)


def test_tensors_that_cannot_be_coded_are_sent_uncoded(perceptron):
    """Norm statistics and integer buffers are no changes: only what both sides know is coded."""
    trip, weights = trip_of(perceptron), dict(perceptron.init(0))
    known = {name: value for name, value in weights.items() if name != "last.bias"}
    payload = fq.methods.api.Payload(trip.job.submodel, weights)
    arrival = fq.Link(codec=Codec(bits=8)).up(payload, trip, known)
    assert torch.equal(arrival.payload.weights["last.bias"], weights["last.bias"])
    assert arrival.bytes == 3 * 8 + 48 + 3 * 4


def test_downloads_are_coded_on_request(perceptron):
    trip, weights = trip_of(perceptron, up=False), dict(perceptron.init(0))
    payload = fq.methods.api.Payload(trip.job.submodel, weights)
    assert fq.Link(codec=Codec(bits=8)).down(payload, trip, weights).payload is payload
    assert fq.Link(codec=Codec(bits=8, down=True)).down(payload, trip, weights).bytes == 4 * 8 + 51


def test_statistics_travel_whole(residual, make_data, play):
    method = fq.methods.FedAvg(local=fq.LocalTraining(batch_size=4, norm="tracked"))
    run = play(method, residual, make_data(residual, (8,)), link=fq.Link.preset("lq8"), rounds=1)
    numbers = sum(
        value.numel() for name, value in residual.init(0).items() if name in residual.statistics
    )
    weights = len(residual.trainable)
    # fp64
    assert run.records[0].bytes_up == 8 * numbers + 8 * weights + residual.count(residual.whole)
    truth = play(method, residual, make_data(residual, (8,)), rounds=1)
    for name in residual.statistics:
        assert torch.equal(run.server.weights[name], truth.server.weights[name])


def test_every_message_has_different_random_numbers(perceptron):
    keys = {
        trip_of(perceptron, client, round, up).key(what)
        for client, round, up, what in itertools.product(
            range(3), range(3), (False, True), range(3)
        )
    }
    assert len(keys) == 3 * 3 * 2 * 3


# --- error feedback -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", [Codec(2, 1.0, True), Codec(32, 0.1, True), Codec(4, 0.25, True)], ids=str
)
def test_with_feedback_the_sum_of_what_was_sent_tends_to_the_sum_of_changes(codec, perceptron):
    """The residual stays bounded, so that nothing is lost over many rounds.

    Without feedback the error grows.
    """
    known = {
        name: torch.zeros_like(value, dtype=torch.float64)
        for name, value in perceptron.init(0).items()
    }
    draw, rounds = torch.Generator().manual_seed(1), 400
    wanted = {name: torch.zeros_like(value) for name, value in known.items()}
    sent = {name: torch.zeros_like(value) for name, value in known.items()}
    residual = {name: torch.zeros_like(value) for name, value in known.items()}
    owed = []
    for round in range(rounds):
        trip = trip_of(perceptron, round=round)
        drawn = {
            n: 1 + torch.randn(v.shape, generator=draw, dtype=torch.float64)
            for n, v in known.items()
        }
        arrival = fq.Link(codec=codec).up(
            fq.methods.api.Payload(trip.job.submodel, drawn), trip, known, residual
        )
        residual = arrival.error
        for name, value in arrival.payload.weights.items():
            wanted[name] += drawn[name]
            sent[name] += value
        owed.append(max(float(value.abs().max()) for value in residual.values()))
    for name in known:
        torch.testing.assert_close(sent[name] + residual[name], wanted[name], rtol=0, atol=1e-9)
    assert max(owed) < 0.2 * rounds
    assert max(owed[-100:]) < 2 * max(owed[:100])  # it does not grow


def test_feedback_is_kept_by_the_client_and_added_to_its_next_change(perceptron, make_data, play):
    """One client of a plain mean: the server's weights are all it received, moved and was owed."""
    method = fq.methods.FedAvg(
        local=fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.0))
    )
    data, link = make_data(perceptron, (8,)), fq.Link(codec=Codec(bits=2, feedback=True))
    first = play(method, perceptron, data, rounds=1, link=link)
    owed = first.server.memory[0, ""].slots["residual"]
    assert set(owed) == set(perceptron.trainable)
    exact = play(method, perceptron, data, rounds=1)
    for name, weight in exact.server.weights.items():
        torch.testing.assert_close(
            first.server.weights[name] + owed[name], weight, rtol=0, atol=1e-12
        )
        assert owed[name].abs().max() > 0


def test_a_client_that_sends_nothing_codes_nothing(perceptron, make_data, play):
    for link in (
        fq.Link.preset("lq8"),
        fq.Link(loss=fq.links.ColumnLoss(0.5), codec=Codec(8, 0.5, True, True)),
    ):
        run = play(fq.methods.LocalOnly(), perceptron, make_data(perceptron, (5, 5)), link=link)
        assert run.records[0].bytes_up == run.records[0].bytes_down == 0
        truth = play(fq.methods.LocalOnly(), perceptron, make_data(perceptron, (5, 5)))
        assert run.accuracy == truth.accuracy


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, r"Codec: bits = 3 was asked for; it may be 2, 4, 8, 32\."),
        ({"keep": 0.0}, r"Codec: keep = 0.0 was asked for; it must lie in \(0, 1\]\."),
        ({"keep": 1.5}, r"keep = 1\.5"),
    ],
)
def test_impossible_codecs_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Codec(**options)


def test_codecs_without_effect_are_ignored():
    assert fq.Link(codec=Codec()).coder is None
    assert PERFECT.coder is None
    assert fq.Link(codec=Codec(keep=0.5)).coder == Codec(keep=0.5)
