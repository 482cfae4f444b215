"""Split-Mix's second dimension (Hong et al., ICLR 2022): equations 1 and 2, algorithm 4, joint
width and robustness.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fedquilt as fq
from fedquilt import noise
from fedquilt.errors import ConfigError, DataError
from fedquilt.family.dual import DualNorm
from fedquilt.family.ensemble import Ensemble
from fedquilt.family.net import Pass
from fedquilt.methods import FedAvg, FedProx, HeteroFL, SHeteroFL, SplitMix
from fedquilt.models import PreResNet
from fedquilt.round.eval_jobs import EvalSpec
from fedquilt.round.federation import World
from fedquilt.round.training.adversarial import Adversarial
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import MaskedCrossEntropy, TaskLoss
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient
from fedquilt.runs.experiment import Experiment
from fedquilt.terms import Budget, Client, Job, Submodel
from tests.conftest import LOCAL, Perceptron, assert_same, with_local

SHARES = (1.0, 0.5, 0.25)
PLAIN = fq.LocalTraining(batch_size=8, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.0))
AT = fq.attacks.AdversarialTraining


def _net() -> nn.Module:
    return PreResNet((1, 1), 4, 1, widths=(4, 8))


@cache
def _family(dual: bool) -> fq.Family:
    return fq.trace(fq.dual(_net) if dual else _net, torch.zeros(2, 1, 6, 6))


@pytest.fixture
def pairs() -> fq.Family:
    """The residual net with dual norms."""
    return _family(True)


@pytest.fixture
def single() -> fq.Family:
    return _family(False)


@pytest.fixture
def images(make_data):
    """Data between 0 and 1."""

    def made(family, sizes, **options):
        data = make_data(family, sizes, **options)
        return replace(data, inputs=data.inputs.sigmoid(), test_inputs=data.test_inputs.sigmoid())

    return made


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """The same with all its weights and statistics moved, no two norms alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.is_floating_point():
                value.add_(
                    torch.rand(value.shape, generator=generator, dtype=value.dtype), alpha=0.3
                )
    return module


def by_hand(loss, inputs, drawn, attack):
    """Madry et al. 2018 with plain autograd."""
    x = (inputs + attack.eps * (2 * drawn - 1)).clamp(attack.low, attack.high)
    for _ in range(attack.steps):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(loss(x), x)
        x = (x + attack.step_size * slope.sign()).clamp(
            min=inputs - attack.eps, max=inputs + attack.eps
        )
        x = x.clamp(attack.low, attack.high)
    return x.detach()


# --- equation 2: dual norms ---------------------------------------------------------------------

NETS = {
    "batch": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1), nn.Linear(64, 3)
    ),
    "batch1d": lambda: nn.Sequential(
        nn.Flatten(1), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    ),
    "group": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(1), nn.Linear(64, 3)
    ),
    "layer": lambda: nn.Sequential(
        nn.Flatten(1), nn.Linear(36, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    ),
    "instance": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.Flatten(1),
        nn.Linear(64, 3),
    ),
}


def _of(module: nn.Module, which: str) -> nn.Module:
    """The net with nothing but its clean, or noised, norms."""
    one = NETS_SINGLE[module]()
    state = {name.replace(f".{which}.", "."): value for name, value in module.state_dict().items()}
    one.load_state_dict({name: state[name] for name in one.state_dict()})
    return one


NETS_SINGLE: dict[nn.Module, object] = {}


@pytest.mark.parametrize("kind", NETS)
def test_equation_2_at_0_and_1_is_the_clean_and_the_noised_net_exactly(kind):
    x = torch.rand(4, 1, 6, 6)
    module = shaken(fq.dual(NETS[kind]())).eval()
    NETS_SINGLE[module] = NETS[kind]
    clean, noised = (_of(module, which).eval() for which in ("clean", "noised"))
    assert torch.equal(fq.set_robustness(module, 0)(x), clean(x))
    assert torch.equal(fq.set_robustness(module, 1)(x), noised(x))
    assert not torch.allclose(clean(x), noised(x), atol=1e-3)
    pair = next(layer for layer in module.modules() if isinstance(layer, DualNorm))
    seen: list[torch.Tensor] = []
    pair.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
    fq.set_robustness(module, 0.3)(x)
    torch.testing.assert_close(seen[1], 0.7 * pair.clean(seen[0]) + 0.3 * pair.noised(seen[0]))


