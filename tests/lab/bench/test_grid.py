"""What the benchmark times is what was promised, and nothing twice."""

import re

import pytest

from musigma.lab import bench

SHAPES = {
    (1, 768),
    (64, 768),
    (4096, 1024),
    (2048, 4096),
    (65536, 64),
    (512, 16384),
    (256, 512),
    (32, 64, 56, 56),
    (16, 256, 14, 14),
    (8, 512, 7, 7),
    (2, 32, 16, 56, 56),
}


@pytest.fixture(scope="module")
def cells() -> list[bench.Cell]:
    return bench.full()


def test_no_shape_type_layout_or_direction_is_left_out(cells: list[bench.Cell]) -> None:
    assert {cell.shape for cell in cells} == SHAPES
    for op in (*bench.ROWS, *bench.CHANNELS):
        own = [cell for cell in cells if cell.op == op]
        assert {(cell.dtype, cell.backward, cell.threads) for cell in own} == {
            (dtype, backward, threads)
            for dtype in ("float32", "bfloat16")
            for backward in (False, True)
            for threads in (1, 2)
        }
        assert {cell.channels_last for cell in own} == ({False} if op in bench.ROWS else {False, True})


def test_what_is_fused_is_timed_fused(cells: list[bench.Cell]) -> None:
    variants = {cell.variant for cell in cells}
    assert variants >= {
        "add_layer_norm",
        "add_rms_norm",
        "layer_norm+gelu",
        "rms_norm+silu",
        "batch_norm+relu",
        "batch_norm+silu",
        "batch_norm+add+relu",
        "batch_norm_eval+relu",
        "group_norm+silu",
        "instance_norm+relu",
    }


@pytest.mark.parametrize("grid", [bench.full, bench.quick, bench.everything])
def test_no_cell_is_timed_twice(grid: object) -> None:
    names = [cell.name for cell in grid()]  # type: ignore[operator]
    assert len(set(names)) == len(names)


def test_the_smaller_grids_lie_in_the_whole() -> None:
    whole = set(bench.everything())
    assert set(bench.full()) <= whole
    assert set(bench.quick((1, 2))) <= whole
    assert len(bench.quick()) < 45 < 250 < len(bench.full()) < 420


def test_an_instance_of_one_position_has_no_spread_and_no_cell() -> None:
    assert all(len(cell.shape) > 2 for cell in bench.everything() if cell.op == "instance_norm")


def test_compiling_is_kept_to_named_cells_on_the_most_threads(cells: list[bench.Cell]) -> None:
    compiled = bench.compiled(cells)
    assert 36 <= len(compiled) <= 44
    assert compiled <= set(cells)
    assert {cell.threads for cell in compiled} == {2}
    assert {cell.backward for cell in compiled} == {False, True}
    few = bench.compiled(bench.quick(), quick=True)
    assert 3 <= len(few) <= 8
    assert bench.compiled([]) == frozenset()


def test_a_name_says_what_is_run() -> None:
    cell = bench.Cell("batch_norm", (32, 64, 56, 56), "bfloat16", True, True, "relu", True, 2)
    assert cell.name == "batch_norm+add+relu 32×64×56×56 bfloat16 channels_last forward+backward, 2 threads"
    assert bench.Cell("rms_norm", (1, 768)).name == "rms_norm 1×768 float32 forward, 1 thread"
    assert bench.Cell.from_dict(cell.to_dict()) == cell


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("group_norm*8×512*float32 f*", "group_norm 8×512×7×7 float32"),
        ("group_norm*8x512x7*channels_last*backward", "group_norm 8×512×7×7 float32 channels_last"),
        ("layer_norm", "layer_norm 4096×1024 bfloat16"),
    ],
)
def test_a_pattern_finds_by_the_beginning_of_names(pattern: str, found: str) -> None:
    cells = bench.select(bench.everything(), [pattern])
    assert any(cell.name.startswith(found) for cell in cells)
    assert all(cell.op == pattern.partition("*")[0] for cell in cells)


def test_a_pattern_that_finds_nothing_shows_what_a_name_looks_like() -> None:
    with pytest.raises(
        ValueError, match=re.escape("no cell is called 'no_norm*'; a name looks like 'layer_")
    ):
        bench.select(bench.full(), ["layer_norm*", "no_norm*"])


def test_least_traffic_counts_every_tensor_that_comes_in_or_goes_out() -> None:
    plain = bench.Cell("batch_norm", (4, 4))
    assert [plain.traffic(d) for d in ("forward", "backward")] == [1, 1]
    # x and the residual in, y and the sum out; back dy, dsum and the sum in, one gradient out
    summed = bench.Cell("add_rms_norm", (4, 4))
    assert [summed.traffic(d) * n for d, n in (("forward", 2), ("backward", 3))] == [4, 4]
    # x and what is added in, y out; back x, it and dy in, two gradients out
    tail = bench.Cell("batch_norm", (4, 4), add=True, activation="relu")
    assert [tail.traffic(d) * n for d, n in (("forward", 2), ("backward", 3))] == [3, 5]


def test_statistics_are_counted_by_what_shares_them() -> None:
    shape = (2, 64, 3, 3)
    counted = {op: bench.Cell(op, shape).statistics for op in bench.CHANNELS}
    assert counted == {"batch_norm": 64, "batch_norm_eval": 64, "group_norm": 64, "instance_norm": 128}
    assert bench.Cell("layer_norm", (5, 7)).statistics == 5
    assert bench.Cell("group_norm", (2, 32, 3)).groups == 8
