"""The GAE kernels in Triton's interpreter against the float64 reference, in chunks small enough to be crossed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
    pytest.skip("NOT RUN: needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)
pytest.importorskip("triton.language", reason="NOT RUN: triton is not installed")

from interpreter import loop_scan
from triton.runtime.interpreter import ScanOps

from ppo_kernels import reference
from ppo_kernels.triton_kernels import gae_scan

NAN, INF = float("nan"), float("inf")
LENGTHS = [3, 0, 7, 40, 0, 17, 1, 16]
LOOP, CHUNKS = (16, 8, False), (16, 1, True)


@pytest.fixture
def one_by_one(monkeypatch):
    """The interpreter's own scan."""
    monkeypatch.setattr(ScanOps, "generic_scan", loop_scan)


def segments_of(lengths):
    return torch.tensor([0, *np.cumsum(lengths)])


def run(
    shape,
    lengths,
    r,
    v,
    *,
    mask=None,
    boot=None,
    nv=None,
    terminated=None,
    truncated=None,
    mode="skip",
    gamma=0.97,
    lam=0.9,
):
    """gae_scan.gae at this geometry (None: its own), checked against the reference."""
    inputs = (mask, boot, nv, terminated, truncated, segments_of(lengths))
    numbers = (gamma, lam, mode)
    with pytest.MonkeyPatch.context() as patch:
        if shape is not None:
            patch.setattr(gae_scan, "geometry", lambda rows, steps: shape)
        got = gae_scan.gae(r, v, *inputs, *numbers)
    boot, nv = (None if x is None else x.double() for x in (boot, nv))
    want = reference.gae(r.double(), v.double(), mask, boot, nv, terminated, truncated, inputs[-1], *numbers)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float32
        finite = torch.isfinite(y)
        assert torch.equal(torch.isfinite(x), finite)
        scale = max(1.0, float(want[0][torch.isfinite(want[0])].abs().max())) if len(r) else 1.0
        torch.testing.assert_close(x[finite].double(), y[finite], rtol=1e-7, atol=1e-7 * scale)
    return got


def same_bits(x, y):
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(x, y, strict=True))


def draw(lengths, *names):
    n = sum(lengths)
    every = {
        "mask": torch.rand(n) < 0.6,
        "boot": torch.randn(len(lengths)),
        "nv": torch.randn(n),
        "terminated": torch.rand(n) < 0.15,
        "truncated": torch.rand(n) < 0.15,
    }
    return torch.randn(n), torch.randn(n), {name: every[name] for name in names}


@pytest.mark.parametrize("mode", ["none", "skip", "zero", "dense"])
@pytest.mark.parametrize("names", [(), ("boot", "terminated"), ("boot", "nv"), ("nv", "terminated", "truncated")])
def test_every_option_and_nothing_read_where_it_does_not_count(mode, names):
    r, v, options = draw(LENGTHS, *names)
    if mode != "none":
        mask = options["mask"] = torch.rand(len(r)) < 0.6
        mask[10:50] = mask[66:68] = False  # a whole sequence but for its end, and more than a chunk
        if mode != "dense":
            r[~mask], v[~mask] = NAN, INF
        if mode == "skip" and "nv" in names:
            options["nv"][~mask] = NAN
    if "terminated" in names and "nv" in names:
        options["nv"][options["terminated"]] = NAN
    run(LOOP, LENGTHS, r, v, mode="skip" if mode == "none" else mode, **options)


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("skip", ("boot",)),
        ("skip", ("mask", "boot", "terminated")),
        ("zero", ("mask", "nv", "truncated")),
        ("dense", ("mask", "boot", "terminated")),
    ],
)
def test_chunks_give_the_bits_of_the_loop(mode, names):
    lengths = [37, 0, 16, 1]
    r, v, options = draw(lengths, *names)
    if "mask" in names:
        options["mask"][3:35] = False
    chunks = run(CHUNKS, lengths, r, v, mode=mode, **options)
    assert same_bits(chunks, run((16, 2, False), lengths, r, v, mode=mode, **options))