@pytest.mark.parametrize("kind", NETS)
def test_dual_norms_start_equal_and_the_module_is_left_alone(kind):
    x, module = torch.rand(4, 1, 6, 6), NETS[kind]()
    names = list(module.state_dict())
    both = fq.dual(module).eval()
    assert list(module.state_dict()) == names
    for robustness in (0, 0.5, 1):
        torch.testing.assert_close(fq.set_robustness(both, robustness)(x), module.eval()(x))


def test_a_norm_used_twice_is_one_pair_and_a_transformer_avoids_fused_kernels():
    norm = nn.LayerNorm(8)
    both = fq.dual(nn.Sequential(norm, nn.Linear(8, 8), norm))
    assert both[0] is both[2]
    assert isinstance(fq.dual(norm), DualNorm)
    layer = shaken(
        fq.dual(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    ).eval()
    x = torch.rand(2, 5, 8)
    with torch.no_grad():
        clean, noised = (fq.set_robustness(layer, robustness)(x) for robustness in (0, 1))
    assert not torch.allclose(clean, noised, atol=1e-3)


@pytest.mark.parametrize("name", ["residual", "digits_cnn_norm"])
def test_both_norms_have_the_axes_of_the_one_they_were(name, single, pairs):
    if name == "residual":
        one, both = single, pairs
    else:
        factory, example = fq.models.MODELS[name].factory, torch.zeros(2, 3, 28, 28)
        one, both = (fq.trace(made, example) for made in (factory, fq.dual(factory)))
    norms = [path for path in one.axes if path in one.parts["norm"]]
    for path, dims in one.axes.items():
        if path not in norms:
            assert both.axes[path] == dims
            continue
        layer, leaf = path.rsplit(".", 1)
        assert both.axes[f"{layer}.clean.{leaf}"] == both.axes[f"{layer}.noised.{leaf}"] == dims
    for share in SHARES:
        budget = Budget(share=share)
        member, twin = one.fit(budget), both.fit(budget)
        assert member.widths == twin.widths
        assert one.cost(member).macs == both.cost(twin).macs
        sizes = one.layout.sizes | member.sizes
        learnt = [path for path in norms if path in one.trainable]
        more = sum(int(torch.tensor(one.layout.shape(path, sizes)).prod()) for path in learnt)
        assert both.count(twin) == one.count(member) + more
        assert (
            both.module(twin)(both.example_inputs[0]).shape
            == one.module(member)(one.example_inputs[0]).shape
        )
    assert both.dual
    assert not one.dual


@pytest.mark.parametrize("share", SHARES)
def test_a_pass_chooses_as_the_attribute_of_a_deployed_module_does(share, pairs):
    member = pairs.fit(Budget(share=share))
    module = shaken(pairs.module(member)).eval()
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    x = torch.rand(3, 1, 6, 6)
    for robustness in (0.0, 0.2, 1.0, 0.5):
        outputs, _ = pairs.member(member).net(
            weights, x, Pass(statistics="stored", robustness=robustness)
        )
        torch.testing.assert_close(outputs, fq.set_robustness(module, robustness)(x))


def test_what_cannot_be_chosen_is_refused(single, pairs):
    with pytest.raises(ConfigError, match="Perceptron; it has no norm layer"):
        fq.dual(Perceptron())
    with pytest.raises(ConfigError, match=r"PreResNet has no dual norms .*--set model\.dual=true"):
        fq.set_robustness(single.module(single.whole), 0.5)
    with pytest.raises(ConfigError, match=r"1\.5 was asked for; it must lie in \[0, 1\]"):
        fq.set_robustness(pairs.module(pairs.whole), 1.5)
    for wrong, message in (
        ("a", "'a'"),
        (torch.rand(8), r"a tensor \(8,\)"),
        (float("nan"), "nan"),
        (None, "None"),
    ):
        with pytest.raises(
            ConfigError, match=rf"{message} was asked for; .* one number for all samples"
        ):
            fq.set_robustness(pairs.module(pairs.whole), wrong)
    with pytest.raises(ConfigError, match=r"asked to be robust; .*fq\.dual"):
        SplitMix(robust=True).init(World(single))


# --- the attack ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        fq.attacks.PGD(),
        fq.attacks.PGD(eps=0.3, step_size=0.1),
        fq.attacks.PGD(low=-1, high=2, steps=3),
    ],
    ids=repr,
)
def test_pgd_stays_near_and_in_range_and_raises_the_loss(attack):
    module = shaken(_net()).double().eval()
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(16, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (16,), generator=generator)
    found = attack.on(module, x, y)
    assert float((found - x).abs().max()) <= attack.eps + 1e-12
    assert float(found.min()) >= attack.low
    assert float(found.max()) <= attack.high
    loss = [float(F.cross_entropy(module(one), y).detach()) for one in (x, found)]
    assert loss[1] > loss[0]
    drawn = noise.uniform(torch.tensor(noise.key(0)), x.shape, x.dtype)
    expected = by_hand(lambda inputs: F.cross_entropy(module(inputs), y), x, drawn, attack)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_pgd_takes_modules_that_write_into_themselves_and_samples_of_any_precision():
    module = nn.Sequential(nn.ReLU(inplace=True), shaken(_net())).train()
    x, y = torch.rand(16, 1, 6, 6, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 4
    before, found = x.clone(), fq.attacks.PGD().on(module, x, y)
    assert torch.equal(x, before)
    drawn = noise.uniform(torch.tensor(noise.key(0)), x.shape, x.dtype)
    expected = by_hand(
        lambda inputs: F.cross_entropy(module(inputs.clone()), y), x, drawn, fq.attacks.PGD()
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert all(weight.grad is None for weight in module.parameters())
    with torch.no_grad():
        assert torch.equal(fq.attacks.PGD().on(module, x, y), found)
    once = fq.attacks.PGD(start=False, steps=1)
    finer = once.on(module, x.double(), y)
    assert finer.dtype == torch.float64
    torch.testing.assert_close(finer.float(), once.on(module, x, y), rtol=0, atol=1e-6)


def test_pgd_does_not_move_samples_that_no_slope_reaches():
    x, y = torch.rand(4, 6), torch.zeros(4, dtype=torch.int64)
    assert torch.equal(
        fq.attacks.PGD(start=False).on(nn.Sequential(nn.Flatten(), _Signs()), x, y), x
    )


class _Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0.5).to(x.dtype)


def test_pgd_has_the_papers_numbers():
    """Section 5.2: (ε, n) = (8/255, 7), steps of 2/255, for training, validation and test."""
    attack = SplitMix.preset("robust").attack
    assert (attack.eps, attack.steps, attack.step_size, attack.start) == (8 / 255, 7, 2 / 255, True)
    assert fq.Evaluation().attack == attack


@pytest.mark.parametrize("engine", LOCAL)
def test_data_outside_of_the_range_is_refused(engine, pairs, make_data, language):
    message = (
        r"keeps samples in \[0, 1\]; among the training samples of data are numbers from "
        r"-.*normalize = 'none'"
    )
    method = with_local(FedAvg(), adversarial=AT())
    fleet = fq.Fleet.of((1.0,), 2, 2)
    with pytest.raises(DataError, match=message):
        fq.prepare(method, pairs, make_data(pairs, (6, 6)), fleet, engine)
    wide = with_local(FedAvg(), adversarial=AT(attack=fq.attacks.PGD(low=-9, high=9)))
    run = fq.prepare(
        wide,
        pairs,
        make_data(pairs, (6, 6)),
        fleet,
        engine,
        evaluation=fq.Evaluation(robustness=(0,)),
    )
    with pytest.raises(DataError, match=message):  # the evaluation's own attack
        run.train(1)
    with pytest.raises(
        DataError, match=r"it moves real numbers, and the training samples of data are torch\.int64"
    ):
        fq.prepare(method, language, make_data(language, (6, 6)), fleet, engine)


def test_samples_outside_of_the_range_are_not_moved_into_it():
    module, x, y = _net().eval(), torch.rand(4, 1, 6, 6), torch.zeros(4, dtype=torch.int64)
    message = (
        r"keeps samples in \[0, 1\]; among the samples given are numbers from -[\d.]+ to "
        r"[\d.]+\. Give .*low, high"
    )
    with pytest.raises(DataError, match=message):
        fq.attacks.PGD().on(module, 4 * x - 2, y)
    wide = fq.attacks.PGD(low=-2, high=2)
    assert float((wide.on(module, 4 * x - 2, y) - (4 * x - 2)).abs().max()) <= wide.eps + 1e-6
    with pytest.raises(
        DataError, match=r"it moves real numbers, and the samples given are torch\.uint8"
    ):
        fq.attacks.PGD().on(module, torch.zeros(4, 1, 6, 6, dtype=torch.uint8), y)


# --- equation 1 and algorithm 4 -----------------------------------------------------------------


def start(run, client: int = 0):
    """Return the start of the first attack on a client's first batch, and that batch."""
    engine, data = run.engine, run.data
    job = Job(
        Client(client, Budget(share=1.0), data.size(client)),
        run.method.plan(run.server, Client(client, Budget(share=1.0)), engine.world)[0],
        0,
    )
    rows = engine.batches(job, run.method.learner(job, engine.world))[0]
    key = noise.fold_in(torch.tensor(engine.keys(job)[1]), 0)
    x = data.samples(rows)
    return x, data.targets[rows], noise.uniform(noise.fold_in(key, -3), x.shape, x.dtype)


@pytest.mark.parametrize("masked", ["", "client"])
@pytest.mark.parametrize("base", [1.0, 0.5])
@pytest.mark.parametrize("engine", LOCAL)
def test_algorithm_4_by_hand(engine, base, masked, pairs, images):
    """One batch in plain torch: every base net on ½ CE(clean norms) + ½ CE(attacked, noised norms).

    Where the loss is masked the attack still raises the plain cross-entropy (line 10).
    """
    local = replace(PLAIN, adversarial=AT(), masked=masked)
    method = with_local(SplitMix(base=base, robust=True, rescale_init=False), **vars(local))
    fleet = fq.Fleet.of((1.0,), 1, 1)
    data = images(pairs, (8,), labels=2)  # of four classes
    present = torch.tensor([1.0, 1.0, 0.0, 0.0]) if masked else torch.ones(4)
    run = fq.prepare(method, pairs, data, fleet, engine, precision="fp64")
    x, y, drawn = start(run)
    before = dict(run.server.weights)
    after = run.train(1).server.weights
    member = pairs.fit(Budget(share=base))
    for place in range(method.count):
        scope = f"base{place}/"
        own = {
            name.removeprefix(scope): value
            for name, value in before.items()
            if name.startswith(scope)
        }
        net = pairs.module(member).double().train()
        net.load_state_dict(own, strict=False)
        for pair in (layer for layer in net.modules() if isinstance(layer, DualNorm)):
            pair.clean.track_running_stats = pair.noised.track_running_stats = False
        loss = F.cross_entropy(fq.set_robustness(net, 0)(x) * present, y)  # lines 5 and 6
        fq.set_robustness(net, 1)  # line 7
        attacked = by_hand(
            lambda inputs, net=net: F.cross_entropy(net(inputs), y), x, drawn, method.attack
        )
        (0.5 * (loss + F.cross_entropy(net(attacked) * present, y))).backward()  # lines 12 and 13
        for name, leaf in net.named_parameters():
            torch.testing.assert_close(
                after[scope + name], own[name] - 0.1 * leaf.grad, rtol=0, atol=1e-12
            )


def gradients(family, weight, images, attack=fq.attacks.PGD()):
    local = replace(LocalTraining(), adversarial=AT(weight, attack))
    learner = Learner((Phase(local.build_objective()),), local, 0.1)
    state = {name: value.double() for name, value in family.init(0).items()}
    data = images(family, (8,))
    batch = Batch(data.inputs, data.targets, torch.ones(4, dtype=torch.bool), torch.tensor(5))
    return gradient(
        learner, family.member(family.whole), local.build_objective(), state, Received(state), batch
    )


def test_norms_learn_from_their_own_loss_alone(pairs, images):
    """Clean norms from clean samples, noised ones from attacked samples, all else from both (Figure
    3).
    """
    (both, _), (clean, _), (noised, _) = (
        gradients(pairs, weight, images) for weight in (0.5, 0.0, 1.0)
    )
    for name, value in both.items():
        if ".clean." in name:
            assert not noised[name].any()
        if ".noised." in name:
            assert not clean[name].any()
        torch.testing.assert_close(
            value, 0.5 * clean[name] + 0.5 * noised[name], rtol=0, atol=1e-12
        )
    assert any(clean[name].any() for name in clean if ".clean." in name)
    assert any(noised[name].any() for name in noised if ".noised." in name)


@pytest.mark.parametrize("weight", [0, 0.1, 0.2, 0.3, 0.5, 1])
def test_equation_1_with_single_norms(weight, single, images):
    """FedAvg + adversarial training: (1 − λn)·CE(x) + λn·CE(x + δ)."""
    _, (loss, _) = gradients(single, weight, images)
    data = images(single, (8,))
    net = _net().double().train()
    state = {name: value.double() for name, value in single.init(0).items()}
    drawn = noise.uniform(noise.fold_in(torch.tensor(5), -3), data.inputs.shape, data.inputs.dtype)

    def ce(inputs):
        return F.cross_entropy(functional_call(net, dict(state), (inputs,)), data.targets)

    attacked = by_hand(ce, data.inputs, drawn, fq.attacks.PGD())
    torch.testing.assert_close(
        loss, (1 - weight) * ce(data.inputs) + weight * ce(attacked), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("engine", LOCAL)
def test_without_weight_on_attacked_samples_it_is_standard_training(engine, pairs, images, play):
    data = images(pairs, (8, 8))
    one = play(FedAvg(local=replace(PLAIN, adversarial=AT(0))), pairs, data, engine=engine)
    assert_same(one, play(FedAvg(local=PLAIN), pairs, data, engine=engine))


def test_what_an_attack_takes(pairs, single):
    """Seven steps there and back, and a gradient of either sample: 2·7 + 3 + 3 passes; λn 0 and 1
    need one gradient.
    """
    macs = pairs.cost(pairs.whole).macs
    for weight, passes in ((0.5, 20), (1.0, 17), (0.0, 3)):
        local = LocalTraining(adversarial=AT(weight))
        assert (
            Learner((Phase(local.build_objective()),), local, 0.1).macs(
                pairs.member(pairs.whole), [4, 2]
            )
            == 6 * passes * macs
        )
    method = SHeteroFL(local=LocalTraining(adversarial=AT()))
    job = Job(
        Client(0, Budget(share=1.0), 4),
        method.plan(None, Client(0, Budget(share=1.0)), World(single))[0],
        0,
    )
    nets = [single.fit(Budget(share=share)) for share in method.widths]
    learner = method.learner(job, World(single))
    assert learner.macs(single.member(single.whole), [1]) == 20 * sum(
        single.cost(net).macs for net in nets
    )


def test_robust_runs_track_norms_without_rescaling():
    for name in ("robust", "digits-robust", "cifar10-robust"):
        method = SplitMix.preset(name)
        assert (method.local.scaler, method.rescale_init, method.robust) == (False, False, True)
        assert method.local.norm.name == "tracked"
        assert method.local.adversarial == AT(0.5)
    assert SplitMix.preset("digits-robust").lr(0) == 0.1


# --- engines ------------------------------------------------------------------------------------

RAGGED = (7, 4, 9, 5, 8, 4)
VARIANTS = {
    "splitmix": SplitMix.preset("robust", base=0.25),
    "splitmix-post": SplitMix(local=LocalTraining(norm="post"), base=0.25, robust=True),
    "splitmix-post-own": SplitMix(local=LocalTraining(norm="post-own"), base=0.25, robust=True),
    "splitmix-lbn": with_local(SplitMix.preset("robust", base=0.25), norm="per_client-all"),
    "splitmix-released": with_local(
        SplitMix.preset("cifar10-robust-released", base=0.25), epochs=1
    ),
    "fedavg-evaluation": FedAvg(
        local=LocalTraining(adversarial=AT(search="evaluation"), scaler=True)
    ),
    "fedavg": FedAvg(local=LocalTraining(adversarial=AT(0.3), norm="tracked")),
    "fedprox": FedProx(local=LocalTraining(adversarial=AT(1.0)), mu=0.5),
    "sheterofl": SHeteroFL(local=LocalTraining(adversarial=AT())),
    "heterofl": HeteroFL(local=LocalTraining(adversarial=AT(), masked="client", norm="per_client")),
}


QUICK_VARIANTS = ("splitmix",)  # The others run in `make test-all`.


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_VARIANTS else pytest.param(name, marks=pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_every_layout_gives_the_same_numbers(name, pairs, images, play):
    method = with_local(VARIANTS[name], batch_size=4)
    data = images(pairs, RAGGED, labels=2)
    how = fq.Evaluation(every=0, robustness=(0, 0.5, 1), batch_size=10, clients=3)
    fleet = fq.Fleet.of(SHARES, 6, 6)
    truth = play(method, pairs, data, fleet=fleet, evaluation=how, rounds=1)
    for layout in ("auto", "stack", "alone"):
        run = fq.prepare(method, pairs, data, fleet, "vectorized", precision="fp64", evaluation=how)
        run.engine.layout = layout
        assert_same(truth, run.train(1))


def test_single_norms_give_the_same_numbers(single, images, play):
    method = with_local(FedAvg(), batch_size=4, adversarial=AT(0.2))
    data, how = images(single, RAGGED), fq.Evaluation(every=0, robustness=(0, 0.5))
    truth, other = (play(method, single, data, engine=engine, evaluation=how) for engine in LOCAL)
    assert_same(truth, other)
    assert {"standard", "robust"} <= set(truth.records[-1].grades.metrics)
    # one net, whatever is asked
    assert not any("/" in metric for metric in truth.records[-1].grades.metrics)


# --- joint width and robustness -----------------------------------------------------------------


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "sequential" else name
        for name in LOCAL
    ],
)
def test_every_width_has_every_robustness(engine, pairs, images, play):
    """Figure 7 (c, d): accuracy by share and λ, averaged over users, is that of the deployed
    mixtures.
    """
    attack, robustness = fq.attacks.PGD(start=False), (0.0, 0.2, 1.0)
    method = with_local(SplitMix.preset("robust", base=0.25), batch_size=4, norm="post")
    data = images(pairs, (8,) * 3)
    how = fq.Evaluation(every=0, robustness=robustness, attack=attack, batch_size=6)
    run = play(method, pairs, data, SHARES, engine, evaluation=how)
    metrics = run.records[-1].grades.metrics
    assert {f"{kind}/{one}" for kind in ("standard", "robust") for one in robustness} <= set(
        metrics
    )
    for share in SHARES:
        module = run.deploy(Budget(share=share), robustness=1.0)
        for one in robustness:
            fq.set_robustness(module, one)
            found = []
            for part in run.data.test_parts:
                x, y = run.data.test_samples(part), run.data.test_targets[part]
                attacked = attack.on(module, x, y)
                found.append(
                    [float((module(seen).argmax(1) == y).double().mean()) for seen in (x, attacked)]
                )
            standard, robust = torch.tensor(found, dtype=torch.float64).mean(0).tolist()
            assert metrics[f"standard/{one}"][str(share)] == pytest.approx(standard)
            assert metrics[f"robust/{one}"][str(share)] == pytest.approx(robust)


def test_the_robustness_of_a_deployed_mixture_is_set_without_rebuilding(pairs, images, play):
    method = with_local(
        SplitMix.preset("robust", base=0.25), batch_size=4, optimizer=fq.optimizers.SGD(lr=0.5)
    )
    run = play(method, pairs, images(pairs, (8,) * 3), SHARES)
    x = torch.rand(5, 1, 6, 6, dtype=torch.float64)
    module = run.deploy(Budget(share=0.5), robustness=0.8)
    assert isinstance(module, Ensemble)
    weights = [value.data_ptr() for value in module.parameters()]
    torch.testing.assert_close(module(x), fq.set_robustness(run.deploy(Budget(share=0.5)), 0.8)(x))
    outputs = [fq.set_robustness(module, one)(x) for one in (0, 0.8, 1)]
    assert weights == [value.data_ptr() for value in module.parameters()]
    assert not torch.allclose(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], run.deploy(Budget(share=0.5))(x))  # clean unless asked
    with pytest.raises(ConfigError, match="has no dual norms"):
        play(FedAvg(), _family(False), images(pairs, (8,)), rounds=1).deploy(
            Budget(share=1.0), robustness=0.5
        )


