"""Layers become others: nothing that they have gets lost, and the model that was handed in stays as it is."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import musigma as ms
from musigma.surgery import freeze, replace, sync, unfreeze, unsync

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SHAPES = {1: (6, 4, 5), 2: (6, 4, 5, 3), 3: (6, 4, 3, 3, 2)}


def used(norm: nn.Module, seed: int = 0) -> nn.Module:
    """A layer with nothing left at its initial value."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, t in (*norm.named_parameters(), *norm.named_buffers()):
            if t.is_floating_point():
                t.copy_(
                    torch.rand(t.shape, generator=g) + 0.5
                    if "var" in name
                    else torch.randn(t.shape, generator=g)
                )
    return norm


class BNRelu(nn.BatchNorm1d):
    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Renamed(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)


def test_public_failure_c58_nested_and_shared_modules_are_replaced() -> None:
    net = nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)), nn.BatchNorm2d(8))
    new, certificate = replace(net, lambda m: isinstance(m, nn.BatchNorm2d), lambda m: nn.GroupNorm(4, 8))
    assert len(certificate.changed) == 2
    assert [type(new[0][1]), type(new[1]), list(new._modules)] == [nn.GroupNorm, nn.GroupNorm, ["0", "1"]]
    assert isinstance(net[0][1], nn.BatchNorm2d)

    shared = nn.BatchNorm2d(8)
    both, certificate = replace(nn.ModuleList([shared, shared]), nn.BatchNorm2d, lambda m: nn.GroupNorm(4, 8))
    assert both[0] is both[1]
    assert certificate.changed == ("0, 1: BatchNorm2d -> GroupNorm",)


def test_replace_the_model_itself_keeps_its_mode_and_does_not_enter_what_it_replaced() -> None:
    new, _ = replace(nn.BatchNorm1d(3).eval(), nn.BatchNorm1d, lambda m: nn.LayerNorm(m.num_features))
    assert isinstance(new, nn.LayerNorm)
    assert not new.training
    block = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU())
    new, certificate = replace(block, (nn.Sequential, nn.ReLU), lambda m: nn.Identity())
    assert isinstance(new, nn.Identity)
    assert certificate.changed == ("the model: Sequential -> Identity",)


def test_a_factory_that_returns_no_module_is_named_and_nothing_changes() -> None:
    net = nn.Sequential(nn.ReLU())
    with pytest.raises(TypeError, match="in place of ReLU, got NoneType"):
        replace(net, nn.ReLU, lambda m: None)  # type: ignore[arg-type,return-value]
    assert isinstance(net[0], nn.ReLU)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("namespace", [nn, ms.nn], ids=["torch", "musigma"])
def test_frozen_is_evaluation_and_stays_so_in_training(dims: int, namespace: object) -> None:
    norm = used(getattr(namespace, f"BatchNorm{dims}d")(4, eps=1e-3, momentum=None))
    net = nn.Sequential(norm)
    x = torch.randn(SHAPES[dims], generator=torch.Generator().manual_seed(1))
    expected = copy.deepcopy(net).eval()(x)
    frozen, certificate = freeze(net, x)
    before = {k: v.clone() for k, v in frozen.state_dict().items()}
    torch.testing.assert_close(frozen.train()(x), expected)
    assert all(torch.equal(v, before[k]) for k, v in frozen.state_dict().items())
    assert list(frozen.parameters()) == []
    assert list(frozen.state_dict()) == list(net.state_dict())
    assert certificate.difference <= certificate.bound
    again, _ = unfreeze(frozen, x)
    assert type(again[0]) is type(norm)
    assert again[0].momentum is None
    again.load_state_dict(frozen.state_dict())
    frozen.load_state_dict(net.state_dict())
    assert not torch.equal(again.train()(x), expected)