def test_more_chunks_than_are_composed_at_once():
    r, v, options = draw([45, 3], "boot")
    run((4, 1, True), [45, 3], r, v, **options)


@pytest.mark.parametrize(
    "rows_and_steps", [(100, 500), (40, 40 * 30), (9, 9 * 100), (3, 3 * 300), (1, 1030), (1, 9000)]
)
def test_the_geometries_that_are_launched(rows_and_steps):
    rows, steps = rows_and_steps
    block_t, rows_per_program, long = gae_scan.geometry(rows, steps)
    assert block_t * rows_per_program == gae_scan.TILE
    assert long == (steps == 9000)
    lengths = [block_t + 1, 1, block_t, block_t - 1][: max(rows_per_program, 1)]
    r, v, options = draw(lengths, "mask", "boot", "terminated")
    run((block_t, rows_per_program, long), lengths, r, v, **options)


def test_composed_one_by_one(one_by_one):
    r, v, options = draw([5, 9], "mask", "boot", "terminated")
    run((8, 2, False), [5, 9], r, v, **options)


@pytest.mark.parametrize("shape", [LOOP, CHUNKS])
def test_skip_equals_the_run_on_the_compacted_sequence(shape):
    r, v, options = draw([60], "boot")
    mask = torch.rand(60) < 0.5
    mask[20:55] = False
    full = run(shape, [60], r, v, mask=mask, **options)
    short = run(shape, [int(mask.sum())], r[mask], v[mask], **options)
    assert same_bits([x[mask] for x in full], short)
    assert all((x[~mask] == 0).all() for x in full)


def test_a_row_gets_the_same_bits_alone():
    r, v, options = draw(LENGTHS, "mask", "boot")
    batch = run(LOOP, LENGTHS, r, v, **options)
    row = slice(10, 50)
    alone = run(LOOP, [40], r[row], v[row], mask=options["mask"][row], boot=options["boot"][3:4])
    assert same_bits([x[row] for x in batch], alone)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("shape", [LOOP, CHUNKS])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_nothing_crosses_the_end_of_an_episode(shape, bad):
    r, v, options = draw([40], "boot", "terminated")
    options["terminated"][:] = False
    options["terminated"][[12, 39]] = True
    r[30] = options["boot"][0] = bad
    got = run(shape, [40], r, v, **options)
    assert torch.isfinite(got[0][:13]).all()
    assert torch.isfinite(got[0][31:]).all()
    assert not torch.isfinite(got[0][13:31]).any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.0, 0.95), (0.99, 0.0), (0.999, 0.97)])
def test_discounts_keep_their_precision(gamma, lam):
    r, v, options = draw([1500], "boot")
    run((1024, 1, False), [1500], r, v, gamma=gamma, lam=lam, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strided_inputs(dtype):
    r, v = torch.randn(14).to(dtype)[::2], torch.randn(7).to(dtype)
    run(LOOP, [3, 4], r, v, boot=torch.randn(2).to(dtype), mask=(torch.rand(14) < 0.6)[::2])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_steps(lengths):
    got = gae_scan.gae(torch.empty(0), torch.empty(0), *[None] * 5, segments_of(lengths), 0.9, 0.9, "skip")
    assert [x.shape for x in got] == [(0,), (0,)]


@pytest.mark.parametrize("shape", [LOOP, CHUNKS])
def test_segments_that_lie_are_not_followed_out_of_the_tensors(shape):
    r, v, _ = draw([8])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gae_scan, "geometry", lambda rows, steps: shape)
        got = gae_scan.gae(r, v, *[None] * 5, torch.tensor([-(2**40), 5, 2**40]), 0.9, 0.9, "skip")
    assert same_bits(got, run(shape, [5, 3], r, v, gamma=0.9, lam=0.9))


def test_steps_of_no_sequence_are_zero():
    """On a GPU nobody has checked cu_seqlens."""
    r, v = torch.ones(5), torch.zeros(5)
    absent = (None,) * 5
    advantages, returns = gae_scan.gae(r, v, *absent, torch.tensor([0, 3]), 1.0, 1.0, "skip")
    assert advantages.tolist() == returns.tolist() == [3, 2, 1, 0, 0]
