"""`python -m ppo_kernels.doctor`: what runs here, and a self-check. `--levels` lists the native levels that run."""

from __future__ import annotations

import platform
import sys

import torch

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, native, ops


def report() -> list[str]:
    """The environment, one fact per line."""
    levels = ", ".join(native.runnable_levels()) or "none"
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    cpu = f"native ({native.level()})" if ops.CPU_BACKEND == "native" else ops.CPU_BACKEND
    gpu = "Triton kernels" if ops.GPU_BACKEND == "triton" else "plain PyTorch"
    return [
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}",
        f"native libraries: built {', '.join(native.built_levels()) or 'none'}; runnable here {levels}",
        f"CPU tensors: {cpu}, {torch.get_num_threads()} threads",
        f"CUDA device: {cuda}; its tensors: {gpu}; tensors of other devices: plain PyTorch",
    ]


def self_check() -> None:
    """A small loss, its gradient and a GAE against the float64 reference; AssertionError when they disagree."""
    torch.manual_seed(0)
    logits = torch.randn(6, 1000) * 3
    tokens, old, advantages = torch.randint(1000, (6,)), torch.randn(6) - 7, torch.randn(6)
    config = PPOLossConfig(entropy_coef=0.1, dual_clip=3.0)
    grads = []
    for x in (logits, logits.double()):
        x.requires_grad_()
        fused_ppo_loss(x, tokens, old.to(x.dtype), advantages.to(x.dtype), config=config).loss.backward()
        assert x.grad is not None
        grads.append(x.grad.double())
    error = float((grads[0] - grads[1]).norm() / grads[1].norm())
    assert error < 2e-6, f"gradient differs from float64 by {error:.1e}"
    rewards, values = torch.randn(3, 50), torch.randn(3, 50)
    exact = gae(rewards.double(), values.double(), gamma=0.99).advantages
    error = float((gae(rewards, values, gamma=0.99).advantages - exact).abs().max())
    assert error < 1e-5, f"advantages differ from float64 by {error:.1e}"


def main() -> None:
    if "--levels" in sys.argv[1:]:
        print("\n".join(native.runnable_levels()))
        return
    print("\n".join(report()))
    self_check()
    print("self-check passed")


if __name__ == "__main__":
    main()
