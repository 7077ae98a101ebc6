"""The maps as figures."""

import math
from typing import TYPE_CHECKING

import torch

from musigma.init.meanfield._activations import Activation
from musigma.init.meanfield._critical import critical
from musigma.init.meanfield._curve import curve_of
from musigma.init.meanfield._fixed_points import rest
from musigma.init.meanfield._maps import check_positive, check_variances, correlation_map, next_variance
from musigma.init.meanfield._width import width_interval

if TYPE_CHECKING:
    import plotly.graph_objects as go

_POINTS = 61


def plot_variance_map(
    activation: Activation, *, weight_var: float, bias_var: float = 0.0, top: float | None = None
) -> "go.Figure":
    """q' over q, the diagonal, and where they meet.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        weight_var: σw², the weights' variance times the fan-in, at least 0.
        bias_var: σb², at least 0.
        top: largest q drawn; twice the fixed point, or 4, if None.

    Returns:
        A plotly figure.

    Raises:
        ValueError: a variance is out of range; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.
        ImportError: plotly is not installed; the message says how to install it.

    Example:
        >>> import torch, musigma as ms
        >>> figure = ms.init.meanfield.plot_variance_map("tanh", weight_var=2.0, bias_var=0.1)
        >>> [trace.name for trace in figure.data]
        ['q′', 'q′ = q', 'q* = 0.815']

    References:
        Poole et al. 2016, figure 1.
    """
    check_variances(weight_var=weight_var, bias_var=bias_var)
    curve = curve_of(activation)
    fixed = rest(curve, weight_var, bias_var, 1.0)
    if top is None:
        top = 2 * fixed if 0 < fixed < math.inf else 4.0
    check_positive(top=top)
    q = torch.linspace(0.0, top, _POINTS, dtype=torch.float64, device="cpu").tolist()
    after = [next_variance(curve, v, weight_var, bias_var) for v in q]
    figure = _figure(f"Variance map of {curve.label}", "q", "q′")
    figure.add_scatter(x=q, y=after, mode="lines", name="q′")
    figure.add_scatter(
        x=[0, top], y=[0, top], mode="lines", name="q′ = q", line={"dash": "dot", "color": "grey"}
    )
    if 0 < fixed <= top:
        figure.add_scatter(x=[fixed], y=[fixed], mode="markers", name=f"q* = {fixed:.3g}")
    return figure


