"""forget-gate-bias: an LSTM whose forget gates begin differently, or whose bias was set twice.

torch adds b_ih and b_hh, so setting the forget block of both gives twice the value; and every layer and
direction has its own, so setting `bias_hh_l0` leaves the others at 0.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from musigma.init._packing import gate_names
from musigma.init.auditing._facts import local
from musigma.init.auditing._report import Finding
from musigma.init.auditing._scene import Scene, check

_REMEDY = "musigma.init.lstm_forget_bias_(module, value) sets the sum once, in every layer and direction"


@check("forget-gate-bias")
def check_forget_gate(scene: Scene) -> Iterator[Finding]:
    """One finding for every layer and direction whose forget gate begins otherwise than was meant."""
    for path, module in scene.model.named_modules():
        if isinstance(module, nn.LSTM | nn.LSTMCell) and module.bias:
            yield from _judge(path, module)


def _judge(path: str, module: nn.Module) -> Iterator[Finding]:
    blocks = dict(_forget_blocks(module))
    values = {suffix: _value(*pair) for suffix, pair in blocks.items()}
    meant = next((v for v in values.values() if v), None)
    for suffix, (first, second) in blocks.items():
        name = f"{path}.bias_hh{suffix}" if path else f"bias_hh{suffix}"
        each = float(first[0]), float(second[0])
        constant = _constant(first) and _constant(second)
        if constant and each[0] == each[1] != 0:
            said = f"b_ih and b_hh both hold {each[0]:g} for the forget gate, which adds up to {sum(each):g}"
            yield _finding(name, said, sum(each), each[0])
        elif meant is not None and values[suffix] != meant:
            began = values[suffix]
            said = (
                f"the forget gate's bias is {_told(began)} here and {meant:g} in another layer or direction"
            )
            yield _finding(name, said, float((first + second).double().mean()), meant)


def _finding(name: str, said: str, realised: float, expected: float) -> Finding:
    return Finding(
        name,
        f"forget-gate-bias: {said}.",
        {"realised": realised, "expected": expected, "n": 1},
        _REMEDY,
    )


def _told(value: float | None) -> str:
    return "not one number" if value is None else f"{value:g}"


def _forget_blocks(module: nn.Module) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """(suffix of the layer and direction, the forget blocks of its two biases)."""
    size = int(module.hidden_size)  # type: ignore[arg-type]
    start = gate_names(module).index("forget") * size
    for name, bias in module.named_parameters(recurse=False):
        if name.startswith("bias_ih"):
            pair = local(bias), local(module.get_parameter(name.replace("ih", "hh")))
            if not any(b.is_meta for b in pair) and size:
                yield name[7:], (pair[0][start : start + size], pair[1][start : start + size])


def _constant(block: Tensor) -> bool:
    return bool((block == block[0]).all())


def _value(first: Tensor, second: Tensor) -> float | None:
    """The effective bias, if it is one number."""
    return float(first[0] + second[0]) if _constant(first) and _constant(second) else None