def test_public_failure_c59_tiny_variances_and_counters() -> None:
    norm = nn.BatchNorm2d(3).eval()
    norm.running_var.copy_(torch.tensor([1.0, 1e-7, 0.0]))
    norm.running_mean.fill_(0.1)
    norm.num_batches_tracked.fill_(7)
    x = torch.randn(2, 3, 4, 4)
    frozen, _ = freeze(norm, x)
    y = norm(x)
    assert ((frozen(x) - y).abs() / y.abs().amax((0, 2, 3), keepdim=True)).max() < 1e-6
    assert frozen.num_batches_tracked == 7
    frozen.load_state_dict(norm.state_dict(), strict=True)


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4, bias=False),
        nn.LayerNorm(4),
        nn.GroupNorm(2, 4),
        nn.RMSNorm(4),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=lambda m: type(m).__name__,
)
def test_norms_without_statistics_keep_weight_and_bias(norm: nn.Module) -> None:
    norm = used(norm)
    norm.weight.requires_grad_(False)
    x = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    frozen, _ = freeze(nn.Sequential(nn.Conv2d(4, 4, 1), norm), x)
    frozen.train().requires_grad_(True)
    assert [name for name, _ in frozen.named_parameters()] == ["0.weight", "0.bias"]
    again, _ = unfreeze(frozen, x)
    assert {n: p.requires_grad for n, p in again[1].named_parameters()} == {
        n: p.requires_grad for n, p in norm.named_parameters()
    }
    assert repr(again[1]) == repr(norm)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_instance_norm_with_statistics_freezes_by_them(dims: int) -> None:
    kind = getattr(nn, f"InstanceNorm{dims}d")
    norm = used(kind(4, affine=True, track_running_stats=True))
    x = torch.randn(SHAPES[dims], generator=torch.Generator().manual_seed(1))
    frozen, _ = freeze(norm, x)
    torch.testing.assert_close(frozen.train()(x), copy.deepcopy(norm).eval()(x))
    with pytest.raises(ValueError, match="expected"):
        frozen(x[0])  # without a batch dim the channels would be taken for examples
    assert "without a batch dim" in freeze(norm, x[0])[1].refused[0]
    assert type(unfreeze(frozen, x)[0]) is kind


def test_public_failure_c55_subclasses_keep_their_forward_and_the_model_is_left_alone() -> None:
    net = nn.Sequential(BNRelu(3), nn.BatchNorm1d(3)).eval()
    used(net)
    x = torch.randn(8, 3)
    for operation in (sync, freeze):
        new, certificate = operation(net, x)
        assert type(net[1]) is nn.BatchNorm1d
        assert type(new[0]) is BNRelu
        assert new[0](x).min() == 0.0
        torch.testing.assert_close(new(x), net(x))
        assert certificate.refused == ("0: BNRelu has a forward of its own, which would be lost",)


def test_a_subclass_that_computes_nothing_else_is_converted() -> None:
    net = nn.Sequential(Renamed(4))
    new, _ = sync(net, torch.randn(2, 4, 3, 3))
    assert type(new[0]) is ms.nn.SyncBatchNorm
    assert new[0].eps == 1e-3
    assert type(unsync(new)[0][0]) is Renamed