def test_noised_norms_are_calibrated_on_attacked_samples(pairs, images):
    data, attack = images(pairs, (12,)), fq.attacks.PGD(eps=0.5, step_size=0.2, start=False)
    weights = {
        name: value.double() for name, value in pairs.init(3).items() if name in pairs.trainable
    }
    submodel = SplitMix(base=1.0)._base(0, World(pairs))
    found, world = [], World(pairs, precision="fp64")
    for kind in LOCAL.values():
        engine = kind(data, precision="fp64")
        attacking = with_local(FedAvg(), adversarial=fq.attacks.AdversarialTraining(attack=attack))
        found.extend(
            engine.calibrate(fq.methods.api.Federation(world, attacking), [(submodel, weights)], 12)
        )
    assert found[0].keys() == set(pairs.statistics)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    clean = [value for name, value in found[0].items() if ".clean." in name]
    noised = [value for name, value in found[0].items() if ".noised." in name]
    assert not all(torch.allclose(a, b, atol=1e-3) for a, b in zip(clean, noised, strict=True))
    # equal norms that see equal samples
    (same,) = engine.calibrate(
        fq.methods.api.Federation(world, FedAvg()), [(submodel, weights)], 12
    )
    for name, value in same.items():
        if ".clean." in name:
            torch.testing.assert_close(value, same[name.replace(".clean.", ".noised.")])


