"""Random rotation before quantisation: an orthonormal transform, exact sizes, unbiased values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.round.link import ChangeSpec, Codec
from fedquilt.round.link.coding import check_codec
from fedquilt.round.link.rotation import hadamard, padded, rotate, unrotate

LENGTHS = (40, 7, 1, 16)
PADDED = (64, 8, 1, 16)
COUNT = sum(LENGTHS)
SEED = torch.tensor(3)


def change(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 0.1


def spec_of(values: torch.Tensor, lengths=LENGTHS, arrives=None) -> ChangeSpec:
    shapes = {f"weight {place}": torch.Size([length]) for place, length in enumerate(lengths)}
    return ChangeSpec(shapes, values.dtype, values.device, arrives)


# --- the transform ------------------------------------------------------------------------------


def test_four_values_are_multiplied_by_half_of_sylvesters_matrix():
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    assert torch.equal(hadamard(torch.eye(4)), signs / 2)
    assert hadamard(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[5.0, -1.0, -2.0, 0.0]]
    assert hadamard(torch.tensor([[7.0]])).tolist() == [[7.0]]


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_the_rotation_of_a_tensor_is_an_orthonormal_matrix(length):
    """The columns are the rotated unit vectors. Padding adds rows, so there may be more rows than
    columns.
    """
    columns = [rotate(unit, [length], SEED) for unit in torch.eye(length, dtype=torch.float64)]
    matrix = torch.stack(columns, dim=1)
    assert matrix.shape == (padded(length), length)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(length, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, padded(length) ** -0.5))


def test_each_tensor_is_rotated_alone_and_keeps_its_norm():
    values = change()
    rotated = rotate(values, LENGTHS, SEED)
    assert len(rotated) == sum(PADDED)
    for part, whole in zip(values.split(LENGTHS), rotated.split(PADDED), strict=True):
        torch.testing.assert_close(whole.norm(), part.norm())
    other = values.clone()
    other[:40] = 0
    assert torch.equal(rotate(other, LENGTHS, SEED)[64:], rotated[64:])


def test_the_signs_come_before_the_transform():
    """Other signs mix the values differently. They do not only flip signs of rotated values."""
    values = change()
    rotated = rotate(values, LENGTHS, SEED)
    other = rotate(values, LENGTHS, torch.tensor(4))
    assert not torch.allclose(rotated[:64].abs(), other[:64].abs())


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(-(2**63), 2**63 - 1))
def test_the_inverse_gives_the_change_back(lengths, seed):
    values = torch.randn(
        sum(lengths), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    rotated = rotate(values, lengths, torch.tensor(seed))
    assert len(rotated) == sum(padded(length) for length in lengths)
    found = unrotate(rotated, lengths, torch.tensor(seed))
    torch.testing.assert_close(found, values, rtol=0, atol=1e-14)


# --- the codec ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padded_values_are_sent_too_and_a_seed(bits, dtype):
    values = change(dtype=dtype)
    message = Codec(bits, rotate=True).encode(values, spec_of(values), (3, 5))
    assert len(message) == 8 + 2 * 4 * len(LENGTHS) + -(-bits * sum(PADDED) // 8)


@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 8]),
    st.sampled_from([1.0, 0.5, 0.05]),
    st.sampled_from([0.5, 0.02]),
)
def test_values_that_are_kept_and_arrive_are_rotated_and_no_others(seed, bits, keep, part):
    """Bytes are those of the padded rest of each tensor. Elsewhere the decoded change is zero."""
    codec = Codec(bits, keep, rotate=True)
    values = change(seed % 1000)
    arrives = torch.rand(COUNT, generator=torch.Generator().manual_seed(seed)) < part
    spec = spec_of(values, arrives=arrives)
    message = codec.encode(values, spec, (3, 5))
    plain = Codec(32, keep)
    ones = torch.ones_like(values)
    travels = arrives & (
        plain.decode(plain.encode(ones, spec_of(ones), (3, 5)), spec_of(ones)) != 0
    )
    total = sum(padded(int(mask.sum())) for mask in travels.split(LENGTHS))
    assert len(message) == 8 + 8 * len(LENGTHS) + -(-bits * total // 8)
    found = codec.decode(message, spec)
    assert found[~travels].count_nonzero() == 0
    assert found.isfinite().all()


@pytest.mark.parametrize("keep", [1.0, 0.25])
@pytest.mark.parametrize("bits", [2, 8])
def test_a_rotating_codec_is_unbiased(bits, keep):
    """The mean over many draws is within the standard errors of the change."""
    codec, values, draws = Codec(bits, keep, rotate=True), change(), 4000
    spec = spec_of(values, LENGTHS * draws)
    message = codec.encode(values.repeat(draws), spec, (3, 5))
    found = codec.decode(message, spec).view(draws, COUNT)
    score = (found.mean(0) - values) / (found.std(0) / draws**0.5).clamp(min=1e-7)
    assert score.abs().max() < 4.5
    assert score.square().mean() < 1.6  # of 64 standard normal numbers


def test_a_rotation_spreads_a_large_value_so_that_the_error_shrinks():
    """One value of 1 among values of about 0.01: its range makes the other levels useless at four
    bits.
    """
    values = 0.01 * torch.randn(1024, generator=torch.Generator().manual_seed(0))
    values[17] = 1.0
    spec = spec_of(values, [1024])
    errors = []
    for codec in (Codec(4), Codec(4, rotate=True)):
        found = codec.decode(codec.encode(values, spec, (3, 5)), spec)
        errors.append(float((found - values).norm()))
    assert errors[1] < errors[0] / 4


def test_at_32_bits_nothing_is_rotated():
    values = change()
    spec = spec_of(values)
    assert fq.Link(codec=Codec(rotate=True)).coder is None
    plain, rotating = (
        Codec(keep=0.5, rotate=choice).encode(values, spec, (3, 5)) for choice in (False, True)
    )
    assert torch.equal(plain, rotating)
    assert "rotated" not in str(Codec(keep=0.5, rotate=True))
    assert str(Codec(8, rotate=True)) == "8 bits a value, rotated at random"


@pytest.mark.parametrize(
    "codec",
    [Codec(8, rotate=True), Codec(2, 0.01, rotate=True), Codec(4, feedback=True, rotate=True)],
)
def test_rotating_codecs_pass_the_check_before_a_run(codec, perceptron):
    check_codec(codec, fq.methods.api.World(perceptron), lossy=True)


@pytest.mark.parametrize(
    "codec", [Codec(4, feedback=True, rotate=True), Codec(8, 0.25, feedback=True, rotate=True)]
)
def test_with_feedback_nothing_is_lost_over_many_rounds(codec):
    """Sent values and residual add up to all changes, and the residual does not grow."""
    lengths = [2**14, 100]
    residual = torch.zeros(sum(lengths), dtype=torch.float64)
    wanted = torch.zeros_like(residual)
    sent = torch.zeros_like(residual)
    owed = []
    for round in range(60):
        draw = torch.Generator().manual_seed(round)
        drawn = torch.randn(len(residual), generator=draw, dtype=torch.float64)
        spec = spec_of(drawn, lengths)
        found = codec.decode(codec.encode(drawn + residual, spec, (round, round + 1000)), spec)
        residual = drawn + residual - found
        wanted += drawn
        sent += found
        owed.append(float(residual.norm()))
    torch.testing.assert_close(sent + residual, wanted, rtol=0, atol=1e-9)
    assert max(owed[-20:]) < 1.1 * max(owed[20:40])


def test_two_bits_with_rotation_and_feedback_are_refused_because_errors_grow():
    """The same sums without the check: what is owed grows round after round."""
    with pytest.raises(
        ConfigError,
        match=r"Codec: rotate = True was asked for with feedback and 2 bits; .* 4 or 8 bits",
    ):
        Codec(2, feedback=True, rotate=True)
    codec = Codec(2, rotate=True)
    residual = torch.zeros(2**14)
    spec = spec_of(residual, [2**14])
    owed = []
    for round in range(20):
        drawn = torch.randn(2**14, generator=torch.Generator().manual_seed(round)) + residual
        residual = drawn - codec.decode(codec.encode(drawn, spec, (round, round + 1000)), spec)
        owed.append(float(residual.norm()))
    assert owed[-1] > 4 * owed[0]


def test_bytes_of_a_run_are_those_of_padded_tensors(perceptron, make_data, play):
    method = fq.methods.FedAvg(local=fq.LocalTraining(batch_size=4))
    link = fq.Link(codec=Codec(8, rotate=True, down=True))
    record = play(method, perceptron, make_data(perceptron, (8,)), link=link, rounds=1).records[0]
    sizes = [padded(value.numel()) for value in perceptron.init(0).values()]
    assert sum(sizes) > perceptron.count(perceptron.whole)
    assert record.bytes_up == record.bytes_down == 8 + 8 * len(sizes) + sum(sizes)
