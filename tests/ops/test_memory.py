"""The memory of large results is reused, up to a limit, and can be had back."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from tests.native import RUN
from torch import Tensor

import musigma as ms

MB = 1 << 20
LINUX = pytest.mark.skipif(
    not (RUN and sys.platform == "linux"), reason="results are kept by the native kernels, on Linux"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    ms.ops.empty_cache()
    ms.ops.set_cache_limit(64 * MB)
    yield
    ms.ops.set_cache_limit(256 * MB)


def normalized(rows: int = 1024, width: int = 1024) -> Tensor:
    return ms.functional.rms_norm(torch.ones(rows, width), (width,))


@LINUX
def test_a_freed_result_is_given_out_again() -> None:
    y = normalized()
    at = y.data_ptr()
    assert ms.ops.memory_cached() == 0
    del y
    assert ms.ops.memory_cached() == 4 * MB
    assert normalized().data_ptr() == at


@LINUX
def test_a_living_result_is_not_given_out_again() -> None:
    first = normalized()
    kept = first[:1]
    at, expected = first.data_ptr(), first[:1].clone()
    del first  # the view holds the block
    assert normalized().data_ptr() != at
    ms.ops.empty_cache()
    assert torch.equal(kept, expected)


@LINUX
def test_no_more_is_kept_than_the_limit() -> None:
    ms.ops.set_cache_limit(10 * MB)
    results = [normalized() for _ in range(5)]
    last = results[-1].data_ptr()
    while results:
        del results[0]
    assert ms.ops.memory_cached() == 8 * MB
    assert normalized().data_ptr() == last  # the most recent stays, the oldest goes
    ms.ops.set_cache_limit(3 * MB)
    assert ms.ops.memory_cached() == 0
    del last
    normalized()
    assert ms.ops.memory_cached() == 0  # larger than all that may be kept


@LINUX
def test_everything_can_be_had_back() -> None:
    for width in (1024, 1536, 2048):
        normalized(width=width)
    assert ms.ops.memory_cached() > 0
    ms.ops.empty_cache()
    assert ms.ops.memory_cached() == 0


@LINUX
def test_small_results_are_left_to_malloc() -> None:
    normalized(64, 1024)
    assert ms.ops.memory_cached() == 0


@LINUX
@pytest.mark.parametrize("rows", [256, 300, 1000, 1025, 1151, 4097])
def test_a_block_exceeds_its_tensor_by_no_more_than_an_eighth_or_a_huge_page(rows: int) -> None:
    ms.ops.set_cache_limit(1 << 30)
    normalized(rows)
    size = rows * 1024 * 4
    assert size <= ms.ops.memory_cached() <= max(size * 9 // 8, size + 2 * MB if size > 4 * MB else 0)


@LINUX
def test_results_behave_as_any_tensor() -> None:
    y = normalized()
    y.resize_(2048, 1024)  # grows by the same allocator
    y.fill_(2.0)
    assert y.sum().item() == 2.0 * 2048 * 1024
    assert torch.equal(pickle.loads(pickle.dumps(y)), y)  # our own bytes
    y = normalized().share_memory_()
    assert y.is_shared()
    with torch.inference_mode():
        assert normalized().is_inference()


@LINUX
def test_channels_last_results_keep_their_format() -> None:
    x = torch.randn(4, 64, 64, 64).to(memory_format=torch.channels_last)
    for _ in range(2):
        y = ms.functional.group_norm(x, 8)
        assert y.is_contiguous(memory_format=torch.channels_last)


@LINUX
def test_memory_filled_with_nan_shows_no_gap() -> None:
    x = torch.randn(700, 1001, requires_grad=True)
    image = torch.randn(3, 30, 65, 67, requires_grad=True)
    assert torch.are_deterministic_algorithms_enabled()  # conftest sees to it
    for y, leaf in (
        (ms.functional.layer_norm(x, (1001,)), x),
        (ms.functional.group_norm(image, 5), image),
        (ms.functional.batch_norm(image, None, None, training=True), image),
    ):
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        assert not y.isnan().any()
        assert not dx.isnan().any()


@LINUX
def test_threads_share_what_is_kept() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        x = torch.full((600, 1024), float(seed))
        for _ in range(30):
            y = ms.functional.layer_norm(x, (1024,), bias=x[0])
            if not torch.equal(y, x):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert ms.ops.memory_cached() <= 64 * MB


@LINUX
def test_a_forked_process_has_its_own() -> None:
    at = normalized().data_ptr()  # kept
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        y = torch.empty(0)
        try:
            torch.set_num_threads(1)
            y = ms.functional.rms_norm(torch.ones(1024, 1024), (1024,))
        finally:
            os.write(write, b"same" if y.data_ptr() == at and bool((y - 1).abs().max() < 1e-6) else b"no")
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 8) == b"same"
    os.close(read), os.close(write)


@LINUX
def test_the_profiler_sees_results() -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        y = normalized()
        del y
    sizes = [event.cpu_memory_usage for event in profile.events() if "row_norm" in event.name]
    assert max(sizes, default=0) >= 4 * MB


@pytest.mark.parametrize("limit", [-1, True, 1 << 63])
def test_a_limit_is_a_number_of_bytes(limit: int) -> None:
    with pytest.raises(ValueError, match="number of bytes, 0 for none"):
        ms.ops.set_cache_limit(limit)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "256MB", "²"])
def test_a_wrong_variable_is_named(value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import musigma"],
        env=os.environ | {"MUSIGMA_CACHE_MB": value},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "MUSIGMA_CACHE_MB must be a whole number of megabytes" in done.stderr


@LINUX
def test_the_variable_switches_it_off() -> None:
    script = (
        "import torch, musigma as ms; ms.functional.rms_norm(torch.ones(1024, 1024), (1024,)); "
        "print(ms.ops.memory_cached())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"MUSIGMA_CACHE_MB": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "0"
