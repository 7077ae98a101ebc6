"""Recipes that look at the example: LSUV and Admin; and orthogonal convolutions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import musigma as ms


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outputs(net: nn.Module, x: Tensor) -> dict[str, float]:
    """The variance of what every linear and convolutional layer gives."""
    found: dict[str, float] = {}

    def hook(name: str) -> Any:
        return lambda module, args, out: found.__setitem__(name, ms.moments(out.detach(), None).var().item())

    handles = [
        m.register_forward_hook(hook(n))
        for n, m in net.named_modules()
        if hasattr(m, "weight") and m.weight.dim() > 1
    ]
    net(x)
    for handle in handles:
        handle.remove()
    return found


class Shuffled(nn.Module):
    """Runs its layers in another order than it registers them, one of them on a skip path."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(16, 4), nn.Linear(32, 16), nn.Linear(8, 32)
        self.side = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = 30 * torch.sigmoid(self.a(x))
        return self.c(nn.functional.softplus(self.b(y)) + self.side(x))


def test_lsuv_brings_every_layer_to_variance_one_in_execution_order() -> None:
    net = Shuffled()
    x = 3 * draw(256, 8) + 1
    plan = ms.init.initialize(net, x, scheme="lsuv", verify=False)
    assert set(outputs(net, x)) == {"a", "b", "c", "side"}
    for name, var in outputs(net, x).items():
        assert abs(var - 1) <= 0.1, name
        # Orthonormal but for the factor, which the plan has.
        w = getattr(net, name).weight.detach()
        assert plan[f"{name}.weight"].std == pytest.approx(w.square().mean().sqrt().item(), rel=1e-4)
        s = torch.linalg.svdvals(w)
        assert torch.allclose(s, s[0].expand_as(s), rtol=1e-4)
    assert not plan.notes


def test_lsuv_takes_convolutions_norms_and_another_target() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(128, 5),
    )
    x = draw(16, 3, 8, 8)
    state = {n: b.clone() for n, b in net.named_buffers()}
    ms.init.initialize(net, x, scheme=ms.init.Lsuv(std=2.0), verify=False)
    assert all(torch.equal(b, state[n]) for n, b in net.named_buffers())
    assert all(abs(var / 4 - 1) <= 0.1 for var in outputs(net, x).values())


def test_lsuv_depends_on_seed_names_and_example_alone() -> None:
    one, other = Shuffled(), Shuffled()
    for net in (one, other):
        ms.init.initialize(net, draw(64, 8), scheme="lsuv", seed=3, verify=False)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_lsuv_names_what_no_factor_mends() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.g(0 * x) + self.f(5 * torch.tanh(self.f(x)))

    plan = ms.init.initialize(Twice(), draw(64, 6), scheme="lsuv", verify=False)
    notes = "\n".join(plan.notes)
    assert "LSUV: f.weight is used by several layers" in notes
    assert "LSUV: g.weight gives variance 0" in notes


def test_lsuv_leaves_frozen_weights_alone() -> None:
    net = Shuffled()
    net.b.weight.requires_grad_(False)
    before = net.b.weight.clone()
    ms.init.initialize(net, draw(64, 8), scheme="lsuv", verify=False, skip=["c.weight"])
    assert torch.equal(net.b.weight, before)


def test_lsuv_on_a_transformer() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = draw(4, 6, 16)
    ms.init.initialize(layer, x, scheme="lsuv", verify=False)
    found = outputs(layer, x)
    assert abs(found["linear1"] - 1) <= 0.1
    assert abs(found["linear2"] - 1) <= 0.1


class Weighed(nn.Module):
    def __init__(self, width: int = 8, omega: bool = True) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.full((width,), 5.0)) if omega else 1.0
        self.up, self.down, self.norm = nn.Linear(width, 32), nn.Linear(32, width), nn.LayerNorm(width)

    def branch(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.omega * x + self.branch(x))


def test_admin_weighs_the_skip_path_by_what_was_added_before() -> None:
    net = nn.Sequential(*(Weighed() for _ in range(4)))
    x = 2 * draw(512, 8)
    plan = ms.init.initialize(net, x, scheme="admin", verify=False)
    omegas = [layer.omega.detach().clone() for layer in net]
    with torch.no_grad():
        for layer in net:
            layer.omega.fill_(1.0)
        y, total = x, ms.moments(x, None).var().item()
        for i, layer in enumerate(net):
            assert torch.allclose(omegas[i], torch.tensor(math.sqrt(total)), rtol=1e-4)
            assert plan[f"{i}.omega"].mean == pytest.approx(math.sqrt(total), rel=1e-4)
            total += ms.moments(layer.branch(y), None).var().item()
            y = layer(y)


def test_admin_says_where_a_scale_is_missing() -> None:
    net = nn.Sequential(Weighed(), Weighed(omega=False))
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=r"1 residual sums have none \(in 1\); add self.omega"):
        ms.init.initialize(net, draw(4, 8), scheme="admin")
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_delta_orthogonal_keeps_every_feature_map_and_gradient() -> None:
    body = [nn.Conv2d(16, 16, 3, padding=1, padding_mode="circular", bias=False) for _ in range(20)]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 64, 3))
    x = draw(2, 16, 8, 8)
    plan = ms.init.initialize(net, x, scheme="delta_orthogonal", verify=False)
    assert plan["3.weight"].scheme == "delta_orthogonal"
    assert plan["21.weight"].scheme == "normal"
    first = y = body[0](x)
    for layer in body[1:]:
        y = layer(y)
    # The first layer brings the input to variance 1; the others of a linear net have gain 1, in float32.
    assert torch.allclose(y.flatten(1).norm(dim=1), first.flatten(1).norm(dim=1), rtol=1e-3)


def test_delta_orthogonal_keeps_the_variance_where_layers_widen_and_narrow() -> None:
    net = nn.Sequential(
        nn.Conv2d(8, 24, 3, padding=1),
        nn.Conv2d(24, 6, 3, padding=1, groups=2),
        nn.Flatten(),
        nn.Linear(6 * 64, 2),
    )
    x = draw(64, 8, 8, 8)
    ms.init.initialize(net, x, scheme="delta_orthogonal", verify=False)
    for var in list(outputs(net, x).values())[:2]:
        # The output of a Haar matrix on normal numbers, 24,000 and more of them, half of them dependent.
        assert var == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("scheme", ["skipinit", "rezero", "admin", "lsuv", "fixup"])
def test_what_a_recipe_gives_is_what_verification_expects(scheme: str) -> None:
    """Laws that a recipe changes, learned scales among them, are propagated anew."""

    class Scaled(Weighed):
        def __init__(self) -> None:
            super().__init__(32)
            nn.init.ones_(self.omega)
            self.alpha = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.omega * x + self.alpha * self.branch(x)

    net = nn.Sequential(*(Scaled() for _ in range(3)), nn.Linear(32, 5))
    plan = ms.init.initialize(net, draw(256, 32), scheme=scheme)
    assert plan.verification is not None
    assert not plan.verification.missed, str(plan.verification)
