"""Peak memory of one PPO loss, forward and backward, beyond its inputs: the high-water mark of a fresh process
(Linux)."""

import json
import multiprocessing
import sys
from pathlib import Path

ROWS, VOCAB = 256, 151936


def _status(key: str) -> int:
    """Bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _measure(contender: str, dtype: str, entropy: bool, result: "multiprocessing.Queue[float]") -> None:
    import torch
    from test_loss import DTYPES, Batch

    from ppo_kernels import PPOLossConfig, fused_ppo_loss

    def run(batch: Batch) -> None:
        given = (batch.logits, batch.tokens, batch.old_logprobs, batch.advantages, batch.mask)
        if contender == "eager":
            import baselines

            baselines.ppo_loss(*given, coef).backward()
        else:
            fused_ppo_loss(*given, config=config, inplace_grad=contender == "ours").loss.backward()

    coef = 0.01 if entropy else 0.0
    config = PPOLossConfig(entropy_coef=coef, return_entropy=entropy)
    run(Batch(8, 64, DTYPES[dtype], 0.0))  # loads code and starts threads
    batch = Batch(ROWS, VOCAB, DTYPES[dtype], 0.0)
    torch.set_num_threads(torch.get_num_threads())
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    run(batch)
    result.put((_status("VmHWM") - before) / batch.saved.numel() / batch.saved.element_size())


def peak(contender: str, dtype: str, entropy: bool) -> float:
    """As a fraction of the logits' size."""
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=_measure, args=(contender, dtype, entropy, result))
    process.start()
    value: float = result.get(timeout=300)
    process.join()
    return value


def table() -> list[dict[str, object]]:
    """One row per contender, dtype and entropy."""
    return [
        {
            "contender": c,
            "dtype": d,
            "entropy": e,
            "rows": ROWS,
            "vocab": VOCAB,
            "peak_over_logits": round(peak(c, d, e), 4),
        }
        for d in ("fp32", "bf16")
        for e in (False, True)
        for c in ("ours", "ours, own gradient", "eager")
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    for row in table():
        print(json.dumps(row))