def test_lazy_layers_are_named_or_see_the_example() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d())
    assert "lazy" in sync(net)[1].refused[0]
    assert "lazy" in freeze(net)[1].refused[0]
    x = torch.randn(2, 3, 5, 5)
    state = torch.get_rng_state()
    shared, _ = sync(net, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert (type(shared[1]), shared[1].num_features) == (ms.nn.SyncBatchNorm, 4)
    assert shared[1].num_batches_tracked == 0
    assert type(freeze(net, x)[0][1]) is ms.nn.FrozenBatchNorm2d
    assert isinstance(net[1], nn.LazyBatchNorm2d)


@pytest.mark.parametrize("there_and_back", [(sync, unsync), (freeze, unfreeze)], ids=["sync", "freeze"])
def test_public_failure_c56_nothing_is_forgotten(there_and_back: tuple) -> None:
    norm = used(nn.BatchNorm2d(4, eps=1e-3, momentum=None))
    norm.weight.requires_grad_(False)
    norm(torch.randn(2, 4, 3, 3))
    norm.eval().double()
    heard: list[str] = []
    norm.register_forward_hook(lambda *_: heard.append("after"))
    norm.register_forward_pre_hook(lambda *_: heard.append("before"))
    norm.note = "mine"
    net = nn.ModuleList([norm, norm])
    new: nn.Module = net
    for operation in there_and_back:
        new, _ = operation(new)
        layer = new[0]
        assert new[1] is layer
        assert list(new.state_dict()) == list(net.state_dict())
        assert all(torch.equal(v, net.state_dict()[k]) for k, v in new.state_dict().items())
        assert (layer.training, layer.eps, layer.momentum, layer.note) == (False, 1e-3, None, "mine")
        assert layer.num_batches_tracked == 1
        assert {t.dtype for t in layer.state_dict().values()} == {torch.float64, torch.int64}
        heard.clear()
        layer(torch.randn(2, 4, 3, 3, dtype=torch.float64))
        assert heard == ["before", "after"]
        copy.deepcopy(new)
    assert type(new[0]) is nn.BatchNorm2d
    assert [p.requires_grad for p in new[0].parameters()] == [False, True]


class Listed(nn.Module):
    """Calls its layer through a list, which no walk over registered modules finds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = used(nn.BatchNorm1d(3))
        self.layers = [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_a_layer_that_is_also_held_in_a_list_is_the_same_layer_after() -> None:
    frozen, _ = freeze(Listed(), torch.randn(4, 3))
    assert frozen.layers[0] is frozen.norm
    before = frozen.norm.running_mean.clone()
    frozen.train()(torch.randn(4, 3))
    assert torch.equal(frozen.norm.running_mean, before)


def test_a_frozen_model_is_saved_loaded_and_thawed() -> None:
    frozen, _ = freeze(nn.Sequential(used(nn.BatchNorm1d(3))))
    again, _ = unfreeze(pickle.loads(pickle.dumps(frozen)))
    assert type(again[0]) is nn.BatchNorm1d


def test_what_cannot_be_frozen_is_named() -> None:
    tied = nn.ModuleList([nn.LayerNorm(3), nn.LayerNorm(3)])
    tied[1].weight = tied[0].weight
    assert "tied to 1.weight" in freeze(tied)[1].refused[0]
    assert "track_running_stats=False" in freeze(nn.BatchNorm1d(3, track_running_stats=False))[1].refused[0]
    parametrized = nn.utils.parametrizations.weight_norm(nn.LayerNorm(3))
    assert "parametrized (weight)" in freeze(nn.Sequential(parametrized))[1].refused[0]
    with pytest.raises(ValueError, match=r"got 'encodr\.0'; did you mean 'encoder\.0'"):
        freeze(nn.ModuleDict({"encoder": nn.Sequential(nn.LayerNorm(3))}), where="encodr.0")


def test_layers_are_chosen_by_pattern_and_by_function() -> None:
    net = nn.ModuleDict({"a": nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3)), "b": nn.LayerNorm(3)})
    assert [c.split(":")[0] for c in freeze(net, where="a.*")[1].changed] == ["a.0", "a.1"]
    assert [c.split(":")[0] for c in freeze(net, where=lambda n, m: n.endswith("1"))[1].changed] == ["a.1"]


def test_a_frozen_layer_built_as_one_thaws_by_its_class_or_the_example() -> None:
    assert type(unfreeze(ms.nn.FrozenBatchNorm2d(3))[0]) is ms.nn.BatchNorm2d
    any_dims = nn.Sequential(ms.nn.FrozenBatchNorm(3))
    assert "any number of dims" in unfreeze(any_dims)[1].refused[0]
    thawed, _ = unfreeze(any_dims, torch.randn(2, 3, 4))
    assert type(thawed[0]) is ms.nn.BatchNorm1d
    assert [p.requires_grad for p in thawed.parameters()] == [True, True]
    thawed.train()(torch.randn(2, 3, 4))
    assert thawed[0].num_batches_tracked == 1


def test_unsync_reads_the_dims_off_the_example() -> None:
    net = nn.Sequential(used(nn.SyncBatchNorm(3, momentum=0.3))).eval()
    assert "any number of dims" in unsync(net)[1].refused[0]
    new, certificate = unsync(net, torch.randn(2, 3, 4, 4, 4))
    assert (type(new[0]), new[0].momentum, hasattr(new[0], "process_group")) == (nn.BatchNorm3d, 0.3, False)
    assert certificate.difference == 0.0


def test_shared_statistics_in_half_precision_stay_float32() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3)).bfloat16()
    new, _ = sync(net)
    assert new[0].running_mean.dtype == torch.float32
    assert new[0].weight.dtype == torch.bfloat16