def plot_correlation_map(
    activation: Activation, *, var: float, weight_var: float, bias_var: float = 0.0
) -> "go.Figure":
    """c' over c and the diagonal.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        var: q, positive.
        weight_var: σw², the weights' variance times the fan-in, at least 0.
        bias_var: σb², at least 0.

    Returns:
        A plotly figure.

    Raises:
        ValueError: a variance is out of range; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.
        ImportError: plotly is not installed; the message says how to install it.

    Example:
        >>> import torch, musigma as ms
        >>> figure = ms.init.meanfield.plot_correlation_map("relu", var=1.0, weight_var=2.0)
        >>> round(figure.data[0].y[0], 6), figure.data[0].y[-1]      # c = −1 and 1
        (0.0, 1.0)

    References:
        Poole et al. 2016, figure 2.
    """
    # Denser towards the ends, where a kink's map bends.
    angle = torch.linspace(math.pi, 0.0, _POINTS // 2, dtype=torch.float64, device="cpu")
    c = torch.cos(angle).tolist()
    after = [correlation_map(activation, v, var=var, weight_var=weight_var, bias_var=bias_var) for v in c]
    figure = _figure(f"Correlation map of {curve_of(activation).label} at q = {var:g}", "c", "c′")
    figure.add_scatter(x=c, y=after, mode="lines", name="c′")
    figure.add_scatter(
        x=[-1, 1], y=[-1, 1], mode="lines", name="c′ = c", line={"dash": "dot", "color": "grey"}
    )
    return figure


def plot_critical(activation: Activation, *, depth: int = 50) -> "go.Figure":
    """Over the standard deviation: the slope of the variance map and the biases' share, where χ = 1.

    Below a share of 0 no bias can help; above a slope of 1 deviations grow. The line is `critical`'s choice.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        depth: layers over which the choice must be stable.

    Returns:
        A plotly figure.

    Raises:
        ValueError: depth below 1; unknown name; φ not finite.
        TypeError: φ is not a fixed elementwise function.
        ImportError: plotly is not installed; the message says how to install it.

    Example:
        >>> import torch, musigma as ms
        >>> figure = ms.init.meanfield.plot_critical("gelu")
        >>> [trace.name for trace in figure.data]
        ['slope dq′/dq', 'bias share σb²/q']

    References:
        Hayou et al. 2019 (critical lines of several activations).
    """
    curve = curve_of(activation)
    stds = [2 ** (k / 8) for k in range(-24, 25)]
    slopes, shares = [], []
    for std in stds:
        point = curve.point(std**2)
        weight_var = 1 / point.slope_square if point.slope_square else math.nan
        slopes.append(weight_var * point.square_rate)
        shares.append(1 - weight_var * point.square / std**2)
    chosen = critical(activation, depth=depth)
    title = f"Points of {curve.label} where χ = 1; critical over {depth} layers: std {chosen.std:.3g}"
    figure = _figure(title, "std of the pre-activation", "")
    figure.add_scatter(x=stds, y=slopes, mode="lines", name="slope dq′/dq")
    figure.add_scatter(x=stds, y=shares, mode="lines", name="bias share σb²/q")
    figure.add_hline(y=1, line={"dash": "dot", "color": "grey"})
    figure.add_hline(y=0, line={"dash": "dot", "color": "grey"})
    figure.add_vline(x=chosen.std)
    figure.update_xaxes(type="log")
    figure.update_yaxes(range=[-1, 2])
    return figure


def plot_width_interval(
    activation: Activation, *, width: int, depth: int, samples: int = 1, coverage: float = 0.999
) -> "go.Figure":
    """The interval of each layer's standard deviation at `critical`, over the layers.

    Args:
        activation: φ: a name, (name, keywords), a callable or an activation module.
        width: units of each layer.
        depth: layers.
        samples: inputs whose mean square is taken together.
        coverage: share of random nets that lie within, layer by layer.

    Returns:
        A plotly figure.

    Raises:
        ValueError: an argument is out of range; unknown name; φ or φ⁴ without an expectation.
        TypeError: φ is not a fixed elementwise function.
        ImportError: plotly is not installed; the message says how to install it.

    Example:
        >>> import torch, musigma as ms
        >>> figure = ms.init.meanfield.plot_width_interval("relu", width=512, depth=10)
        >>> len(figure.data[0].y), figure.data[0].y[0] > figure.data[1].y[0]
        (10, True)

    References:
        Hanin 2018.
    """
    point = critical(activation, depth=depth)
    layers = list(range(1, depth + 1))
    near = [
        width_interval(
            activation,
            width=width,
            depth=layer,
            samples=samples,
            std=point.std,
            weight_var=point.weight_var,
            bias_var=point.bias_var,
            coverage=coverage,
        )
        for layer in layers
    ]
    figure = _figure(f"{curve_of(activation).label} at width {width}", "layer", "std of the pre-activation")
    figure.add_scatter(
        x=layers, y=[n.std[1] for n in near], name="upper", mode="lines", line={"color": "steelblue"}
    )
    figure.add_scatter(
        x=layers,
        y=[n.std[0] for n in near],
        name="lower",
        mode="lines",
        fill="tonexty",
        line={"color": "steelblue"},
    )
    figure.add_scatter(
        x=layers, y=[n.target for n in near], mode="lines", name="target", line={"color": "black"}
    )
    figure.update_yaxes(type="log")
    return figure


def _figure(title: str, x: str, y: str) -> "go.Figure":
    try:
        import plotly.graph_objects as go
    except ImportError as missing:
        raise ImportError("the figure needs plotly: pip install 'musigma[report]'") from missing
    return go.Figure(layout={"title": title, "xaxis_title": x, "yaxis_title": y, "template": "plotly_white"})