@pytest.mark.parametrize("robustness", [0.0, 0.3, 1.0])
def test_a_test_attacks_the_net_as_it_is_mixed(robustness, pairs):
    """Through its norms at this λ, not through the clean ones."""
    module, attack = shaken(pairs.module(pairs.whole)).double(), fq.attacks.PGD()
    weights, generator = dict(module.state_dict()), torch.Generator().manual_seed(3)
    x, drawn = (torch.rand(6, 1, 6, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    y, mode = torch.arange(6) % 4, Pass(statistics="batch", robustness=robustness)
    net, kind = pairs.member(pairs.whole).net, EvalSpec((Submodel(pairs.whole),), mode, attack)
    found = kind.inputs(World(pairs), weights, x, y, drawn)
    truth = by_hand(lambda some: F.cross_entropy(net(weights, some, mode)[0], y), x, drawn, attack)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-12)
    other = replace(mode, robustness=1 - robustness)
    assert not torch.equal(
        found,
        by_hand(lambda some: F.cross_entropy(net(weights, some, other)[0], y), x, drawn, attack),
    )


def test_nothing_is_attacked_by_default(pairs, images, play, monkeypatch):
    def refused(*_args):
        raise AssertionError("nobody asked for an attack")

    monkeypatch.setattr(fq.attacks.PGD, "__call__", refused)
    monkeypatch.setattr(fq.attacks.PGD, "check", refused)
    run = play(FedAvg(), pairs, images(pairs, (6, 6)), engine="vectorized")
    assert not any("robust" in metric for metric in run.records[-1].grades.metrics)


# --- runs on disk and settings ------------------------------------------------------------------


def test_a_resumed_run_continues_with_both_norms(tmp_path, pairs, images):
    method = with_local(SplitMix.preset("robust", base=0.5), batch_size=4, norm="tracked")
    data, fleet = images(pairs, (8, 8)), fq.Fleet.of((1.0, 0.5), 2, 2)
    options = {"evaluation": fq.Evaluation(every=0), "precision": "fp64"}
    whole = fq.run(method, pairs, data, fleet, rounds=2, **options)
    fq.run(method, pairs, data, fleet, rounds=1, out=tmp_path / "run", **options)
    resumed = fq.run(
        method, pairs, data, fleet, rounds=2, out=tmp_path / "run", resume=True, **options
    )
    for name, value in whole.server.weights.items():
        assert torch.equal(resumed.server.weights[name], value)
    moved = [
        name
        for name in whole.server.weights
        if ".noised." in name and name.endswith("running_mean")
    ]
    for name in moved:
        other = whole.server.weights[name.replace(".noised.", ".clean.")]
        assert not torch.equal(whole.server.weights[name], other)
    assert moved


SETTINGS = {
    "method": {
        "name": "splitmix",
        "preset": "robust",
        "base": 0.5,
        "local": {"adversarial": {"weight": 0.3}},
    },
    "model": {"name": "tiny_resnet", "dual": True},
    "data": "digits",
    "evaluation": {"robustness": [0, 0.5, 1], "attack": {"steps": 3}},
}


def test_a_file_asks_for_dual_norms_and_attacks():
    import tomllib

    asked = Experiment.of(SETTINGS)
    assert asked.method.local.adversarial == AT(0.3)
    assert asked.evaluation == fq.Evaluation(
        robustness=(0.0, 0.5, 1.0), attack=fq.attacks.PGD(steps=3)
    )
    assert Experiment.of(tomllib.loads(asked.to_toml())) == asked
    data, _ = asked.data.federate(2, 0)
    assert asked.model.trace(data).dual
    with pytest.raises(ConfigError, match="MLP; it has no norm layer"):
        replace(asked.model, name="mlp").trace(data)


def test_attacks_raise_the_plain_cross_entropy_of_the_net_that_is_trained():
    for share in (None, 0.5):
        objective = LocalTraining(masked="client", adversarial=AT()).build_objective(share)
        assert isinstance(objective, Adversarial)
        assert objective.raised == TaskLoss(share)
        assert objective.objective == MaskedCrossEntropy("client", share)


@pytest.mark.parametrize("norm", ["batch", "post"])
def test_sweeps_see_the_same_attacks(norm, pairs, images, play):
    """Tests and calibration as a GPU goes through them, batch after batch of one size."""
    method = with_local(SplitMix.preset("robust", base=0.5), batch_size=4, norm=norm)
    data = images(pairs, (8, 8), tests=40)
    how = fq.Evaluation(every=0, robustness=(0.5,), batch_size=4, per_client=False)
    truth = play(method, pairs, data, (1.0, 0.5), evaluation=how, rounds=1)
    run = fq.prepare(
        method, pairs, data, fq.Fleet.of((1.0, 0.5), 2, 2), precision="fp64", evaluation=how
    )
    run.engine.record = True
    assert_same(truth, run.train(1))
    swept = {spec.attack is not None for spec, *_ in run.engine.evaluator.idle_passes}
    assert swept == {True, False}


def test_every_sample_may_have_a_different_robustness():
    norm = DualNorm(nn.BatchNorm2d(3)).eval()
    with torch.no_grad():
        norm.noised.weight.fill_(2.0)
        norm.noised.bias.fill_(1.0)
    x = torch.randn(3, 3, 2, 2)
    norm.robustness = torch.tensor([0.0, 0.25, 1.0])
    clean, noised = norm.clean(x), norm.noised(x)
    torch.testing.assert_close(
        norm(x), torch.stack([clean[0], 0.75 * clean[1] + 0.25 * noised[1], noised[2]])
    )
